"""OWM's projectors, which follow the inputs during training (Zeng et al., *Continual learning of context-dependent
processing in neural networks*, Nature Machine Intelligence 2019).

P starts as the identity. Each step absorbs the rows R of a batch's mean input, P <- (P^-1 + R^T R / alpha)^-1, and
then multiplies the gradient. Alpha falls from 1 to its final value over the steps of a task.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mambacl import processes
from mambacl.nullspace.blocks import Part
from mambacl.nullspace.shards import Layout, is_first_of, pieces


def absorbed(projector: Tensor, rows: Tensor, alpha: float) -> Tensor:
    """P - P R^T (alpha I + R P R^T)^-1 R P for rows R (n, D), without an inverse of P: the same as one recursive update
    P - k k^T / (alpha + r k), k = P r^T, per row. Both can have a leading axis of groups."""
    moved = rows @ projector  # (n, D)
    eye = torch.eye(rows.shape[-2], dtype=rows.dtype, device=rows.device)
    return projector - moved.mT @ torch.linalg.solve(alpha * eye + moved @ rows.mT, moved)


def mean_rows(feature: Tensor) -> Tensor:
    """The mean input of a batch as rows (groups, n, D), one per token or position, over all processes."""
    rows = feature.detach().double().mean(0)  # (n, D); of a convolution's windows (n, groups, D)
    rows = rows.transpose(0, 1).contiguous() if rows.dim() == 3 else rows[None]
    processes.sum_([rows])
    return rows / processes.count()


def in_backward() -> bool:
    """Whether a backward pass is running here. A forward pass inside it is that of gradient checkpointing, which shows
    the same batch again, or a part of it."""
    return torch._C._current_graph_task_id() != -1


class Clock:
    """How far a task is: `state` holds the steps taken and those it will take, 0 if unknown."""

    def __init__(self) -> None:
        self.state = torch.zeros(2, dtype=torch.int64)

    def start(self, steps: int) -> None:
        self.state.copy_(torch.tensor([0, steps]))

    def tick(self) -> None:
        self.state[0] += 1

    def alpha(self, last: float) -> float:
        """`last` to the power of the share of steps taken; `last` if their number is unknown."""
        done, steps = self.state.tolist()
        return float(last ** min(done / steps, 1.0)) if steps else last


class RecursiveParts:
    """Parts that multiply the same feature, with its projector."""

    def __init__(self, parts: Sequence[Part], projector: Tensor, last: float, clock: Clock) -> None:
        """`projector`: (groups, D, D) in float64; `last`: alpha at the end of a task."""
        self.parts, self.projector, self.last, self.clock = list(parts), projector, last, clock
        self.seen: Tensor | None = None
        """rows of the latest batch that the projector has not absorbed"""
        self.energy = torch.zeros(len(self.parts), 4, dtype=torch.float64, device=projector.device)

    def copy(self, tensors: Mapping[str, Tensor], present: list[int]) -> list[Tensor]:
        return [self.parts[i].of(tensors[self.parts[i].parameter]).detach().clone() for i in present]

    def restrict(
        self, tensors: Mapping[str, Tensor], present: list[int], before: Sequence[Tensor], counted: bool
    ) -> None:
        """Absorbs the latest batch, then projects each change. What is removed counts as its protected share."""
        self.absorb()
        self.energy = self.energy.to(self.projector.device)
        for i, old in zip(present, before, strict=True):
            energy = _project(self.parts[i], tensors, old, self.projector)
            if counted:
                self.energy[i] += energy

    def absorb(self) -> None:
        """Takes up the latest batch, once."""
        if self.seen is not None:
            self.projector = absorbed(self.projector.to(self.seen.device), self.seen, self.clock.alpha(self.last))
            self.seen = None

    def on_this_rank(self, layout: Layout) -> "list[RecursivePieces]":
        return [RecursivePieces(self, layout)]

    def update_energy(self, number: int) -> Tensor:
        return self.energy[number]


class RecursivePieces:
    """What this rank holds of the parts of a `RecursiveParts`."""

    def __init__(self, whole: RecursiveParts, layout: Layout) -> None:
        self.whole = whole
        known = [part for part in whole.parts if part.parameter in layout]
        self.pieces = [piece for part in known for piece in pieces(part, layout[part.parameter])]
        self.parts, self.firsts = [piece.part for piece in self.pieces], [0] * len(self.pieces)
        self.counted = [layout[part.parameter].rows is not None or is_first_of(layout) for part in self.parts]
        self.energy = torch.zeros(len(self.parts), 4, dtype=torch.float64, device=whole.projector.device)

    def copy(self, tensors: Mapping[str, Tensor], present: list[int]) -> list[Tensor]:
        return [self.parts[i].of(tensors[self.parts[i].parameter]).detach().clone() for i in present]

    def restrict(
        self, tensors: Mapping[str, Tensor], present: list[int], before: Sequence[Tensor], counted: bool
    ) -> None:
        self.whole.absorb()
        self.energy = self.energy.to(self.whole.projector.device)
        for i, old in zip(present, before, strict=True):
            piece = self.pieces[i]
            projector = self.whole.projector[piece.first : piece.first + piece.part.groups]
            energy = _project(piece.part, tensors, old, projector)
            if counted and self.counted[i]:
                self.energy[i] += energy


def _project(part: Part, tensors: Mapping[str, Tensor], old: Tensor, projector: Tensor) -> Tensor:
    """Projects a part's change, in place, and returns its energies."""
    place = part.of(tensors[part.parameter])
    change = _matrix(part, place - old).double()
    allowed = change @ projector.to(change.device)
    place.copy_(old + part.restored(allowed, place.shape).to(old.dtype))
    norms = [(t * t).sum() for t in (change, change - allowed, allowed)]
    return torch.stack([*norms, torch.zeros_like(norms[0])])


def _matrix(part: Part, values: Tensor) -> Tensor:
    """A part's values as `Part.matrix` gives those of its parameter."""
    return Part(part.kind, part.parameter, side=part.side, groups=part.groups).matrix(values)
