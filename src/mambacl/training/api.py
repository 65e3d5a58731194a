"""Complete runs: `train`, `resume`, `evaluate` and `audit`, for the command line and for Python.

Under torchrun every process calls the same function. All build the same parts; the first alone reads and writes what
they must agree on, such as the state of the run's folder.
"""

import dataclasses
import os
import signal
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from mambacl import ops, processes
from mambacl.config import RunConfig, resolve
from mambacl.data import DataSet
from mambacl.errors import UserError
from mambacl.files import expanded, full_disk
from mambacl.log import logger
from mambacl.methods import Method
from mambacl.nullspace.sharing import failing_together
from mambacl.ops.precision import float32_products, resolve_precision
from mambacl.scenarios import Scenario
from mambacl.training import auditing, checkpoints, learned
from mambacl.training.build import Parts, build, check_stream, describe_data, pick_device
from mambacl.training.display import show
from mambacl.training.folder import BACKBONE, RunFolder
from mambacl.training.identity import differences, with_named_weights
from mambacl.training.loop import Loop, TrainingError
from mambacl.training.progress import Progress
from mambacl.training.seconds import Watch
from mambacl.training.tracking import Trackers, check_trackers, open_trackers


@dataclass(frozen=True)
class Run:
    """A finished run: its folder and the contents of its results.json."""

    folder: Path
    results: dict[str, Any]
    trained: bool = False
    """whether this call trained it; otherwise it was already finished"""
    dataset: DataSet | None = field(default=None, repr=False, compare=False)
    """what it trained on, still open"""

    @property
    def metrics(self) -> dict[str, float]:
        return self.results["metrics"]


@dataclass(frozen=True)
class Evaluation:
    """The number of correct test images of each task, counted now and as the run recorded it; the number of test
    images; and the scenario of each count."""

    counted: list[int]
    recorded: list[int]
    total: list[int]
    scenario: Scenario = "class"
    recorded_scenario: Scenario = "class"
    learned: int = 0
    """tasks that the model has learned since, whose classes compete, but whose images the run does not have"""


def train(
    config: str | Path | Mapping[str, Any] | RunConfig | None = None,
    *,
    overwrite: bool = False,
    loop: type[Loop] = Loop,
    **overrides: Any,
) -> Run:
    """Trains a run and returns it. `config` is a preset's name, a YAML file, a mapping or a `RunConfig`.

        mambacl.train("demo", method="sequential", training={"lr": 1e-3}, out="runs/mine")

    If the folder already holds the same run, `train` continues it, or returns it if it is finished; `overwrite` trains
    it again. `loop` can be a subclass of `Loop`, e.g. one that measures something after each task.
    """
    watch = Watch()
    resolved = resolve(config, overrides)
    check_trackers(resolved.track)
    processes.join(pick_device(resolved.device))
    folder = RunFolder(resolved.folder)
    # what a process of this launch has left, which then died, is not to be overwritten
    begun = processes.restarted() and processes.decide(folder.of_this_launch)
    again = overwrite and not begun
    existing = processes.decide(lambda: folder.config() if folder.exists() and not again else None)
    resolved = with_named_weights(_with_precision(resolved, existing))
    if existing is not None:
        differing = differences(existing, resolved)
        if differing:
            build(resolved)  # a mistake in the configuration is the more useful error
            moved = f" If you have moved the data: `mambacl resume {folder.path} --root {resolved.stream.root}`."
            raise UserError(
                f"{folder.path} holds another run (it differs in {', '.join(differing[:4])}): "
                "choose another name or out, or overwrite it (--name, --out, --overwrite)."
                + (moved if differing == ["stream.root"] else "")
            )
        if processes.decide(folder.finished):
            check_stream(folder, describe_data(resolved))
        return _continue(folder, resolved, watch, loop)
    parts = build(resolved, loop=loop, watch=watch)  # raises before anything is written or removed
    with watch.phase("data"):
        with failing_together():  # a large data set takes longer than processes wait for one another
            parts.stream.dataset.check(processes.rank(), processes.count())
        described = parts.described.result()

    weights = checkpoints.backbone_state(parts.model)

    def start() -> None:
        if folder.exists() and not again:
            raise UserError(f"Another process has trained {folder.path} meanwhile: repeat the command to continue it.")
        folder.clear()
        folder.create(resolved, described)
        with watch.phase("checkpoints"):
            checkpoints.save_backbone(folder, weights)

    with _locked(folder):
        processes.decide(start)
        return Run(folder.path, execute(folder, parts, None), trained=True, dataset=parts.stream.dataset)


