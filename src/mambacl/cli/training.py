"""Commands that train and what goes on from there: train, resume, evaluate."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mambacl.cli.status import status
from mambacl.config import Device, preset_names, resolve
from mambacl.errors import UserError
from mambacl.log import logger
from mambacl.options import at_least, merge
from mambacl.scenarios import Scenario

if TYPE_CHECKING:
    from mambacl.training.api import Run

REPORTS_AFTER = 10.0  # seconds
RunPath = Annotated[Path, "a run folder"]
AnotherDevice = Annotated[Device | None, "another device than the run's own: cpu, cuda, cuda:N"]


def train(
    preset: Annotated[str | None, "a preset, or a YAML file with options"] = None,
    *,
    compare: Annotated[str, "further methods, with commas, to train on the same stream"] = "",
    overwrite: Annotated[bool, "train again where the run folder holds a run already"] = False,
    skip_bad: Annotated[bool, "leave out images that cannot be read, and say which"] = False,
    **overrides: Any,
) -> int:
    """train a preset or file: `mambacl train demo --method sequential --training.lr 1e-3`"""
    from mambacl.methods.registry import METHODS

    if skip_bad:
        overrides = merge(overrides, {"stream": {"skip_bad": True}})
    if preset is None and not overrides:
        raise UserError(f"Say what to train: a preset ({', '.join(preset_names())}), a YAML file, or options.")
    first = resolve(preset, overrides)
    methods = [first.method, *(name.strip() for name in compare.split(",") if name.strip())]
    methods = list(dict.fromkeys(methods))
    configs = []
    for method in methods:
        # --out is the folder of all of them when there are several
        out = str(Path(first.out) / method) if first.out and len(methods) > 1 else first.out
        configs.append(resolve(preset, {**overrides, "method": method, "out": out}))
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


def resume(run: RunPath, *, device: AnotherDevice = None) -> int:
    """continue a run after an interruption, from its last checkpoint: `mambacl resume RUN`"""
    _check_folder(run)
    with status("loading PyTorch"):
        from mambacl.training.api import resume as resume_run

    return _show([resume_run(run, device)], None)


def evaluate(
    run: RunPath,
    *,
    batch_size: Annotated[int | None, "images in a batch; changes only the speed", at_least(1)] = None,
    device: AnotherDevice = None,
    scenario: Annotated[Scenario | None, "task: the task of each image is known; class or domain: it is not"] = None,
) -> int:
    """evaluate a run's last checkpoint again, over all tasks learned: `mambacl evaluate RUN`"""
    _check_folder(run)
    with status("loading PyTorch"):
        from mambacl.training.api import evaluate as evaluate_run

    again = evaluate_run(run, batch_size, device, scenario)
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
