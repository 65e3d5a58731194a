"""What a null space stores of finished tasks: covariances, boxes, decompositions and the energy of the updates; where
covariances and projectors are kept, and the conversion to named tensors and back."""

import itertools
import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from mambacl.errors import UserError
from mambacl.nullspace.elementwise import Box
from mambacl.nullspace.projectors import Decomposition, Key
from mambacl.nullspace.selection import Protection

COVARIANCE_FOLDER = "covariances-"  # prefix of its name
ENDS = ("lower", "upper")
FROM_COVARIANCES = ("null-space", "gpm")  # projectors of settings


@dataclass
class TaskStatistics:
    """The statistics of a task: one covariance per feature of each block, and one box per part that is protected
    element by element."""

    covariances: dict[Key, Tensor] = field(default_factory=dict)
    boxes: dict[str, Box] = field(default_factory=dict)

    def add_(self, other: "TaskStatistics") -> "TaskStatistics":
        """Adds the statistics of other tasks, in place to avoid a third copy in memory."""
        for key, mine in self.covariances.items():
            mine.add_(other.covariances[key])
        self.boxes = {name: mine.within(other.boxes[name]) for name, mine in self.boxes.items()}
        return self


@dataclass
class Memory:
    """`statistics`: one entry per task if tasks are kept apart, otherwise one for all tasks."""

    tasks: int = 0
    statistics: list[TaskStatistics] = field(default_factory=list)
    update_energy: list[dict[str, Tensor]] = field(default_factory=list)
    """by task, then by part: see `ProjectedStep.update_energy`"""
    decompositions: dict[Key, Decomposition] | None = None  # None: not decomposed yet
    projectors: dict[Key, Tensor] | None = None  # recursive ones; None: those of the current step

    def covariance(self, key: Key) -> Tensor:
        """The sum over all tasks."""
        first, *rest = (one.covariances[key] for one in self.statistics)
        for other in rest:
            first = first + other
        return first

    def boxes(self) -> dict[str, Box]:
        """The intersection of all tasks' boxes."""
        boxes: dict[str, Box] = {}
        for one in self.statistics:
            boxes = {name: box.within(boxes.get(name)) for name, box in one.boxes.items()}
        return boxes


class Store:
    """Stores covariances between tasks, or projectors between steps: on the device, in CPU memory, or memory-mapped on
    disk."""

    def __init__(self, place: str, device: torch.device, folder: Path | None, pinned: bool = False) -> None:
        """`pinned`: CPU memory that a GPU copies from without waiting."""
        self.on_disk, self.pinned = place == "disk", pinned and place == "cpu"
        self.device = device if place == "device" else torch.device("cpu")
        self._folder = folder
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._numbers = itertools.count()

    def put(self, tensor: Tensor) -> Tensor:
        """Returns a copy of the tensor in the store, or the tensor itself if it is already in it."""
        if not self.on_disk:
            kept = tensor.to(self.device)
            return kept.pin_memory() if self.pinned else kept
        if self._temporary is None:
            if self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
            self._temporary = tempfile.TemporaryDirectory(
                prefix=COVARIANCE_FOLDER, dir=self._folder, ignore_cleanup_errors=True
            )
        path = Path(self._temporary.name) / f"{next(self._numbers)}.bin"
        if hasattr(os, "posix_fallocate") and tensor.nbytes:  # on a full disk, writing to a mapping kills the process
            with open(path, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, tensor.nbytes)
        kept = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
        kept.copy_(tensor)
        weakref.finalize(kept, path.unlink, missing_ok=True)
        return kept


def to_tensors(memory: Memory, protections: Sequence[Protection], keep_tasks: bool) -> dict[str, Tensor]:
    """The memory as tensors by parameter name and rows. Parts that share a feature share its tensors."""
    tensors = {"tasks": torch.tensor(memory.tasks)}
    if not memory.tasks:
        return tensors
    nothing = torch.zeros(4, dtype=torch.float64)
    for protection in protections:
        name = protection.name
        for number, one in enumerate(memory.statistics):
            found: dict[str, Tensor] = {}
            if protection.elementwise:
                found = {end: getattr(one.boxes[name], end) for end in ENDS}
            elif protection.projector in FROM_COVARIANCES:
                found = {"covariance": one.covariances[protection.key]}
            tensors |= {f"{name}.{word}{_suffix(number, keep_tasks)}": t for word, t in found.items()}
        if protection.projector == "recursive":
            assert memory.projectors is not None
            tensors[f"{name}.projector"] = memory.projectors[protection.key]
        elif not protection.elementwise:
            assert memory.decompositions is not None
            own = memory.decompositions[protection.key]
            for word, tensor in (("spectrum", own.spectrum), ("basis", own.basis), ("rank", own.ranks)):
                tensors[f"{name}.{word}"] = tensor
        tensors[f"{name}.moved"] = torch.stack([task.get(name, nothing) for task in memory.update_energy])
    return tensors