def resume(path: str | Path, device: str | None = None, root: str | Path | None = None) -> Run:
    """Continues a run from its last checkpoint, on the same device or another. `root` is the new place of data that
    have moved; config.yaml keeps it."""
    watch = Watch()
    folder = RunFolder.existing(path)
    config = _here(folder.config(), device, root)
    processes.join(pick_device(config.device))
    if root is not None:
        check_stream(folder, describe_data(config))
        processes.decide(lambda: folder.set_root(config.stream.root))
    return _continue(folder, config, watch)


@contextmanager
def _locked(folder: RunFolder) -> Iterator[None]:
    """Locks the folder for all processes of a run."""
    with ExitStack() as stack:
        processes.decide(lambda: stack.enter_context(folder.locked()))
        yield


def _with_precision(config: RunConfig, existing: RunConfig | None) -> RunConfig:
    """Replaces the precision `auto`: by that of an existing run, or by what the device supports."""
    if config.precision != "auto":
        return config
    found: Any = existing.precision if existing else resolve_precision(config.precision, pick_device(config.device))
    return dataclasses.replace(config, precision=found)


def _here(config: RunConfig, device: str | None, root: str | Path | None) -> RunConfig:
    """The configuration with another device, and with another place of the data, if given."""
    if root is not None:
        stream = dataclasses.replace(config.stream, root=str(expanded(root).absolute()))
        config = dataclasses.replace(config, stream=stream)
    return config if device is None else dataclasses.replace(config, device=device)


def _check_root(folder: RunFolder, config: RunConfig) -> None:
    root = config.stream.root
    if root is not None and not Path(root).exists():
        raise UserError(
            f"The data of {folder.path} are no longer in {root}: give their new place with --root, as in "
            f"`mambacl resume {folder.path} --root DIR`."
        )


def _continue(folder: RunFolder, config: RunConfig, watch: Watch, loop: type[Loop] = Loop) -> Run:
    if processes.decide(folder.finished):
        logger.info("%s is already finished; `mambacl train` with --overwrite trains it again.", folder.path)
        return Run(folder.path, folder.results())
    _check_root(folder, config)

    with _locked(folder):
        processes.decide(folder.clear_left_over)
        started = processes.decide((folder.checkpoints / BACKBONE).exists)
        parts = build(config, folder if started else None, loop, watch)
        with watch.phase("data"):
            check_stream(folder, parts.described.result())
        if not started:
            weights = checkpoints.backbone_state(parts.model)
            folder.checkpoints.mkdir(exist_ok=True)
            processes.decide(lambda: checkpoints.save_backbone(folder, weights))
        checkpoint = checkpoints.load(folder, parts.model) if started else None
        if checkpoint is not None:
            position = checkpoint.position
            logger.info("Continuing %s in task %d after epoch %d.", folder.path, position.task + 1, position.epoch)
        return Run(folder.path, execute(folder, parts, checkpoint), trained=True, dataset=parts.stream.dataset)


