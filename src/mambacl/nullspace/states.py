"""A null space as named tensors and back: covariances, spectra, bases and ranks of each part, by parameter name and
rows; boxes of parts that are protected element by element; and what the updates of each task were."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mambacl.errors import UserError
from mambacl.nullspace.adapters import Block, Part
from mambacl.nullspace.elementwise import Box
from mambacl.nullspace.gathering import Gathered, Key, Wanted
from mambacl.nullspace.projectors import Decomposition

ENDS = ("lower", "upper")
Protected = Sequence[tuple[Block, Part, Wanted]]


@dataclass
class State:
    """What a null space remembers. `gathered` has a task each, if tasks are kept apart, or all in one."""

    tasks: int = 0
    gathered: list[Gathered] = field(default_factory=list)
    decompositions: dict[Key, Decomposition] = field(default_factory=dict)
    moved: list[dict[str, Tensor]] = field(default_factory=list)  # by task, then by part

    def boxes(self) -> dict[str, Box]:
        """What all tasks together allow."""
        boxes: dict[str, Box] = {}
        for one in self.gathered:
            boxes = {name: box.within(boxes.get(name)) for name, box in one.boxes.items()}
        return boxes


def to_tensors(state: State, protected: Protected, keep_tasks: bool) -> dict[str, Tensor]:
    """Parts that share a feature share its tensors."""
    tensors = {"tasks": torch.tensor(state.tasks)}
    if not state.tasks:
        return tensors
    nothing = torch.zeros(4, dtype=torch.float64)
    for _, part, wanted in protected:
        for number, one in enumerate(state.gathered):
            if wanted.elementwise:
                found = {end: getattr(one.boxes[part.name], end) for end in ENDS}
            else:
                found = {"covariance": one.covariances[wanted.key]}
            tensors |= {f"{part.name}.{word}{_task(number, keep_tasks)}": t for word, t in found.items()}
        if not wanted.elementwise:
            own = state.decompositions[wanted.key]
            for word, tensor in (("spectrum", own.spectrum), ("basis", own.basis), ("rank", own.ranks)):
                tensors[f"{part.name}.{word}"] = tensor
        tensors[f"{part.name}.moved"] = torch.stack([task.get(part.name, nothing) for task in state.moved])
    return tensors


def from_tensors(
    tensors: Mapping[str, Tensor], protected: Protected, named: Mapping[str, Tensor], keep_tasks: bool
) -> State:
    """`named`: the model's parameters. Tensors of another model or setting are a `UserError`."""
    tasks = int(tensors.get("tasks", torch.tensor(0)))
    protected = protected if tasks else []
    numbers = range(tasks if keep_tasks else min(tasks, 1))
    _check_names(tensors, protected, [_task(number, keep_tasks) for number in numbers])
    state = State(tasks, [Gathered() for _ in numbers])
    for _, part, wanted in protected:
        for number, one in enumerate(state.gathered):
            suffix = _task(number, keep_tasks)
            if wanted.elementwise:
                own = part.of(named[part.parameter])
                ends = [tensors[f"{part.name}.{end}{suffix}"].to(own.device) for end in ENDS]
                _check_size(part, all(end.shape == own.shape for end in ends))
                one.boxes[part.name] = Box(*ends)
            else:
                _add_covariance(one, part, wanted, tensors, named, suffix)
        if not wanted.elementwise:
            spectrum, basis, rank = (tensors[f"{part.name}.{word}"] for word in ("spectrum", "basis", "rank"))
            state.decompositions[wanted.key] = Decomposition(spectrum.cpu(), rank.cpu(), basis)
    for _, part, _ in protected:
        _check_size(part, tensors[f"{part.name}.moved"].shape == (tasks, 4))
    for task in range(tasks):
        state.moved.append({part.name: tensors[f"{part.name}.moved"][task].cpu() for _, part, _ in protected})
    return state


def _task(number: int, keep_tasks: bool) -> str:
    return f".{number}" if keep_tasks else ""


def _check_names(tensors: Mapping[str, Tensor], protected: Protected, suffixes: Sequence[str]) -> None:
    wanted_names = {"tasks"}
    for _, part, wanted in protected:
        apart = ENDS if wanted.elementwise else ("covariance",)
        words = {f"{word}{suffix}" for word in apart for suffix in suffixes} | {"moved"}
        words |= set() if wanted.elementwise else {"spectrum", "basis", "rank"}
        wanted_names |= {f"{part.name}.{word}" for word in words}
    differing = sorted(wanted_names ^ set(tensors))
    if differing:
        shown = ", ".join(differing[:6]) + (", ..." if len(differing) > 6 else "")
        raise UserError(f"This null-space state is of another model or setting; names on one side only: {shown}.")


def _add_covariance(
    one: Gathered, part: Part, wanted: Wanted, tensors: Mapping[str, Tensor], named: Mapping[str, Tensor], suffix: str
) -> None:
    groups, _, size = part.matrix(named[part.parameter]).shape
    lead = (groups,) if groups > 1 else ()
    covariance = tensors[f"{part.name}.covariance{suffix}"]
    shapes = {"spectrum": (*lead, size), "rank": lead, "basis": (*lead, size, tensors[f"{part.name}.basis"].shape[-1])}
    fits = all(tensors[f"{part.name}.{word}"].shape == shape for word, shape in shapes.items())
    _check_size(part, fits and covariance.shape == (*lead, size, size))
    known = one.covariances.get(wanted.key)
    if known is not None and known is not covariance and not torch.equal(known.cpu(), covariance.cpu()):
        raise UserError(f"This null-space state is of another setting: {part.name} had another feature there.")
    one.covariances.setdefault(wanted.key, covariance)


def _check_size(part: Part, fits: bool) -> None:
    if not fits:
        raise UserError(f"This null-space state is of another model: {part.name} has another size there.")
