"""What a null space knows of finished tasks: their covariances and boxes, the decompositions in force, and the energy
of the updates; where covariances are kept, and all of it as named tensors and back."""

import itertools
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from mambacl.errors import UserError
from mambacl.nullspace.blocks import Part
from mambacl.nullspace.elementwise import Box
from mambacl.nullspace.projectors import Decomposition, Key
from mambacl.nullspace.selection import Protection

COVARIANCE_FOLDER = "covariances-"  # its name begins so
ENDS = ("lower", "upper")


@dataclass
class TaskStatistics:
    """What a task adds: a covariance for each feature of each block, and a box for each part that is protected
    element by element."""

    covariances: dict[Key, Tensor] = field(default_factory=dict)
    boxes: dict[str, Box] = field(default_factory=dict)

    def add_(self, other: "TaskStatistics") -> "TaskStatistics":
        """Adds those of other tasks to this one, in place, so that memory holds no third copy."""
        for key, mine in self.covariances.items():
            mine.add_(other.covariances[key])
        self.boxes = {name: mine.within(other.boxes[name]) for name, mine in self.boxes.items()}
        return self


@dataclass
class Memory:
    """`statistics`: of each task, if tasks are kept apart, or of all in one."""

    tasks: int = 0
    statistics: list[TaskStatistics] = field(default_factory=list)
    update_energy: list[dict[str, Tensor]] = field(default_factory=list)
    """by task, then by part: see `ProjectedStep.update_energy`"""
    decompositions: dict[Key, Decomposition] | None = None  # None: not decomposed yet

    def covariance(self, key: Key) -> Tensor:
        """Of all tasks."""
        first, *rest = (one.covariances[key] for one in self.statistics)
        for other in rest:
            first = first + other
        return first

    def boxes(self) -> dict[str, Box]:
        """What all tasks together allow."""
        boxes: dict[str, Box] = {}
        for one in self.statistics:
            boxes = {name: box.within(boxes.get(name)) for name, box in one.boxes.items()}
        return boxes


class CovarianceStore:
    """Keeps covariances between tasks on the device, in the machine's memory, or memory-mapped on disk."""

    def __init__(self, place: str, device: torch.device, folder: Path | None) -> None:
        self.on_disk = place == "disk"
        self.device = device if place == "device" else torch.device("cpu")
        self._folder = folder
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._numbers = itertools.count()

    def put(self, tensor: Tensor) -> Tensor:
        """A tensor with the same values that lives where the store keeps things."""
        if not self.on_disk:
            return tensor.to(self.device)
        if self._temporary is None:
            if self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
            self._temporary = tempfile.TemporaryDirectory(
                prefix=COVARIANCE_FOLDER, dir=self._folder, ignore_cleanup_errors=True
            )
        path = Path(self._temporary.name) / f"{next(self._numbers)}.bin"
        kept = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
        kept.copy_(tensor)
        weakref.finalize(kept, path.unlink, missing_ok=True)
        return kept


def to_tensors(memory: Memory, protections: Sequence[Protection], keep_tasks: bool) -> dict[str, Tensor]:
    """By parameter name and rows. Parts that share a feature share its tensors."""
    tensors = {"tasks": torch.tensor(memory.tasks)}
    if not memory.tasks:
        return tensors
    nothing = torch.zeros(4, dtype=torch.float64)
    for protection in protections:
        name = protection.name
        for number, one in enumerate(memory.statistics):
            if protection.elementwise:
                found = {end: getattr(one.boxes[name], end) for end in ENDS}
            else:
                found = {"covariance": one.covariances[protection.key]}
            tensors |= {f"{name}.{word}{_suffix(number, keep_tasks)}": t for word, t in found.items()}
        if not protection.elementwise:
            assert memory.decompositions is not None
            own = memory.decompositions[protection.key]
            for word, tensor in (("spectrum", own.spectrum), ("basis", own.basis), ("rank", own.ranks)):
                tensors[f"{name}.{word}"] = tensor
        tensors[f"{name}.moved"] = torch.stack([task.get(name, nothing) for task in memory.update_energy])
    return tensors