def evaluate(
    path: str | Path,
    batch_size: int | None = None,
    device: str | None = None,
    scenario: Scenario | None = None,
    root: str | Path | None = None,
) -> Evaluation:
    """Evaluates a run at the end of its latest task, on all tasks of its training. Does not change its files.

    `batch_size` affects only the speed. `scenario` defaults to the run's: "class" or "task" if tasks have different
    classes, "task" or "domain" if tasks are domains. `root` is the new place of data that have moved.
    """
    folder = RunFolder.existing(path)
    config = _here(folder.config(), device, root)
    processes.join(pick_device(config.device))
    chosen = _possible(scenario, config.stream.scenario)
    if batch_size is not None:
        config = dataclasses.replace(config, training=dataclasses.replace(config.training, eval_batch_size=batch_size))
    parts, checkpoint = _at_task_end(folder, config)
    done = checkpoint.position.task
    progress = Progress("evaluate", {"evaluate": sum(parts.stream.test_counts()[:done])})
    loop = parts.loop(folder, progress)
    loop.scenario = chosen
    with arithmetic(config), show(progress):
        counted = loop.evaluate(checkpoint.position.task - 1)
    total = parts.stream.test_counts()[: len(counted)]
    further = len(learned.read_history(folder, checkpoint.position.task).known)
    return Evaluation(counted, checkpoint.position.correct[-1], total, chosen, config.stream.scenario, further)


def _possible(scenario: Scenario | None, own: Scenario) -> Scenario:
    """The scenario to evaluate a run in."""
    if scenario is None:
        return own
    possible = {"domain": ("task", "domain"), "few-shot": ("few-shot", "task")}.get(own, ("class", "task"))
    if scenario not in possible:
        raise UserError(
            f"A run with the scenario {own} can be evaluated with the scenarios {' and '.join(possible)}, not "
            f"'{scenario}': train another run with --stream.scenario {scenario}."
        )
    return scenario


def audit(path: str | Path, device: str | None = None, root: str | Path | None = None) -> dict[str, Any]:
    """Audits a run at the end of its latest task and writes audit.json: how far each block's output for the kept images
    has drifted, and how much of each update fell into protected directions. `root` is the new place of data that have
    moved."""
    folder = RunFolder.existing(path)
    config = _here(folder.config(), device, root)
    parts, checkpoint = _at_task_end(folder, config, with_task_state=True)
    with arithmetic(config):
        return auditing.audit(folder, parts.model, checkpoint.position.task, parts.method.moved())


def _at_task_end(
    folder: RunFolder, config: RunConfig, with_task_state: bool = False
) -> tuple[Parts, checkpoints.Checkpoint]:
    """A run's parts at the end of its latest task. `with_task_state` also loads what only training needs."""
    if checkpoints.task_end_file(folder) is None:
        raise _no_task(folder)
    if folder.made_from_checkpoint():
        raise UserError(
            f"{folder.path} was made from a checkpoint and has no test images: compare its models on your own with "
            "`mambacl compare OLD NEW --test FOLDER`."
        )
    _check_root(folder, config)
    parts = build(config, folder)
    check_stream(folder, parts.described.result())
    checkpoint = task_end(folder, parts.model)
    load_method(folder, parts.method, checkpoint, with_task_state)
    return parts, checkpoint


def task_end(folder: RunFolder, model: nn.Module | None = None) -> checkpoints.Checkpoint:
    """The checkpoint at the end of the latest task of the training, with what the method has learned since. `model`:
    see `checkpoints.load`."""
    checkpoint = checkpoints.load_task_end(folder, model)
    checkpoints.same_for_all(folder, checkpoint)
    if checkpoint is None:
        raise _no_task(folder)
    return learned.as_now(folder, checkpoint)


def _no_task(folder: RunFolder) -> UserError:
    return UserError(f"{folder.path} has not finished a task yet: run `mambacl resume {folder.path}` first.")


