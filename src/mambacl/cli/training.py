"""Commands that train and what goes on from there: train, resume, evaluate."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mambacl.cli.parsing import Parser, check_options, with_underscores
from mambacl.cli.status import status
from mambacl.errors import UserError
from mambacl.log import logger

if TYPE_CHECKING:
    from mambacl.training.api import Run

REPORTS_AFTER = 10.0  # seconds


def train(arguments: Sequence[str]) -> int:
    """train a preset or file: `mambacl train demo --method sequential --training.lr 1e-3`"""
    from jsonargparse import ArgumentError

    from mambacl.config import build_parser, preset_names, readable, resolve
    from mambacl.methods.registry import METHODS

    parser = build_parser()
    parser.usage = (
        "mambacl train [PRESET or FILE] [--compare METHOD[,METHOD]] [--overwrite] [--skip-bad] [--key value ...]"
    )
    parser.add_argument("preset", nargs="?", help=f"a preset ({', '.join(preset_names())}) or the path of a YAML file")
    parser.add_argument("--compare", default=None, help="further methods, with commas, to train on the same stream")
    parser.add_argument("--overwrite", action="store_true", help="train anew where the run folder holds a run already")
    words = "leave out images that cannot be read, and say which: --stream.skip_bad true"
    parser.add_argument("--skip-bad", action="store_true", help=words)
    if "-h" in arguments or "--help" in arguments:
        print(re.sub(r"\n  --\S+ CONFIG\s+Path to a configuration file\.", "", parser.format_help()))
        return 0
    arguments = with_underscores(arguments, parser)
    check_options(arguments, parser)
    try:
        given = parser.parse_args(list(arguments), defaults=False).as_dict()
    except ArgumentError as error:
        raise readable(error) from None
    preset, compare, overwrite = given.pop("preset", None), given.pop("compare", None), given.pop("overwrite", False)
    if given.pop("skip_bad", False):
        given["stream"] = {**given.get("stream", {}), "skip_bad": True}
    if preset is None and not given:
        raise UserError(f"Say what to train: a preset ({', '.join(preset_names())}), a YAML file, or options.")
    first = resolve(preset, given)
    methods = [first.method, *(name.strip() for name in (compare or "").split(",") if name.strip())]
    methods = list(dict.fromkeys(methods))
    if len(methods) > 1 and first.out:
        given["out"] = None  # --out is the folder of all of them then
    configs = []
    for method in methods:
        out = str(Path(first.out) / method) if first.out and len(methods) > 1 else first.out
        configs.append(resolve(preset, {**given, "method": method, "out": out}))
        METHODS.check(method)  # a mistake in the last is found before the first is trained
    run_training = _loaded([f"{c.name} with {c.method} on {c.backbone}, to {c.folder}" for c in configs])
    try:
        runs = [run_training(config, overwrite=overwrite) for config in configs]
    except KeyboardInterrupt:
        if len(configs) > 1:
            print("mambacl: the same command again continues the whole comparison.", file=sys.stderr)
        raise
    return _show(runs, first)


def _loaded(work: list[str]) -> Callable[..., Run]:
    """`mambacl.train`. What is going to be done is said first, because loading PyTorch takes seconds."""
    for words in work:
        logger.info("Training %s", words)
    with status("loading PyTorch"):
        from mambacl.training.api import train as run_training
    # What draws the report takes a second or two to load: while a GPU works, and not when all wait for the report.
    loading = threading.Timer(REPORTS_AFTER, import_module, ("mambacl.reports.run_page",))
    loading.daemon = True
    loading.start()
    return run_training


def _show(runs: list[Run], config: Any) -> int:
    with status("writing the report"):
        from mambacl.reports import comparison_table, load_run, write_report
        from mambacl.reports.rendering import to_text
        from mambacl.training.folder import RunFolder

    for run in runs:
        started = time.perf_counter()
        with status("writing the report"):
            page = write_report([run.folder])
        if run.trained:
            RunFolder(run.folder).add_seconds("report", time.perf_counter() - started)
    if len(runs) > 1:
        parent = Path(config.out) if config.out else runs[0].folder.parent
        page = write_report([run.folder for run in runs], parent / f"{config.name}-comparison-{config.seed}")
    print(to_text(comparison_table([load_run(run.folder) for run in runs])))
    print(f"\nReport: {page}")
    return 0


def resume(arguments: Sequence[str]) -> int:
    """continue a run after an interruption: `mambacl resume RUN`"""
    parser = Parser(prog="mambacl resume", description="Continues a run where its last checkpoint stands.")
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--device", default=None, help="another device than the run's own: cpu, cuda, cuda:N")
    given = parser.parse_args(arguments)
    _check_folder(given.run)
    with status("loading PyTorch"):
        from mambacl.training.api import resume as resume_run

    return _show([resume_run(given.run, given.device)], None)


def evaluate(arguments: Sequence[str]) -> int:
    """evaluate a run's last checkpoint again: `mambacl evaluate RUN`"""
    parser = Parser(prog="mambacl evaluate", description="Evaluates a run's last checkpoint over all tasks learned.")
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--batch-size", type=int, default=None, help="images in a batch; changes only the speed")
    parser.add_argument("--device", default=None, help="another device than the run's own: cpu, cuda, cuda:N")
    words = "another than the run's own: task, where the task of each image is known; class or domain, where it is not"
    parser.add_argument("--scenario", default=None, help=words)
    given = parser.parse_args(arguments)
    if given.batch_size is not None and given.batch_size < 1:
        raise UserError(f"--batch-size must be at least 1, got {given.batch_size}.")
    _check_folder(given.run)
    with status("loading PyTorch"):
        from mambacl.training.api import evaluate as evaluate_run

    again = evaluate_run(given.run, given.batch_size, given.device, given.scenario)
    row, recorded, total = again.counted, again.recorded, again.total
    for task, right in enumerate(row):
        print(f"task {task + 1:3}  {right:6} of {total[task]:6} right  {right / total[task]:6.1%}")
    print(f"over tasks {sum(r / n for r, n in zip(row, total, strict=True)) / len(row):.2%}, "
          f"over images {sum(row) / sum(total[: len(row)]):.2%}")  # fmt: skip
    if again.scenario != again.recorded_scenario:
        own = f"{again.recorded_scenario}-incremental"
        print(f"These counts are {again.scenario}-incremental; the run recorded {recorded}, {own}.")
    elif row == recorded:
        print("These are the counts that the run recorded.")
    else:
        print(f"The run recorded {recorded}: a difference comes from another device or other library versions.")
    return 0


def _check_folder(path: Path) -> None:
    """A mistyped folder is refused before PyTorch is loaded."""
    if not (path / "config.yaml").is_file():
        raise UserError(f"{path} is no run folder (it has no config.yaml); runs are in runs/ unless --out says so.")
