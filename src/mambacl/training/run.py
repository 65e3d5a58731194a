"""Runs from beginning to end: `train`, `resume` and `evaluate`, for the command line and for Python alike."""

import dataclasses
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from mambacl import ops
from mambacl.backbones import create_model, load_weights
from mambacl.backbones.loading import HEADS, weights_file
from mambacl.backbones.registry import MODELS, load_pretrained
from mambacl.config import RunConfig, check_device, resolve
from mambacl.errors import UserError
from mambacl.evaluation import SCENARIOS, Scenario
from mambacl.log import logger
from mambacl.methods import METHODS, Method, Setup
from mambacl.precision import float32_products, named
from mambacl.streams import Stream, open_stream
from mambacl.training import auditing, checkpoints
from mambacl.training.display import make_display
from mambacl.training.folder import RunFolder
from mambacl.training.loop import Loop, TrainingError
from mambacl.training.seconds import Watch

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """A finished run: its folder and what is in its results.json."""

    folder: Path
    results: dict[str, Any]
    trained: bool = False
    """whether it was worked on just now, and not found finished"""

    @property
    def metrics(self) -> dict[str, float]:
        return self.results["metrics"]


@dataclass(frozen=True)
class Evaluation:
    """Right test images of each task: counted now, and as the run recorded them; the number of test images; and the
    scenarios of the two."""

    counted: list[int]
    recorded: list[int]
    total: list[int]
    scenario: Scenario = "class"
    recorded_scenario: Scenario = "class"


def train(
    config: str | Path | Mapping[str, Any] | RunConfig | None = None,
    *,
    overwrite: bool = False,
    loop: type[Loop] = Loop,
    **overrides: Any,
) -> Run:
    """Trains a run and returns it: a preset's name, a YAML file, a mapping or a `RunConfig`, with overrides.

        mambacl.train("demo", method="sequential", training={"lr": 1e-3}, out="runs/mine")

    A folder with the same run in it is continued, or, when finished, returned as it is; `overwrite` trains anew. `loop`
    is a `Loop` that does more, such as to measure something after each task.
    """
    watch = Watch()
    resolved = resolve(config, overrides)
    folder = RunFolder(resolved.folder)
    there = folder.config() if folder.exists() and not overwrite else None
    resolved = _with_precision(resolved, there)
    if there is not None:
        differing = differences(there, resolved)
        if differing:
            _build(resolved)  # a mistake in the configuration is the better answer
            raise UserError(
                f"{folder.path} holds another run (it differs in {', '.join(differing[:4])}): "
                "choose another name or out, or overwrite it (--name, --out, --overwrite)."
            )
        return _continue(folder, resolved, watch, loop)
    parts = _build(resolved, loop=loop, watch=watch)  # fails before anything is written or removed
    with watch.phase("data"):
        parts.stream.dataset.check()
        described = parts.described.result()
    with folder.locked():
        folder.clear()
        folder.create(resolved, described)
        with watch.phase("checkpoints"):
            checkpoints.save_backbone(folder, parts.model)
        return _work(folder, parts, None)


def resume(path: str | Path, device: str | None = None) -> Run:
    """Continues a run where its last checkpoint stands, on its own device or another."""
    watch = Watch()
    folder = RunFolder.existing(path)
    return _continue(folder, _on_device(folder.config(), device), watch)


def _with_precision(config: RunConfig, there: RunConfig | None) -> RunConfig:
    """With `auto` replaced by what it stands for: in a run that is there already, by what that one has."""
    if config.precision != "auto":
        return config
    found: Any = named(config.precision, pick_device(config.device)) if there is None else there.precision
    return dataclasses.replace(config, precision=found)


def _on_device(config: RunConfig, device: str | None) -> RunConfig:
    return config if device is None else dataclasses.replace(config, device=device)


def _continue(folder: RunFolder, config: RunConfig, watch: Watch, loop: type[Loop] = Loop) -> Run:
    results = folder.results()
    if results.get("status") == "finished":
        logger.info("%s is finished and shown as it is; `mambacl train` with --overwrite trains it again.", folder.path)
        return Run(folder.path, results)
    with folder.locked():
        folder.clear_covariances()
        started = (folder.checkpoints / checkpoints.BACKBONE).exists()
        parts = _build(config, folder if started else None, loop, watch)
        with watch.phase("data"):
            _check_stream(folder, parts)
        if not started:
            folder.checkpoints.mkdir(exist_ok=True)
            checkpoints.save_backbone(folder, parts.model)
        checkpoint = checkpoints.load(folder) if started else None
        if checkpoint is not None:
            position = checkpoint.position
            logger.info("Continuing %s in task %d after epoch %d.", folder.path, position.task + 1, position.epoch)
        return _work(folder, parts, checkpoint)