def load_method(
    folder: RunFolder, method: Method, checkpoint: checkpoints.Checkpoint, with_task_state: bool = False
) -> None:
    """Loads what a method needs to predict; `with_task_state`, also what only training needs."""
    state, task_state = checkpoint.method_state, checkpoint.task_state
    if not with_task_state:
        state, task_state = method.for_answers(state, task_state)
    try:
        method.load_state_dict(state)
        if task_state:
            method.load_task_state_dict(task_state)
    except (KeyError, RuntimeError):
        raise UserError(
            f"The checkpoint of {folder.path} does not match its config.yaml: undo any edits of config.yaml."
        ) from None


def execute(folder: RunFolder, parts: Parts, checkpoint: checkpoints.Checkpoint | None) -> dict[str, Any]:
    """Trains from the beginning, or from a checkpoint, to the end. Returns the results."""
    config, position = parts.config, checkpoints.Position() if checkpoint is None else checkpoint.position
    if checkpoint is None:
        logger.info("%s: %s; to %s", config.method, parts.method.summary, folder.path)
        logger.info("%s", parts.overview())
    trackers = open_trackers(config, folder, parts.method.trains) if processes.is_first() else Trackers([])
    progress = Progress(config.method, parts.work(position.task, position.epoch))
    loop = parts.loop(folder, progress, trackers)
    try:
        with terminable(), arithmetic(config), show(progress, folder) if processes.is_first() else nullcontext():
            loop.run(checkpoint)
            with parts.watch.phase("audit"):
                auditing.audit(folder, parts.model, len(parts.stream.tasks), parts.method.moved())
            results = loop.write_results("finished")
            processes.wait()  # until the first has written it
        trackers.finish(results)
        return results
    except KeyboardInterrupt:
        processes.leave_at_once()
        _note_end(loop, "interrupted")
        logger.warning("`mambacl resume %s` continues from the last checkpoint.", folder.path)
        raise
    except Exception as error:
        processes.leave_at_once()
        _note_end(loop, "failed")
        if processes.is_loss(error):
            log = _traceback(folder, "lost.log")
            raise TrainingError(
                f"{processes.LOST} (what happened here is in {log}; `mambacl resume {folder.path}` continues from the "
                "last checkpoint).",
                everywhere=True,
            ) from error
        known = full_disk(error, error.filename or folder.path) if isinstance(error, OSError) else None
        if known is not None or isinstance(error, (UserError, TrainingError)):
            words = f"{known or error} (`mambacl resume {folder.path}` continues from the last checkpoint)"
            raise TrainingError(words, getattr(error, "everywhere", False)) from error
        log = _traceback(folder, "error.log")
        raise TrainingError(
            f"{type(error).__name__}: {error} (the traceback is in {log}; `mambacl resume {folder.path}` continues "
            "from the last checkpoint)"
        ) from error


def _traceback(folder: RunFolder, name: str) -> Path:
    """Writes the error that is being handled to a file of the run."""
    with suppress(OSError):
        (folder.path / name).write_text(traceback.format_exc(), encoding="utf-8")
    return folder.path / name


def _note_end(loop: Loop, status: str) -> None:
    loop.trackers.close(status)
    with suppress(OSError):  # a full disk may have stopped the run
        loop.background.wait()
    with suppress(OSError, UserError):
        loop.note_end(status)


@contextmanager
def arithmetic(config: RunConfig) -> Iterator[None]:
    """Sets how a run computes: with kernels or their plain twins, with or without TF32. A bf16 run uses TF32 for what
    autocast leaves in float32."""
    with (
        nullcontext() if config.precision == "float32" else float32_products(tf32=True),
        nullcontext() if config.fast else ops.switch.plain(),
    ):
        yield


@contextmanager
def terminable() -> Iterator[None]:
    """Makes SIGTERM, which batch systems send, end a run as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    own = os.getpid()

    def interrupt(*_: Any) -> None:
        if os.getpid() != own:  # a worker inherits this handler; it must end, so as not to keep the run's lock
            os._exit(128 + signal.SIGTERM)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
