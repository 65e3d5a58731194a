"""Commands that train, continue and evaluate runs: train, resume, evaluate."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mambacl import processes
from mambacl.background import in_background
from mambacl.cli.launching import Gpus
from mambacl.config import Device, RunConfig, Tracker, preset_names, resolve
from mambacl.errors import UserError
from mambacl.lazy import loading_pytorch
from mambacl.log import logger
from mambacl.options import at_least, merge
from mambacl.scenarios import Scenario
from mambacl.status import status

if TYPE_CHECKING:
    from mambacl.training.api import Run

REPORTS_AFTER = 10.0  # seconds until the report's code is imported
RunPath = Annotated[Path, "a run folder"]
AnotherDevice = Annotated[Device | None, "use another device than the run's: cpu, cuda, cuda:N"]
NewRoot = Annotated[Path | None, "where the data are now, if they have moved; they must be the same"]
Quiet = Annotated[bool, "print warnings and results only"]
Imports = Annotated[list[Path] | None, "a Python file that registers methods, models or the like"]


def train(
    preset: Annotated[str | None, "a preset, or a YAML file with options"] = None,
    *,
    compare: Annotated[str, "further methods, comma-separated, on the same stream"] = "",
    seeds: Annotated[str, "several seeds, as in 0,1,2: a run for each; prints mean and deviation"] = "",
    overwrite: Annotated[bool, "train again if the run folder already has a run"] = False,
    skip_bad: Annotated[bool, "leave out images that cannot be read, and list them"] = False,
    track: Annotated[list[Tracker] | None, "also log to tensorboard, wandb, mlflow or trackio; repeatable"] = None,
    gpus: Gpus = None,
    quiet: Quiet = False,
    import_: Imports = None,
    **overrides: Any,
) -> None:
    """train a preset or file: `mambacl train demo --method sequential --training.lr 1e-3`"""
    from mambacl.methods.registry import METHODS

    import_files(import_)
    _be_quiet(quiet)
    if track:
        overrides = merge(overrides, {"track": track})
    if skip_bad:
        overrides = merge(overrides, {"stream": {"skip_bad": True}})
    if preset is None and not overrides:
        raise UserError(f"Name what to train: a preset ({', '.join(preset_names())}), a YAML file, or options.")
    first = resolve(preset, overrides)
    methods = [first.method, *(name.strip() for name in compare.split(",") if name.strip())]
    methods = list(dict.fromkeys(methods))
    chosen = _seeds(seeds, overrides) or [first.seed]
    configs = []
    for method in methods:
        METHODS.check(method)  # finds a mistake in the last before training the first
        for seed in chosen:
            out = first.out
            if out and len(methods) * len(chosen) > 1:  # then --out is the parent of the runs' folders
                out = str(Path(out) / (f"{method}-{seed}" if seeds else method))
            configs.append(resolve(preset, {**overrides, "method": method, "seed": seed, "out": out}))
    try:
        run_training = _loaded(configs)
        runs = [run_training(config, overwrite=overwrite) for config in configs]
    except KeyboardInterrupt:
        if len(configs) > 1:
            print("mambacl: repeat the command to continue the comparison.", file=sys.stderr)
        raise
    finally:
        from mambacl.data.sets import forget_begun

        forget_begun()
    parent = Path(first.out) if first.out else first.folder.parent
    _show(runs, parent / f"{first.name}-comparison-{'-'.join(map(str, chosen))}")


def _be_quiet(quiet: bool) -> None:
    if quiet:
        logger.setLevel(logging.WARNING)


def _seeds(text: str, overrides: dict[str, Any]) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if words and "seed" in overrides:
        raise UserError("--seed and --seeds exclude each other: remove one.")
    if not all(word.isdecimal() for word in words) or len(words) == 1:
        raise UserError(f"--seeds takes the seeds of several runs, as in 0,1,2, got '{text}'; --seed takes one seed.")
    return list(dict.fromkeys(map(int, words)))


def _loaded(configs: list[RunConfig]) -> Callable[..., Run]:
    """Returns `mambacl.train`. Announces the work first, because importing PyTorch takes seconds. Meanwhile the first
    run's data are read, and the GPU starts."""
    for config in configs:
        logger.info("Training %s with %s on %s, to %s", config.name, config.method, config.backbone, config.folder)
    with loading_pytorch():
        from mambacl.data.sets import begin_to_open

        stream = configs[0].stream
        if not stream.skip_bad:  # that reads every image, and a mistake found meanwhile would have to wait for it
            begin_to_open(stream.dataset, stream.root, stream.test_share, fingerprint=stream.validation is None)
        import torch  # noqa: F401  (the GPU can start before the rest is imported)

        in_background(partial(_start_gpu, configs[0].device))
        from mambacl.training.api import train as run_training
    # The report's code takes a second or two to import: do it while the GPU works, not when the user waits.
    loading = threading.Timer(REPORTS_AFTER, import_module, ("mambacl.reports.pages",))
    loading.daemon = True
    loading.start()
    # A thread that still imports while Python shuts down can crash it; exit functions run last to first.
    atexit.register(loading.join)
    atexit.register(loading.cancel)
    return run_training


