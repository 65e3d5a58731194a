"""Parts of parameters that stay as they are, or within a box: their updates need no projector."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mambacl.nullspace.blocks import Part
from mambacl.nullspace.elementwise import Box
from mambacl.nullspace.part_views import PartViews, Tensors
from mambacl.nullspace.shards import Layout, pieces, pieces_of


class FixedParts:
    """Parts and entire parameters that do not train."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = list(parts)

    def on_this_rank(self, layout: Layout) -> "list[FixedParts]":
        known = [part for part in self.parts if part.parameter in layout]
        return [FixedParts([piece.part for part in known for piece in pieces(part, layout[part.parameter])])]

    def copy(self, tensors: Tensors, present: list[int]) -> list[Tensor]:
        return [self.parts[i].of(tensors[self.parts[i].parameter]).detach().clone() for i in present]

    def restrict(self, tensors: Tensors, present: list[int], before: list[Tensor], counted: bool) -> None:
        for i, old in zip(present, before, strict=True):
            self.parts[i].of(tensors[self.parts[i].parameter]).copy_(old)


class ClampedParts:
    """Parts of A_log of one shape that stay in their boxes; without relaxation, protected values move by (1 - eta)
    times their step."""

    def __init__(self, parts: Sequence[Part], boxes: Sequence[Box], eta: float, relaxed: bool) -> None:
        self.parts, self.eta, self.relaxed = list(parts), eta, relaxed
        self.lower, self.upper = (torch.stack([getattr(box, end) for box in boxes]) for end in ("lower", "upper"))
        self.protects = torch.isfinite(self.lower)
        self.energy = torch.zeros(len(parts), 4, dtype=torch.float64, device=self.lower.device)
        self.firsts, self.counts = [0] * len(self.parts), True
        self._views = PartViews(self.parts, Part.of)

    def on_this_rank(self, layout: Layout) -> "list[ClampedParts]":
        found: dict[tuple[bool, torch.Size], list[tuple[Part, Box]]] = {}
        for number, piece, counts, _ in pieces_of(self.parts, layout):
            own = Box(self.lower[number][piece.rows], self.upper[number][piece.rows])
            found.setdefault((counts, own.lower.shape), []).append((piece.part, own))
        made = []
        for (counts, _), some in found.items():
            made.append(ClampedParts([part for part, _ in some], [box for _, box in some], self.eta, self.relaxed))
            made[-1].counts = counts
        return made

    def copy(self, tensors: Tensors, present: list[int]) -> Tensor:
        values = torch.stack(self._views(tensors, present))
        move(self, values.device, "lower", "upper", "protects", "energy")
        return values

    def restrict(self, tensors: Tensors, present: list[int], before: Tensor, counted: bool) -> None:
        chosen: slice | list[int] = slice(None) if len(present) == len(self.parts) else present
        views = self._views(tensors, present)
        new, old, protects = torch.stack(views), before, self.protects[chosen]
        if self.relaxed:
            lower, upper = self.lower[chosen], self.upper[chosen]
            allowed = torch.where(lower <= upper, new.clamp(lower, upper), old)  # an empty box fixes A
        else:
            allowed = torch.where(protects, old + (1 - self.eta) * (new - old), new)
        if counted and self.counts:  # for a relaxed part, the protected share is what its box cuts off
            change, applied = new - old, allowed - old
            outside, let_through = (
                (change - applied, 0 * applied) if self.relaxed else (change * protects, applied * protects)
            )
            norms = [torch.linalg.vector_norm(t.flatten(1), dim=1) for t in (change, outside, applied, let_through)]
            self.energy[chosen] += torch.stack(norms, dim=1).double().square()
        torch._foreach_copy_(views, list(allowed.unbind(0)))

    def update_energy(self, number: int) -> Tensor:
        return self.energy[number]


def clamped_parts(parts: Sequence[Part], boxes: Mapping[str, Box], eta: float, relaxed: bool) -> list[ClampedParts]:
    """One `ClampedParts` per shape."""
    alike: dict[torch.Size, list[Part]] = {}
    for part in parts:
        alike.setdefault(boxes[part.name].lower.shape, []).append(part)
    return [ClampedParts(members, [boxes[part.name] for part in members], eta, relaxed) for members in alike.values()]


def move(holder: object, device: torch.device, *names: str) -> None:
    """Moves tensors that an object holds, by the names of its attributes."""
    for name in names:
        if getattr(holder, name).device != device:
            setattr(holder, name, getattr(holder, name).to(device))