def evaluate(
    path: str | Path, batch_size: int | None = None, device: str | None = None, scenario: Scenario | None = None
) -> Evaluation:
    """Evaluates a run as it was at the end of its latest task, over all tasks learned by then; its files stay as they
    are.

    `batch_size` changes nothing but the speed. `scenario` is the run's own, unless another is named: of tasks with
    classes of their own "class" or "task", of domains "task" or "domain".
    """
    folder = RunFolder.existing(path)
    config = _on_device(folder.config(), device)
    chosen = _possible(scenario, config.stream.scenario)
    if batch_size is not None:
        config = dataclasses.replace(config, training=dataclasses.replace(config.training, eval_batch_size=batch_size))
    parts, checkpoint = _at_task_end(folder, config)
    loop = parts.loop(folder)
    loop.scenario = chosen
    with _arithmetic(config):
        counted = loop.evaluate(checkpoint.position.task - 1)
    total = parts.stream.test_counts()[: len(counted)]
    return Evaluation(counted, checkpoint.position.correct[-1], total, chosen, config.stream.scenario)


def _possible(scenario: Scenario | None, own: Scenario) -> Scenario:
    """The scenario to evaluate a run in."""
    if scenario is None:
        return own
    possible = ("task", "domain") if own == "domain" else ("class", "task")
    if scenario not in possible:
        raise UserError(
            f"A run in the scenario {own} can be evaluated in the scenarios {' and '.join(possible)}, not in "
            f"'{scenario}': that needs a run of its own (--stream.scenario)."
        )
    return scenario


def audit(path: str | Path, device: str | None = None) -> dict[str, Any]:
    """Audits a run as it was at the end of its latest task, and writes its audit.json: how far what each block made of
    the images that were kept has moved, and how much of each update fell into protected directions."""
    folder = RunFolder.existing(path)
    config = _on_device(folder.config(), device)
    parts, checkpoint = _at_task_end(folder, config, whole=True)
    with _arithmetic(config):
        return auditing.audit(folder, parts.model, checkpoint.position.task, parts.method.moved())


def _at_task_end(folder: RunFolder, config: RunConfig, whole: bool = False) -> tuple["_Parts", checkpoints.Checkpoint]:
    """A run's parts as they were at the end of its latest task; `whole`, with what only training needs."""
    checkpoint = checkpoints.load_task_end(folder)
    if checkpoint is None:
        raise UserError(f"{folder.path} has not finished a task yet: `mambacl resume {folder.path}` first.")
    parts = _build(config, folder)
    _check_stream(folder, parts)
    try:
        parts.method.load_state_dict(checkpoint.method_state)
        if checkpoint.task_state and (whole or parts.method.needs_task_state):
            parts.method.load_task_state_dict(checkpoint.task_state)
    except (KeyError, RuntimeError):
        raise UserError(f"The checkpoint of {folder.path} does not fit its config.yaml: was it edited?") from None
    return parts, checkpoint