def from_tensors(
    tensors: Mapping[str, Tensor], protections: Sequence[Protection], named: Mapping[str, Tensor], keep_tasks: bool
) -> Memory:
    """The inverse of `to_tensors`. `named`: the model's parameters. Raises `UserError` for the tensors of another model
    or setting."""
    tasks = int(tensors.get("tasks", torch.tensor(0)))
    protections = protections if tasks else []
    suffixes = [_suffix(number, keep_tasks) for number in range(tasks if keep_tasks else min(tasks, 1))]
    _check(tensors, {p.name: _shapes(p, named[p.part.parameter], suffixes, tasks) for p in protections})
    statistics = [TaskStatistics() for _ in suffixes]
    decompositions: dict[Key, Decomposition] = {}
    projectors: dict[Key, Tensor] = {}
    for p in protections:
        own = {word: tensors[f"{p.name}.{word}"] for word in _shapes(p, named[p.part.parameter], suffixes, tasks)}
        for one, suffix in zip(statistics, suffixes, strict=True):
            if p.elementwise:
                device = named[p.part.parameter].device
                one.boxes[p.name] = Box(*(own[f"{end}{suffix}"].to(device) for end in ENDS))
            if p.elementwise or p.projector not in FROM_COVARIANCES:
                continue
            covariance = own[f"covariance{suffix}"]
            known = one.covariances.setdefault(p.key, covariance)
            if known is not covariance and not torch.equal(known.cpu(), covariance.cpu()):
                raise UserError(f"This null-space state was saved with another setting: {p.name} had another feature.")
        if p.projector == "recursive":
            projectors[p.key] = own["projector"].clone()
        elif not p.elementwise:
            decompositions[p.key] = Decomposition(own["spectrum"].cpu(), own["rank"].cpu(), own["basis"])
    energy = [{p.name: tensors[f"{p.name}.moved"][task].cpu() for p in protections} for task in range(tasks)]
    return Memory(tasks, statistics, energy, decompositions, projectors)


def _suffix(task: int, keep_tasks: bool) -> str:
    return f".{task}" if keep_tasks else ""


def _shapes(
    protection: Protection, parameter: Tensor, suffixes: Sequence[str], tasks: int
) -> dict[str, tuple[int | None, ...]]:
    """The shapes of a part's tensors, by the last word of their names; None stands for any size."""
    part, energy = protection.part, {"moved": (tasks, 4)}
    if protection.elementwise:
        shape = tuple(part.of(parameter).shape)
        return {**{f"{end}{suffix}": shape for end in ENDS for suffix in suffixes}, **energy}
    groups, _, size = part.matrix(parameter).shape
    lead = (groups,) if groups > 1 else ()
    if protection.projector == "recursive":
        return {"projector": (groups, size, size), **energy}
    kept = suffixes if protection.projector in FROM_COVARIANCES else []
    covariances = {f"covariance{suffix}": (*lead, size, size) for suffix in kept}
    return {**covariances, "spectrum": (*lead, size), "rank": lead, "basis": (*lead, size, None), **energy}


def _check(tensors: Mapping[str, Tensor], expected: Mapping[str, Mapping[str, tuple[int | None, ...]]]) -> None:
    names = {"tasks"} | {f"{part}.{word}" for part, shapes in expected.items() for word in shapes}
    if differing := sorted(names ^ set(tensors)):
        shown = ", ".join(differing[:6]) + (", ..." if len(differing) > 6 else "")
        raise UserError(f"This null-space state was saved with another model or setting; they differ in {shown}.")
    for part, shapes in expected.items():
        for word, shape in shapes.items():
            found = tensors[f"{part}.{word}"].shape
            if len(found) != len(shape) or any(a not in (b, None) for a, b in zip(shape, found, strict=True)):
                raise UserError(f"This null-space state was saved with another model: {part} has another size.")