def _start_gpu(device: str) -> None:
    """Makes the first call to the GPU, which takes a second. If it fails, the run's first call says why."""
    import torch

    if device != "cpu" and not processes.launched():  # several processes choose their GPUs later
        with suppress(Exception):
            torch.zeros(1, device="cuda" if device == "auto" else device)


def _show(runs: list[Run], comparison: Path | None = None) -> None:
    """Writes a report of each run and, if there are several, one that compares them; prints the table."""
    if not processes.is_first():
        return
    with status("writing the report"):
        from mambacl.reports import comparison_table, load_run, write_report
        from mambacl.reports.rendering import to_text
        from mambacl.reports.writing import report_folder
        from mambacl.training.folder import RunFolder
        from mambacl.training.tracking import attach_report

    for number, run in enumerate(runs, start=1):
        started = time.perf_counter()
        with status(f"writing report {number} of {len(runs)}"):
            page = write_report([run.folder], dataset=run.dataset)
        if run.trained:
            RunFolder(run.folder).add_seconds("report", time.perf_counter() - started)
            attach_report(RunFolder(run.folder), Path(page))
    if len(runs) > 1:
        folders = [run.folder for run in runs]
        with status("writing the comparison"):
            page = write_report(folders, report_folder(comparison, folders, numbered=True))
    print(to_text(comparison_table([load_run(run.folder) for run in runs])))
    print(f"\nReport: {page}")


def resume(
    run: RunPath,
    *,
    device: AnotherDevice = None,
    root: NewRoot = None,
    gpus: Gpus = None,
    quiet: Quiet = False,
    import_: Imports = None,
) -> None:
    """continue a run after an interruption, from its last checkpoint: `mambacl resume RUN`"""
    _check_folder(run)
    import_files(import_)
    _be_quiet(quiet)
    with loading_pytorch():
        from mambacl.training.api import resume as resume_run

    _show([resume_run(run, device, root)])


def evaluate(
    run: RunPath,
    *,
    batch_size: Annotated[int | None, "images per batch; affects only the speed", at_least(1)] = None,
    device: AnotherDevice = None,
    scenario: Annotated[Scenario | None, "task: the task of each image is known; class or domain: it is not"] = None,
    root: NewRoot = None,
    quiet: Quiet = False,
    import_: Imports = None,
) -> None:
    """evaluate a run's last checkpoint again, on all tasks learned: `mambacl evaluate RUN`"""
    _check_folder(run)
    import_files(import_)
    _be_quiet(quiet)
    with loading_pytorch():
        from mambacl.training.api import evaluate as evaluate_run

    again = evaluate_run(run, batch_size, device, scenario, root)
    if not processes.is_first():
        return
    row, recorded, total = again.counted, again.recorded, again.total
    for task, right in enumerate(row):
        print(f"task {task + 1:3}  {right:6} of {total[task]:6} correct  {right / total[task]:6.1%}")
    print(f"over tasks {sum(r / n for r, n in zip(row, total, strict=True)) / len(row):.2%}, "
          f"over images {sum(row) / sum(total[: len(row)]):.2%}")  # fmt: skip
    if again.learned:
        tasks = f"{again.learned} more task{'s' if again.learned > 1 else ''}"
        print(
            f"The model has learned {tasks} since. Those classes compete too, but their images are not in the run: "
            "`mambacl learn --test FOLDER` counts them."
        )
    if again.scenario != again.recorded_scenario:
        own = f"{again.recorded_scenario}-incremental"
        print(f"These counts are {again.scenario}-incremental; the run recorded {recorded}, {own}.")
    elif row == recorded:
        print("The run recorded the same counts.")
    elif again.learned:
        print(f"The run recorded {recorded} before it learned them.")
    else:
        print(f"The run recorded {recorded}: another device or other library versions can cause a difference.")


def _check_folder(path: Path) -> None:
    """Refuses a mistyped folder before PyTorch is imported."""
    from mambacl.training.folder import RunFolder

    RunFolder.existing(path)


def import_files(paths: list[Path] | None) -> None:
    """Imports Python files, as `import` would from their folder, so that what they register is known by name."""
    for path in paths or []:
        file = path.resolve()
        if not file.is_file():
            raise UserError(f"There is no file {path} to import: give the path of a Python file.")
        if getattr(sys.modules.get(file.stem), "__file__", None) == str(file):  # registering twice is an error
            continue
        spec = spec_from_file_location(file.stem, file)
        if spec is None or spec.loader is None:
            raise UserError(f"{path} is not a Python file: its name must end in .py.")
        sys.path.insert(0, str(file.parent))  # as for a script, for its own imports
        module = module_from_spec(spec)
        sys.modules.setdefault(file.stem, module)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            if sys.modules.get(file.stem) is module:
                del sys.modules[file.stem]
            raise UserError(f"{path} cannot be imported ({type(error).__name__}: {error}): fix the file.") from error
