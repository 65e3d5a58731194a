"""The command data: list, prepare, check, show."""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mambacl.cli.parsing import Parser
from mambacl.errors import UserError
from mambacl.paths import expanded
from mambacl.registry import did_you_mean

if TYPE_CHECKING:
    from mambacl.datasets import DataSet, Domains
    from mambacl.streams import StreamConfig


def data(arguments: Sequence[str]) -> int:
    """list, prepare, check and show data sets: `mambacl data check cifar100 --root DIR`"""
    words = "Lists the data sets, makes a folder hold one, checks it image by image, draws the tasks of a stream."
    parser = Parser(prog="mambacl data", description=words)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("list", help="the data sets, their sizes, what their root holds")
    one = actions.add_parser("prepare", help="make a folder hold a public data set; the same command again continues")
    one.add_argument("name", help="a data set; `mambacl data list` names them")
    one.add_argument("--root", required=True, help="the folder; made where it is missing")
    one.add_argument("--source", action="append", default=[], metavar="FILE|DIR|URL",
                     help="an archive at hand, a folder of them, or another address; can be given again")  # fmt: skip
    one.add_argument("--lists", default=None, metavar="DIR", help="a folder with the public split lists")
    two = actions.add_parser("check", help="read every image; count, find what is missing, damaged or there twice")
    two.add_argument("name", help="a data set; `mambacl data list` names them")
    two.add_argument("--limit", type=int, default=10, help="names shown of each finding")
    two.add_argument("--classes", action="store_true", help="show the counts of every class")
    two.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write everything found there")
    three = actions.add_parser("show", help="the tasks of a stream: classes, counts, and images in one PNG")
    three.add_argument("stream", help="a data set, a preset, a YAML file or a run folder")
    three.add_argument("--out", type=Path, default=None, help="the PNG; NAME-tasks.png here if left out")
    three.add_argument("--skip-bad", action="store_true", help="leave out images that cannot be read")
    three.add_argument("--images", type=int, default=8, help="sample images of each task")
    for action in (two, three):
        action.add_argument("--root", default=None, help="folder with the data set's files; of 'manifest' the file")
        action.add_argument("--tasks", default=None, help="number of tasks, sizes such as 50,10,10, or own")
        action.add_argument("--first-task", type=int, default=None, help="classes in the first task")
        action.add_argument("--order", default=None, help="natural, pilot, mamba-cl, coda-prompt or a file")
        action.add_argument("--order-seed", type=int, default=None, help="seed of that order")
        action.add_argument("--scenario", default=None, help="class, task, or domain: every domain is a task")
    given = parser.parse_args(arguments)
    return {"list": _list, "prepare": _prepare, "check": _check, "show": _show}[given.action](given)


def _list(given: Namespace) -> int:
    from mambacl.datasets import DATASETS, SOURCES

    print(f"{'name':20} {'classes':>7} {'training':>9} {'test':>8}  what it is")
    for name in DATASETS.names():
        source = SOURCES.get(name)
        counts = (source.classes, source.train, source.test) if source else (None, None, None)
        texts = ["" if count is None else f"{count:,}" for count in counts]
        print(f"{name:20} {texts[0]:>7} {texts[1]:>9} {texts[2]:>8}  {source.summary if source else 'of a plug-in'}")
        if source:
            print(f"{'':48}root: {source.layout}")
    print("\n`mambacl data prepare NAME --root DIR` fetches or unpacks one; `mambacl data check` reads it.")
    return 0


def _prepare(given: Namespace) -> int:
    from mambacl.datasets.preparing import missing, prepare

    dataset = prepare(given.name, given.root, given.source, given.lists, lambda line: print(line, flush=True))
    print(f"{len(dataset.class_names):,} classes, {len(dataset.train.labels):,} training and "
          f"{len(dataset.test.labels):,} test images lie in {given.root}.")  # fmt: skip
    if absent := missing(dataset):
        print(
            f"{absent:,} of the images are missing: `mambacl data check {given.name} --root {given.root}` names them."
        )
        return 1
    print(f"Next: mambacl data check {given.name} --root {given.root}")
    return 0


