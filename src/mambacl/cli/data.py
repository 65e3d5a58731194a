"""The command data: list, prepare, check, show."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mambacl.errors import UserError
from mambacl.files import expanded
from mambacl.options import at_least, between
from mambacl.registry import did_you_mean
from mambacl.scenarios import Scenario
from mambacl.status import erase, status

if TYPE_CHECKING:
    from mambacl.data import DataSet, Domains, StreamConfig

Name = Annotated[str, "a data set; `mambacl data list` lists them"]
Root = Annotated[str | None, "folder with the data set's files; for 'manifest', the file"]
Tasks = Annotated[str | None, "number of tasks, sizes such as 50,10,10, or own"]
FirstTask = Annotated[int | None, "classes in the first task"]
Order = Annotated[str | None, "natural, pilot, mamba-cl, coda-prompt or a file"]
OrderSeed = Annotated[int | None, "seed of that order"]
InScenario = Annotated[Scenario | None, "domain: each domain is a task"]


def data_list() -> None:
    """list the data sets, their sizes and the files in their root: `mambacl data list`"""
    from mambacl.data import DATASETS, SOURCES

    print(f"{'name':20} {'classes':>7} {'training':>9} {'test':>8}  what it is")
    for name in DATASETS.names():
        source = SOURCES.get(name)
        texts = [f"{count:,}" for count in source.counts] if source and source.counts else [""] * 3
        print(f"{name:20} {texts[0]:>7} {texts[1]:>9} {texts[2]:>8}  {source.summary if source else 'from a plug-in'}")
        if source:
            print(f"{'':48}root: {source.layout}")
    print("\n`mambacl data prepare NAME --root DIR` downloads and unpacks one; `mambacl data check` checks it.")


def data_prepare(
    name: Name,
    *,
    root: Annotated[str | None, "folder for the data set; created if missing"] = None,
    source: Annotated[list[str] | None, "an archive, a folder of them, or another URL; can be repeated"] = None,
    lists: Annotated[str | None, "folder with the public split lists"] = None,
) -> int:
    """download and unpack a public data set: `mambacl data prepare cifar100 --root data/cifar100`

    After an interruption, the same command continues."""
    if root is None:
        raise UserError("Name the folder for the data set: --root DIR.")
    from mambacl.data.preparing import missing, prepare

    def say(line: str) -> None:
        erase()
        print(line, flush=True)

    dataset = prepare(name, root, source or [], lists, say)
    print(f"{len(dataset.class_names):,} classes, {len(dataset.train.labels):,} training and "
          f"{len(dataset.test.labels):,} test images are in {root}.")  # fmt: skip
    if absent := missing(dataset):
        print(f"{absent:,} images are missing: `mambacl data check {name} --root {root}` lists them.")
        return 1
    print(f"Next: mambacl data check {name} --root {root}")
    return 0


def data_check(
    name: Name,
    *,
    root: Root = None,
    limit: Annotated[int, "number of names to show per finding", at_least(0)] = 10,
    classes: Annotated[bool, "show the counts of every class"] = False,
    json_: Annotated[Path | None, "also write all findings to this file"] = None,
    tasks: Tasks = None,
    first_task: FirstTask = None,
    order: Order = None,
    order_seed: OrderSeed = None,
    scenario: InScenario = None,
) -> int:
    """read all images; find missing, damaged and duplicate ones: `mambacl data check folders --root photos`"""
    from mambacl.data import DATASETS, StreamConfig, check_dataset
    from mambacl.data.checking import Finding
    from mambacl.data.config import TEST_SHARE
    from mambacl.data.few_shot import with_sessions
    from mambacl.data.preparing import not_public

    dataset = DATASETS.get(name)(None if root is None else expanded(root)).with_test_images(TEST_SHARE)
    given = {"first_task": first_task, "order": order, "order_seed": order_seed}
    config = _changed(StreamConfig(), tasks, root=root, scenario=scenario, **given)
    named = config.own_tasks or tasks or config.by_domain or config.few_shot
    if not named and any(value is not None for value in given.values()):
        raise UserError("--order, --order-seed and --first-task need tasks: add --tasks.")
    in_sessions = with_sessions(dataset, config) if config.few_shot else dataset
    classes_of, domains = _tasks(in_sessions, config) if named else (None, None)
    if domains is not None:
        dataset, classes_of = dataclasses.replace(dataset, tasks=None, domains=domains), None
    report = check_dataset(dataset, name, classes_of)
    if root is not None and (changed := not_public(name, root)):
        what = f"{len(changed)} {'file differs' if len(changed) == 1 else 'files differ'} from the public data set"
        report.findings.append(Finding(what, "move them away and prepare the data set again", changed))
    print("\n".join(report.lines(limit, classes)))
    if json_ is not None:
        content = {
            "name": report.name, "whole": report.complete, "class_names": report.class_names,
            "train": report.train.tolist(), "test": report.test.tolist(), "tasks": report.tasks,
            "domains": report.domains,
            "findings": [dataclasses.asdict(finding) for finding in report.findings],
        }  # fmt: skip
        text = json.dumps(content, indent=1, ensure_ascii=False)
        json_.write_text(text, encoding="utf-8", errors="backslashreplace")  # names that are not Unicode become \\udcXX
    return 0 if report.complete else 1


def data_show(
    stream: Annotated[str, "a data set, a preset, a YAML file or a run folder"],
    *,
    root: Root = None,
    out: Annotated[Path | None, "the PNG to write; default: NAME-tasks.png in this folder"] = None,
    images: Annotated[int, "sample images per task", between(1, 100)] = 8,
    skip_bad: Annotated[bool, "leave out images that cannot be read"] = False,
    tasks: Tasks = None,
    first_task: FirstTask = None,
    order: Order = None,
    order_seed: OrderSeed = None,
    scenario: InScenario = None,
) -> None:
    """print the tasks of a stream and draw some of their images: `mambacl data show folders --root photos --tasks 5`

    Prints classes and counts, and writes the images to a PNG."""
    from mambacl.data import open_data
    from mambacl.data.preview import preview_tasks
    from mambacl.scenarios import SCENARIOS

    name, config = _named(stream)
    config = _changed(
        config, tasks, root=root, first_task=first_task, order=order, order_seed=order_seed, scenario=scenario
    )
    dataset = open_data(dataclasses.replace(config, skip_bad=config.skip_bad or skip_bad))
    classes_of, domains = _tasks(dataset, config)
    with status("drawing the images"):
        picture, lines = preview_tasks(dataset, classes_of, images, domains)
    parts = f"{len(classes_of):,} tasks" if domains is None else f"each of {len(classes_of):,} domains"
    print(f"{dataset.name}: {len(dataset.class_names):,} classes in {parts}")
    print("\n".join(lines))
    print(f"Evaluation is {config.scenario}-incremental: the model {SCENARIOS[config.scenario]}.")
    path = out or Path(f"{name}-tasks.png")
    picture.save(path, format="PNG")
    print(f"Picture: {path}")


def _tasks(dataset: DataSet, config: StreamConfig) -> tuple[list[list[int]], Domains | None]:
    """The classes of each task, and the domains if these are the tasks."""
    from mambacl.data.tasks import tasks_or_domains

    return tasks_or_domains(dataset, config.scenario, *config.cut)[1:]


def _named(word: str) -> tuple[str, StreamConfig]:
    """A stream, from the name of a data set or preset, or the path of a YAML file or run folder."""
    from mambacl.config import preset_names, resolve
    from mambacl.data import DATASETS, StreamConfig
    from mambacl.training.folder import RunFolder

    if word in DATASETS.names():
        return word, StreamConfig(dataset=word)
    path = expanded(word)
    if (path / "config.yaml").is_file():
        config = RunFolder(path).config()
    elif word in preset_names() or path.is_file():
        config = resolve(word, {})
    else:
        known = [*DATASETS.names(), *preset_names()]
        raise UserError(f"'{word}' is neither a data set, a preset nor a file.{did_you_mean(word, known)} "
                        f"Known: {', '.join(known)}.")  # fmt: skip
    return config.name, config.stream


def _changed(config: StreamConfig, tasks: str | None, **given: Any) -> StreamConfig:
    changes = {key: value for key, value in given.items() if value is not None}
    if tasks == "own":
        changes["own_tasks"] = True
    elif tasks is not None:
        sizes = tasks.strip("[]").split(",")
        if not all(size.strip().isdecimal() for size in sizes):
            raise UserError(f"--tasks takes a number, sizes such as 50,10,10, or own, got '{tasks}'.")
        changes["tasks"] = int(sizes[0]) if len(sizes) == 1 else [int(size) for size in sizes]
    return dataclasses.replace(config, **changes)
