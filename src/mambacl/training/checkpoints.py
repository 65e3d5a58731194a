"""Checkpoints: everything a run needs to continue as if it had never stopped.

`checkpoints/` holds:

    backbone.safetensors  the backbone at the start
    task-NN.safetensors   the method's state after a finished task, for the last two tasks
    last.safetensors      written each epoch: trained parameters, optimizer, random states, position and counts
    previous.safetensors  the one before it
    task-end.safetensors  the last one that was written at the end of a task
    parts-NNNNNN/         of a model that is cut, the rows of each process; the files above name it: `training.parts`

Writing `last.safetensors` commits a checkpoint: it names the other files that belong to it. At the end of a task,
results.json and then `task-end.safetensors` follow. A process can be killed between any two of these steps, so readers
take the checkpoint after as many tasks as results.json counts, which is one of the two, and `resume` does the rest.
"""

import copy
import dataclasses
import json
import random
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mambacl import processes
from mambacl.errors import UserError
from mambacl.files import keep_as, read_tensors, read_text, write_tensors
from mambacl.log import logger
from mambacl.nullspace.shards import cut_like, whole
from mambacl.nullspace.sharing import failing_together, is_cut
from mambacl.training import parts
from mambacl.training.folder import BACKBONE, LAST, PREVIOUS, TASK_END, RunFolder
from mambacl.training.parts import Parts

START_AGAIN = "Start the run again: `mambacl train` with --overwrite."