def _check(given: Namespace) -> int:
    from mambacl.datasets import DATASETS, check_dataset
    from mambacl.datasets.checking import Finding
    from mambacl.datasets.preparing import not_public

    if given.limit < 0:
        raise UserError(f"--limit must not be negative, got {given.limit}.")
    dataset = DATASETS.get(given.name)(None if given.root is None else expanded(given.root))
    config = _changed(None, given)
    named = config.own_tasks or given.tasks or config.by_domain
    if not named and not (given.order is given.order_seed is given.first_task is None):
        raise UserError("--order, --order-seed and --first-task say which classes a task has: add --tasks.")
    tasks, domains = _tasks(dataset, config) if named else (None, None)
    if domains is not None:
        dataset, tasks = dataclasses.replace(dataset, tasks=None, domains=domains), None
    report = check_dataset(dataset, given.name, tasks)
    if given.root is not None and (changed := not_public(given.name, given.root)):
        what = f"{len(changed)} of the files {'is' if len(changed) == 1 else 'are'} not those of the public data set"
        report.findings.append(Finding(what, "move them away and prepare it again", changed))
    print("\n".join(report.lines(given.limit, given.classes)))
    if given.json is not None:
        content = {
            "name": report.name, "whole": report.whole, "class_names": report.class_names,
            "train": report.train.tolist(), "test": report.test.tolist(), "tasks": report.tasks,
            "domains": report.domains,
            "findings": [dataclasses.asdict(finding) for finding in report.findings],
        }  # fmt: skip
        text = json.dumps(content, indent=1, ensure_ascii=False)
        given.json.write_text(text, encoding="utf-8", errors="backslashreplace")  # a name that is no Unicode as \\udcXX
    return 0 if report.whole else 1


def _show(given: Namespace) -> int:
    from mambacl.datasets.drawing import draw_tasks
    from mambacl.scenarios import SCENARIOS
    from mambacl.streams import open_data

    if not 1 <= given.images <= 100:
        raise UserError(f"--images must be at least 1 and at most 100, got {given.images}.")
    name, config = _named(given)
    dataset = open_data(dataclasses.replace(config, skip_bad=config.skip_bad or given.skip_bad))
    tasks, domains = _tasks(dataset, config)
    picture, lines = draw_tasks(dataset, tasks, given.images, domains)
    those = f"{len(tasks):,} tasks" if domains is None else f"each of {len(tasks):,} domains"
    print(f"{dataset.name}: {len(dataset.class_names):,} classes in {those}")
    print("\n".join(lines))
    print(f"Evaluation is {config.scenario}-incremental: the model {SCENARIOS[config.scenario]}.")
    path = given.out or Path(f"{name}-tasks.png")
    picture.save(path, format="PNG")
    print(f"Picture: {path}")
    return 0


def _tasks(dataset: DataSet, config: StreamConfig) -> tuple[list[list[int]], Domains | None]:
    """The classes of each task, and the domains where these are the tasks."""
    from mambacl.streams import domains_in_order, tasks_of

    if config.by_domain:
        domains = domains_in_order(dataset, config.order, config.order_seed)
        return [list(range(len(dataset.class_names))) for _ in domains.names], domains
    tasks: Any = "own" if config.own_tasks else config.tasks
    return tasks_of(dataset, tasks, config.order, config.order_seed, config.first_task)[1], None


def _named(given: Namespace) -> tuple[str, StreamConfig]:
    """A stream by the name of a data set or preset, or by the path of a YAML file or run, with the options given."""
    from mambacl.config import preset_names, resolve
    from mambacl.datasets import DATASETS
    from mambacl.streams import StreamConfig
    from mambacl.training.folder import RunFolder

    word = given.stream
    if word in DATASETS.names():
        return word, _changed(StreamConfig(dataset=word), given)
    path = expanded(word)
    if (path / "config.yaml").is_file():
        config = RunFolder(path).config()
    elif word in preset_names() or path.is_file():
        config = resolve(word, {})
    else:
        known = [*DATASETS.names(), *preset_names()]
        raise UserError(f"'{word}' is neither a data set, a preset nor a file.{did_you_mean(word, known)} "
                        f"Known: {', '.join(known)}.")  # fmt: skip
    return config.name, _changed(config.stream, given)


def _changed(config: StreamConfig | None, given: Namespace) -> StreamConfig:
    from mambacl.streams import StreamConfig

    changes: dict[str, Any] = {"root": given.root, "order": given.order, "order_seed": given.order_seed,
                               "first_task": given.first_task, "scenario": given.scenario}  # fmt: skip
    changes = {key: value for key, value in changes.items() if value is not None}
    if given.tasks == "own":
        changes["own_tasks"] = True
    elif given.tasks is not None:
        sizes = given.tasks.strip("[]").split(",")
        if not all(size.strip().isdecimal() for size in sizes):
            raise UserError(f"--tasks takes a number, sizes such as 50,10,10, or own, got '{given.tasks}'.")
        changes["tasks"] = int(sizes[0]) if len(sizes) == 1 else [int(size) for size in sizes]
    return dataclasses.replace(config or StreamConfig(), **changes)