@dataclass(frozen=True)
class _Parts:
    config: RunConfig
    model: nn.Module
    stream: Stream
    method: Method
    device: torch.device
    loop_class: type[Loop]
    watch: Watch
    described: Future[dict[str, Any]]
    """what identifies the stream"""

    def overview(self) -> str:
        """What is about to be learned, and what a reader should know about it."""
        stream, recipe = self.stream, self.config.training
        tasks, size = stream.tasks, stream.transforms.size
        images = f"{len(stream.dataset.train.labels)} training and {len(stream.dataset.test.labels)} test images"
        first = ", ".join(stream.dataset.class_names[c] for c in tasks[0][:6]) + (", ..." if len(tasks[0]) > 6 else "")
        those = f"{len(tasks)} tasks (first: {first})"
        if stream.domains is not None:
            those = f"each of {len(tasks)} domains ({', '.join(stream.domains.names)})"
        classes = f"{len(stream.class_order)} classes in {those}"
        lines = [f"{stream.dataset.name}: {classes}, {images}, {size} px, on {self.device}"]
        if stream.scenario != "class":
            lines.append(f"Evaluation is {stream.scenario}-incremental: the model {SCENARIOS[stream.scenario]}.")
        if self.config.pretrained is False:
            lines.append(f"{self.config.backbone} starts from random weights (--pretrained FILE starts from others).")
        if min(len(task) for task in tasks) == 1:
            lines.append("A task of a single class has nothing to learn from: its classifier knows no other answer.")
        if recipe.schedule == "multistep" and all(after >= recipe.passes for after in recipe.decay_after):
            lines.append(
                f"With {recipe.passes} passes the learning rate never falls (decay_after {recipe.decay_after})."
            )
        return "\n".join(lines)

    def steps(self, task: int) -> int:
        """Steps in an epoch of a task."""
        recipe = self.config.training
        return -(-self.stream.train_count(task) * recipe.passes_per_epoch // recipe.batch_size)

    def loop(self, folder: RunFolder, done: int = 0) -> Loop:
        config = self.config
        recipe = config.training
        steps = sum(self.steps(t) for t in range(len(self.stream.tasks))) * recipe.epochs
        display = make_display(config.method, steps, done)
        header = {
            "benchmark": config.name,
            "method": config.method,
            "backbone": config.backbone,
            "seed": config.seed,
            "precision": config.precision,
            "class_names": self.stream.dataset.class_names,
            "class_order": self.stream.class_order,
            "tasks": self.stream.tasks,
            "scenario": self.stream.scenario,
        }
        if self.stream.domains is not None:
            header["domains"] = self.stream.domains.names
        if skipped := self.stream.dataset.skipped:
            header["skipped"] = {"count": len(skipped), "images": list(skipped)}
        bf16 = config.precision == "bf16"
        return self.loop_class(
            self.method, self.stream, recipe, folder, display, header, self.device, bf16, config.seed,
            config.audit_images, config.fast, self.stream.scenario, self.watch,
        )  # fmt: skip


def _build(
    config: RunConfig, folder: RunFolder | None = None, loop: type[Loop] = Loop, watch: Watch | None = None
) -> _Parts:
    """Model, stream and method; the model as `folder` has it, or as it is before any training."""
    watch = watch or Watch()
    method_class = METHODS.get(config.method)
    device = pick_device(config.device)
    torch.manual_seed(config.seed)  # for what no checkpoint fills
    with watch.phase("model"):
        model = create_model(config.backbone, num_classes=0, **config.backbone_options)
    data: Any = model.default_cfg
    with watch.phase("data"):
        stream = open_stream(
            config.stream, data["input_size"][-1], list(data["mean"]), list(data["std"]), config.seed,
            config.training.workers, device if config.fast else torch.device("cpu"),
        )  # fmt: skip
    described = _beside(stream.describe)  # the images' fingerprint takes as long as the model
    with watch.phase("model"):
        if folder is None:  # after the data were found: weights may have to be downloaded
            load_pretrained(model, config.backbone, config.pretrained)
        else:
            checkpoints.load_backbone(folder, model)
        model.eval()
        _check_image_size(model, stream.transforms.size, config.backbone)
        method = _method(config, folder, stream, method_class, model.to(device))
    return _Parts(config, model, stream, method, device, loop, watch, described)


def _beside(work: Callable[[], T]) -> Future[T]:
    """Does some work in a thread that nobody waits for at the end of the process."""
    future: Future[T] = Future()

    def do() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=do, daemon=True).start()
    return future


def _method(
    config: RunConfig, folder: RunFolder | None, stream: Stream, method_class: type[Method], model: nn.Module
) -> Method:
    warm = config.training.heads == "warm-second"
    classifier = None
    if config.known_classes:  # after the first task it is in the checkpoints
        learned = folder is not None and (folder.checkpoints / checkpoints.TASK_END).exists()
        classes = len(stream.tasks[0])
        classifier = nn.Linear(1, classes) if learned else _known_classifier(config, classes)
    setup = Setup(config.nullspace, warm, config.seed, config.options, classifier, config.folder / "checkpoints")
    return method_class(model, setup)


@torch.no_grad()
def _check_image_size(model: nn.Module, size: int, name: str) -> None:
    """Images that do not fit the model are noticed here, before anything is written."""
    own = cast(Any, model).default_cfg["input_size"][-1]
    try:
        model(torch.zeros(1, 3, size, size))
    except UserError as error:
        model(torch.zeros(1, 3, own, own))  # where images of its own size fail as well, theirs is the error
        raise UserError(f"{error} Set --stream.transforms.image_size; {name}'s own is {own}.") from None