@dataclass
class Position:
    """How far a run has come: in `task`, after `epoch` of its epochs (0: it has not begun); and its counts so far."""

    task: int = 0
    epoch: int = 0
    correct: list[list[int]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    images: int = 0
    metrics_length: int = 0
    task_file: str | None = None
    """file with the method's state after finished tasks"""
    peak_memory: int = 0
    state_bytes: int = 0
    """size of what the method keeps, at the end of the latest task"""


def backbone_state(model: nn.Module) -> dict[str, Tensor]:
    """The backbone's weights. If they are cut, all processes must ask together; the first gets them."""
    found = {}
    for name, tensor in model.state_dict().items():
        complete = whole(tensor)
        if processes.is_first():
            found[name] = complete.cpu() if is_cut(tensor) else complete
    return found


def save_backbone(folder: RunFolder, state: Mapping[str, Tensor]) -> None:
    write_tensors(folder.checkpoints / BACKBONE, state, {})


def load_backbone(folder: RunFolder, model: nn.Module) -> None:
    path = folder.checkpoints / BACKBONE
    try:
        model.load_state_dict(read_tensors(path)[0])
    except UserError as error:
        raise UserError(f"{error} {START_AGAIN}") from None
    except RuntimeError:
        raise UserError(f"{path} does not match the model in config.yaml: undo any edits of config.yaml.") from None


def load_trained(folder: RunFolder, model: nn.Module, backbone: str, options: Mapping[str, Any]) -> None:
    """Loads the backbone as a run left it at the end of its latest task, into a model of the same kind."""
    own = folder.config()
    if own.backbone != backbone or own.backbone_options != options:
        raise UserError(
            f"The run {folder.path} has another backbone, {own.backbone}: use the same --backbone and backbone_options."
        )
    checkpoint = load_task_end(folder)
    same_for_all(folder, checkpoint)
    if checkpoint is None:
        raise UserError(f"{folder.path} has not finished a task yet: run `mambacl resume {folder.path}` first.")
    added = [name for name in checkpoint.method_state if not name.startswith(("model.", "heads.", "space."))]
    if added:
        raise UserError(
            f"The method {own.method} of {folder.path} adds layers to the backbone ({added[0]}), so that its weights "
            "alone are not what it learned: start from a run of another method, or from a checkpoint file."
        )
    load_backbone(folder, model)
    found = {n.removeprefix("model."): t for n, t in checkpoint.method_state.items() if n.startswith("model.")}
    model.load_state_dict({**model.state_dict(), **found})
    logger.info("Starting from the backbone of %s after task %d.", folder.path, checkpoint.position.task)


@dataclass(frozen=True)
class TaskState:
    """What a method keeps from finished tasks, and its file name. It is written before the checkpoint that names it;
    the previous file stays until then."""

    name: str
    tensors: Mapping[str, Tensor]
    text: Mapping[str, str]

    def on_cpu(self) -> "TaskState":
        """A copy in main memory, to be written while training continues: the next task can change the sums in place.
        Names that share a tensor still share it."""
        copies: dict[int, Tensor] = {}
        for tensor in self.tensors.values():
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.detach().to("cpu", copy=True)
        return dataclasses.replace(self, tensors={name: copies[id(t)] for name, t in self.tensors.items()})

    def nbytes(self) -> int:
        return nbytes(self.tensors)

    def with_parts(self, folder: RunFolder) -> "TaskState":
        """Writes the parts of a model that is cut, and names them. All processes call it."""
        tensors, text = parts.write(folder.checkpoints, self.tensors)
        return dataclasses.replace(self, tensors=tensors, text={**self.text, **text})

    def write(self, folder: RunFolder) -> None:
        write_tensors(folder.checkpoints / self.name, self.tensors, self.text)


def nbytes(tensors: Mapping[str, Tensor]) -> int:
    """The size of tensors; one that has several names counts once."""
    return sum(tensor.nbytes for tensor in {id(t): t for t in tensors.values()}.values())


def write_parts(
    folder: RunFolder, method_state: Mapping[str, Tensor], optimizer_state: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Writes what is cut among the processes. Returns the rest, by the names in a checkpoint, and the text that names
    the parts. All processes call it."""
    tensors = {f"method.{name}": tensor for name, tensor in method_state.items()}
    tensors |= {f"optimizer.{name}": tensor for name, tensor in optimizer_state.items()}
    return parts.write(folder.checkpoints, tensors)


def contents(
    position: Position, tensors: Mapping[str, Tensor], text: Mapping[str, str], copied: bool
) -> tuple[Position, dict[str, Tensor], dict[str, str]]:
    """The contents of a checkpoint; `copied`, to be written while training continues."""
    if copied:
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        position = copy.deepcopy(position)
    random_tensors, random_text = random_state()
    tensors = {**tensors, **{f"random.{name}": tensor for name, tensor in random_tensors.items()}}
    return position, tensors, {**text, "position": json.dumps(dataclasses.asdict(position)), "random": random_text}


def write(folder: RunFolder, position: Position, tensors: Mapping[str, Tensor], text: Mapping[str, str]) -> None:
    """Commits a checkpoint. `settle` comes after it, when results.json counts the same tasks."""
    last = folder.checkpoints / LAST
    if last.exists():
        keep_as(last, folder.checkpoints / PREVIOUS, sync=False)  # the last one is on disk under its own name
    write_tensors(last, tensors, text)


def settle(folder: RunFolder, position: Position) -> None:
    """Keeps the last checkpoint, which has this position, as that of the end of a task, and removes states of finished
    tasks, and parts, that no checkpoint needs any more."""
    if position.epoch == 0:
        keep_as(folder.checkpoints / LAST, folder.checkpoints / TASK_END)
    old = [path for task, path in folder.task_files().items() if task < position.task - 2]
    if old:
        needed = {found.task_file for name in (LAST, PREVIOUS, TASK_END) if (found := _position(folder, name))}
        for path in old:
            if path.name not in needed:
                path.unlink(missing_ok=True)
    parts.remove_unnamed(folder.checkpoints)


class Background:
    """Writes in a thread, because flushing to disk is slow and a GPU need not wait for it. It does one job at a time:
    the next call waits for it, and raises its error if it failed. If `on` is false, jobs run in the calling thread."""

    def __init__(self, on: bool) -> None:
        self.on = on
        self._pending: Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None

    def do(self, job: Callable[[], None]) -> None:
        self.wait()
        if not self.on:
            job()
            return
        self._thread = self._thread or ThreadPoolExecutor(1, "mambacl-writer")
        self._pending = self._thread.submit(job)

    @property
    def busy(self) -> bool:
        """Whether a job is still running."""
        return self._pending is not None and not self._pending.done()

    def wait(self) -> None:
        """Waits for the running job."""
        if self._pending is not None:
            try:
                self._pending.result()
            finally:  # Ctrl-C can end the wait, but not the job
                if self._pending.done():
                    self._pending = None


@dataclass
class Checkpoint:
    position: Position
    method_state: dict[str, Tensor]
    task_state: dict[str, Tensor]
    optimizer_state: dict[str, Tensor]
    random_tensors: dict[str, Tensor]
    random_text: str
    parts: Parts | None = None
    task_parts: Parts | None = None

    def complete(self, model: nn.Module | None = None) -> "Checkpoint":
        """With the tensors that are in parts: whole, or of a model that is cut, the rows of this process."""
        like = None if model is None else next((p for p in model.parameters() if is_cut(p)), None)
        found, task = ({} if one is None else parts.read(one, like) for one in (self.parts, self.task_parts))
        states = by_kind(found)
        return dataclasses.replace(
            self,
            method_state={**self.method_state, **states["method."]},
            task_state={**self.task_state, **task},
            optimizer_state={**self.optimizer_state, **states["optimizer."]},
            parts=None,
            task_parts=None,
        )


def by_kind(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The tensors of a checkpoint: of the method, of the optimizer, and of random numbers."""
    return {
        kind: {name.removeprefix(kind): tensor for name, tensor in tensors.items() if name.startswith(kind)}
        for kind in ("method.", "optimizer.", "random.")
    }


def task_end_file(folder: RunFolder) -> str | None:
    """The name of the checkpoint at the end of the latest finished task, or None before the first. Between the moments
    when results.json counts a task and when `task-end` is of that task, it is the last one."""
    counted = len(folder.results().get("correct", ()))
    for name in (TASK_END, LAST):
        position = _position(folder, name)
        if position is not None and (position.task, position.epoch) == (counted, 0):
            return name
    return TASK_END if (folder.checkpoints / TASK_END).exists() else None


def load_task_end(folder: RunFolder, model: nn.Module | None = None) -> Checkpoint | None:
    """The checkpoint at the end of the latest finished task, or None before the first. `model`: see `load`."""
    while (name := task_end_file(folder)) is not None:
        position = _position(folder, name)
        try:
            return _read(folder, name).complete(model)
        except UserError as error:
            if position is None or position == _position(folder, name):
                raise UserError(f"{error} {START_AGAIN}") from None
        # the run that trains has finished another task meanwhile, and has removed what this checkpoint needs
    return None


def same_for_all(folder: RunFolder, checkpoint: Checkpoint | None) -> None:
    """Refuses checkpoints of different tasks in the processes that have read the folder, one by one."""
    tasks = processes.together(None if checkpoint is None else checkpoint.position.task)
    if len(set(tasks)) > 1:
        raise UserError(f"{folder.path} has finished another task meanwhile: repeat the command.")


def load(folder: RunFolder, model: nn.Module | None = None) -> Checkpoint | None:
    """The latest intact checkpoint, or None before the first. If the last is damaged, takes the previous one, which
    becomes the last. `model`: if it is cut, each process reads its rows alone. All processes call it."""
    damaged: UserError | None = None
    for name in (LAST, PREVIOUS):
        path = folder.checkpoints / name
        if not processes.decide(path.exists):
            continue
        try:
            with failing_together():
                checkpoint = _read(folder, name, processes.rank(), processes.count())
        except UserError as error:
            logger.warning("%s Trying the previous checkpoint.", error)
            damaged = error
            continue
        if name == PREVIOUS:
            processes.decide(lambda: keep_as(folder.checkpoints / PREVIOUS, folder.checkpoints / LAST))
        return checkpoint.complete(model)
    if damaged is not None:
        raise UserError(f"{damaged} No intact checkpoint is left. {START_AGAIN}")
    return None


def _position(folder: RunFolder, name: str) -> Position | None:
    """The position of a checkpoint; None if the file is missing or damaged."""
    path = folder.checkpoints / name
    if not path.exists():
        return None
    try:
        return Position(**json.loads(read_text(path)["position"]))
    except (UserError, KeyError, TypeError, ValueError):
        return None


def _read(folder: RunFolder, name: str, number: int = 0, of: int = 1) -> Checkpoint:
    """`of`: so many processes share the check of the parts."""
    path = folder.checkpoints / name
    tensors, text = read_tensors(path)
    try:
        position = Position(**json.loads(text["position"]))
        random_text = text["random"]
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path} is not a checkpoint of a run.") from None
    task_path = None if position.task_file is None else folder.checkpoints / position.task_file
    task_state, task_text = ({}, {}) if task_path is None else read_tensors(task_path)
    found = parts.named_by(path, text)
    of_tasks = None if task_path is None else parts.named_by(task_path, task_text)
    for one in (found, of_tasks):
        if one is not None:
            one.check(number, of)
    states = by_kind(tensors)
    return Checkpoint(
        position, states["method."], task_state, states["optimizer."], states["random."], random_text, found, of_tasks
    )


# Optimizer state by parameter name. PyTorch only numbers the parameters.


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Tensor]:
    state = optimizer.state_dict()["state"]
    tensors = {}
    for number, entries in state.items():
        for key, value in entries.items():
            if value is not None:  # SGD without momentum
                tensors[f"{names[number]}.{key}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    return tensors


def load_optimizer(optimizer: torch.optim.Optimizer, names: list[str], tensors: Mapping[str, Tensor]) -> None:
    state: dict[int, dict[str, Any]] = {}
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for full_name, tensor in tensors.items():
        name, key = full_name.rsplit(".", 1)
        if name not in names:
            raise UserError(
                f"The checkpoint has optimizer state for '{name}', which this run does not train: undo any edits of "
                "config.yaml."
            )
        number = names.index(name)
        own = cut_like(tensor, trained[number]) if tensor.shape == trained[number].shape else tensor
        state.setdefault(number, {})[key] = own
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


# Random states


def random_state() -> tuple[dict[str, Tensor], str]:
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    kind, keys, *rest = np.random.get_state(legacy=True)
    text = json.dumps({"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest]})  # type: ignore[union-attr]
    return tensors, text


def restore_random_state(tensors: Mapping[str, Tensor], text: str) -> None:
    torch.set_rng_state(tensors["torch"])
    if torch.cuda.is_available():
        states = [tensors[f"cuda.{i}"] for i in range(sum(name.startswith("cuda.") for name in tensors))]
        if len(states) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(states)
    states_by_library = json.loads(text)
    version, values, gauss = states_by_library["python"]
    random.setstate((version, tuple(values), gauss))
    kind, keys, *rest = states_by_library["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