def from_tensors(
    tensors: Mapping[str, Tensor],
    protections: Sequence[Protection],
    named: Mapping[str, Tensor],
    keep_tasks: bool,
) -> Memory:
    """`named`: the model's parameters. Tensors of another model or setting are a `UserError`."""
    tasks = int(tensors.get("tasks", torch.tensor(0)))
    protections = protections if tasks else []
    numbers = range(tasks if keep_tasks else min(tasks, 1))
    _check_names(tensors, protections, [_suffix(number, keep_tasks) for number in numbers])
    decompositions: dict[Key, Decomposition] = {}
    memory = Memory(tasks, [TaskStatistics() for _ in numbers], decompositions=decompositions)
    for protection in protections:
        part, name = protection.part, protection.name
        for number, one in enumerate(memory.statistics):
            suffix = _suffix(number, keep_tasks)
            if protection.elementwise:
                own = part.of(named[part.parameter])
                ends = [tensors[f"{name}.{end}{suffix}"].to(own.device) for end in ENDS]
                _check_size(part, all(end.shape == own.shape for end in ends))
                one.boxes[name] = Box(*ends)
            else:
                _add_covariance(one, protection, tensors, named, suffix)
        if not protection.elementwise:
            spectrum, basis, rank = (tensors[f"{name}.{word}"] for word in ("spectrum", "basis", "rank"))
            decompositions[protection.key] = Decomposition(spectrum.cpu(), rank.cpu(), basis)
    for protection in protections:
        _check_size(protection.part, tensors[f"{protection.name}.moved"].shape == (tasks, 4))
    for task in range(tasks):
        memory.update_energy.append({p.name: tensors[f"{p.name}.moved"][task].cpu() for p in protections})
    return memory


def _suffix(task: int, keep_tasks: bool) -> str:
    return f".{task}" if keep_tasks else ""


def _check_names(tensors: Mapping[str, Tensor], protections: Sequence[Protection], suffixes: Sequence[str]) -> None:
    wanted = {"tasks"}
    for protection in protections:
        by_task = ENDS if protection.elementwise else ("covariance",)
        words = {f"{word}{suffix}" for word in by_task for suffix in suffixes} | {"moved"}
        words |= set() if protection.elementwise else {"spectrum", "basis", "rank"}
        wanted |= {f"{protection.name}.{word}" for word in words}
    differing = sorted(wanted ^ set(tensors))
    if differing:
        shown = ", ".join(differing[:6]) + (", ..." if len(differing) > 6 else "")
        raise UserError(f"This null-space state is of another model or setting; names on one side only: {shown}.")


def _add_covariance(
    one: TaskStatistics, protection: Protection, tensors: Mapping[str, Tensor], named: Mapping[str, Tensor], suffix: str
) -> None:
    part, name = protection.part, protection.name
    groups, _, size = part.matrix(named[part.parameter]).shape
    lead = (groups,) if groups > 1 else ()
    covariance = tensors[f"{name}.covariance{suffix}"]
    shapes = {"spectrum": (*lead, size), "rank": lead, "basis": (*lead, size, tensors[f"{name}.basis"].shape[-1])}
    fits = all(tensors[f"{name}.{word}"].shape == shape for word, shape in shapes.items())
    _check_size(part, fits and covariance.shape == (*lead, size, size))
    known = one.covariances.get(protection.key)
    if known is not None and known is not covariance and not torch.equal(known.cpu(), covariance.cpu()):
        raise UserError(f"This null-space state is of another setting: {name} had another feature there.")
    one.covariances.setdefault(protection.key, covariance)


def _check_size(part: Part, fits: bool) -> None:
    if not fits:
        raise UserError(f"This null-space state is of another model: {part.name} has another size there.")