def _known_classifier(config: RunConfig, classes: int) -> nn.Linear:
    """The classifier in the checkpoint that a run starts from."""
    whole = create_model(config.backbone, num_classes=classes, **config.backbone_options)
    path = weights_file(MODELS.get(config.backbone)) if config.pretrained is True else Path(str(config.pretrained))
    account = load_weights(whole, path)
    head = getattr(whole, "head", None) or whole.classifier["head"]  # type: ignore[index]
    if any(name.startswith(HEADS) for name in account.missing) or not isinstance(head, nn.Linear):
        raise UserError(
            f"{path} has no linear classifier of {classes} classes, as the first task has: give the first task the "
            "classes that it knows (stream.tasks), or set known_classes to false."
        )
    return head


def _work(folder: RunFolder, parts: _Parts, checkpoint: checkpoints.Checkpoint | None) -> Run:
    """The loop, with whatever ends it early put on record."""
    config = parts.config
    done = 0
    if checkpoint is not None:
        position = checkpoint.position
        done = sum(parts.steps(t) for t in range(position.task)) * config.training.epochs
        done += parts.steps(position.task) * position.epoch if position.epoch else 0
    else:
        logger.info("%s: %s; to %s", config.method, parts.method.summary, folder.path)
        logger.info("%s", parts.overview())
    loop = parts.loop(folder, done)
    try:
        with _terminable(), _arithmetic(config), loop.display:
            loop.run(checkpoint)
            with parts.watch.phase("audit"):
                auditing.audit(folder, parts.model, len(parts.stream.tasks), parts.method.moved())
            return Run(folder.path, loop.write_results("finished"), trained=True)
    except KeyboardInterrupt:
        _note_end(loop, "interrupted")
        logger.warning("`mambacl resume %s` continues from the last checkpoint.", folder.path)
        raise
    except (UserError, TrainingError) as error:
        _note_end(loop, "failed")
        raise TrainingError(f"{error} (`mambacl resume {folder.path}` continues from the last checkpoint)") from error
    except Exception as error:
        _note_end(loop, "failed")
        log = folder.path / "error.log"
        with suppress(OSError):
            log.write_text(traceback.format_exc(), encoding="utf-8")
        raise TrainingError(
            f"{type(error).__name__}: {error} (the whole story is in {log}; `mambacl resume {folder.path}` continues "
            "from the last checkpoint)"
        ) from error


def _note_end(loop: Loop, status: str) -> None:
    with suppress(OSError):  # a full disk may be what ended the run
        loop.background.wait()
    with suppress(OSError):
        loop.write_results(status)


def differences(one: RunConfig, other: RunConfig) -> list[str]:
    """Names of options that differ and matter to the outcome."""

    def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for key, value in values.items():
            if isinstance(value, Mapping):
                yield from flat(value, f"{prefix}{key}.")
            else:
                yield prefix + key, value

    a, b = dict(flat(one.as_dict())), dict(flat(other.as_dict()))
    immaterial = {"out", "device", "fast", "training.workers", "training.eval_batch_size"}
    return [key for key in {**a, **b} if a.get(key) != b.get(key) and key not in immaterial]


def _check_stream(folder: RunFolder, parts: _Parts) -> None:
    saved, now = folder.stream(), parts.described.result()
    # the folder's name; what follows from config.yaml and the backbone; words about images that the others do not count
    free = ("dataset", "transforms", "skipped")
    differing = [key for key in now if key not in free and saved.get(key) != now[key]]
    if differing:
        raise UserError(
            f"The data are not those that {folder.path} was trained on (stream.json differs in {differing[0]}): "
            "restore them, or start again with --overwrite."
        )


def pick_device(name: str) -> torch.device:
    check_device(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise UserError(f"There is no device '{name}' here: use --device auto, or cpu.")
    return device


@contextmanager
def _arithmetic(config: RunConfig) -> Iterator[None]:
    """How a run computes: with kernels or their plain twins, with or without TF32, which is more than bf16 has."""
    with (
        nullcontext() if config.precision == "float32" else float32_products(tf32=True),
        nullcontext() if config.fast else ops.switch.plain(),
    ):
        yield


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM, as batch systems send it, ends a run like Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    own = os.getpid()

    def interrupt(*_: Any) -> None:
        if os.getpid() != own:  # a worker, which inherits this: it must go, and not keep the run's lock
            os._exit(128 + signal.SIGTERM)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
