"""All projectors of a model at once: those of equal shape are stacked, and their updates projected by one batched
product. `Projector.apply` is the plain twin.

On its way a bank counts, for each part, how much of the optimizer's update fell into protected directions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mambacl.nullspace.adapters import Part
from mambacl.nullspace.elementwise import Box
from mambacl.nullspace.projectors import Decomposition

PADDING = 1.25  # bases are stacked with others that are at most so many times as wide


@dataclass
class Slot:
    """Parts of equal shape, one for each of some bases of a stack."""

    parts: list[Part]
    places: list[int]
    energy: Tensor  # (parts, groups, 2), float64: sums of squares of the updates, and of what the basis holds of them


@dataclass
class Stack:
    """Bases of equal shape, (stacked, groups, D, r), padded with zero columns to the widest."""

    basis: Tensor
    identity: Tensor  # (stacked, groups, 1, 1)
    factor: Tensor
    holds_null_space: Tensor  # (stacked, groups)
    slots: list[Slot] = field(default_factory=list)

    def project_(self, slot: Slot, changes: Tensor, counted: bool = True) -> Tensor:
        """Projects changes (parts, groups, n, D), in place. Bases kept in half precision are brought up for it."""
        places: slice | list[int] = slice(None) if slot.places == list(range(len(self.basis))) else slot.places
        V = self.basis[places].to(changes.dtype).flatten(0, 1)
        identity, factor = (t[places].to(changes.dtype).flatten(0, 1) for t in (self.identity, self.factor))
        flat = changes.flatten(0, 1)  # a view: one batch of products over all parts and groups
        inside = flat @ V
        if counted:
            norms = [torch.linalg.vector_norm(t, dim=(1, 2), dtype=torch.float64) for t in (flat, inside)]
            slot.energy += torch.stack(norms, dim=-1).square().view_as(slot.energy)
        flat.mul_(identity).baddbmm_(inside.mul_(factor), V.mT)
        return changes

    def moved(self, slot: Slot, number: int) -> Tensor:
        """Squares of a part's updates, of their protected share, of what was applied of both: (4,)."""
        place = slot.places[number]
        total, inside = slot.energy[number].unbind(-1)
        null, identity = self.holds_null_space[place], self.identity[place, :, 0, 0].double()
        both = identity + self.factor[place, :, 0, 0].double()
        protected = torch.where(null, (total - inside).clamp(min=0), inside)
        let_through = torch.where(null, identity, both).square() * protected
        free = torch.where(null, both, identity).square() * (total - protected).clamp(min=0)
        return torch.stack([t.sum() for t in (total, protected, let_through + free, let_through)])


class Bank:
    """`uses`: for each projector, the parts whose updates it projects; `shapes`: of their parameters."""

    def __init__(
        self,
        uses: Sequence[tuple[Decomposition, Sequence[Part]]],
        shapes: Mapping[str, torch.Size],
        eta: float,
        scaling: str,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.stacks: list[Stack] = []
        self.slots: dict[str, tuple[Stack, Slot, int]] = {}  # by part
        alike: dict[tuple[int, int], list[tuple[Decomposition, Sequence[Part]]]] = {}
        for decomposition, parts in uses:
            size, groups = decomposition.spectrum.shape[-1], decomposition.ranks.numel()
            alike.setdefault((size, groups), []).append((decomposition, parts))
        for members in alike.values():
            members.sort(key=lambda member: member[0].basis.shape[-1])
            while members:
                widest = PADDING * members[0][0].basis.shape[-1]
                count = sum(decomposition.basis.shape[-1] <= widest for decomposition, _ in members)
                stack = _stacked([d for d, _ in members[:count]], eta, scaling, dtype, device)
                self._assign([parts for _, parts in members[:count]], stack, shapes)
                self.stacks.append(stack)
                del members[:count]

    def _assign(self, users: Sequence[Sequence[Part]], stack: Stack, shapes: Mapping[str, torch.Size]) -> None:
        slots: dict[tuple[int, ...], Slot] = {}
        for place, parts in enumerate(users):
            seen: dict[tuple[int, ...], int] = {}
            for part in parts:
                shape = tuple(part.matrix(torch.empty(shapes[part.parameter], device="meta")).shape)
                seen[shape] = seen.get(shape, -1) + 1  # two parts of one shape go to two slots
                slot = slots.setdefault((*shape, seen[shape]), Slot([], [], torch.empty(0)))
                slot.parts.append(part)
                slot.places.append(place)
        groups, device = stack.basis.shape[1], stack.basis.device
        for slot in slots.values():
            slot.energy = torch.zeros(len(slot.parts), groups, 2, dtype=torch.float64, device=device)
            stack.slots.append(slot)
            self.slots |= {part.name: (stack, slot, number) for number, part in enumerate(slot.parts)}

    @torch.no_grad()
    def project(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor], counted: bool = True) -> None:
        """Replaces the change of every part from `before` to `after`, in place, by its projection. Parts of parameters
        that are not given are left out."""
        for stack in self.stacks:
            for slot in stack.slots:
                there = [i for i, part in enumerate(slot.parts) if part.parameter in before]
                if len(there) == len(slot.parts):
                    _project(stack, slot, before, after, counted)
                elif there:
                    parts, places = [slot.parts[i] for i in there], [slot.places[i] for i in there]
                    some = Slot(parts, places, slot.energy[there])
                    _project(stack, some, before, after, counted)
                    slot.energy[there] = some.energy

    def moved(self) -> dict[str, Tensor]:
        return {name: stack.moved(slot, number) for name, (stack, slot, number) in self.slots.items()}

    def nbytes(self) -> int:
        """Of the bases, which projecting needs at hand."""
        return sum(stack.basis.nbytes for stack in self.stacks)


def _stacked(
    members: Sequence[Decomposition], eta: float, scaling: str, dtype: torch.dtype, device: torch.device
) -> Stack:
    size, groups = members[0].spectrum.shape[-1], members[0].ranks.numel()
    width = max(member.basis.shape[-1] for member in members)
    basis = torch.zeros(len(members), groups, size, width, dtype=dtype, device=device)
    numbers = torch.empty(2, len(members), groups, 1, 1, dtype=torch.float64)
    for place, member in enumerate(members):
        projector = member.projector(eta, scaling)
        own = member.basis.reshape(groups, size, -1)
        basis[place, :, :, : own.shape[-1]] = own
        for row, number in enumerate((projector.identity, projector.factor)):
            numbers[row, place] = torch.as_tensor(number, dtype=torch.float64).cpu()
    null = torch.stack([member.holds_null_space.reshape(groups) for member in members]).to(device)
    identity, factor = numbers.to(device, torch.promote_types(dtype, torch.float32))
    return Stack(basis, identity, factor, null)


def _project(
    stack: Stack, slot: Slot, before: Mapping[str, Tensor], after: Mapping[str, Tensor], counted: bool
) -> None:
    precision = stack.identity.dtype
    old = torch.stack([part.matrix(before[part.parameter]) for part in slot.parts]).to(precision)
    new = torch.stack([part.matrix(after[part.parameter]) for part in slot.parts]).to(precision)
    result = stack.project_(slot, new.sub_(old), counted).add_(old)
    places = [part.of(after[part.parameter]) for part in slot.parts]
    shaped = [p.restored(m, place.shape) for p, m, place in zip(slot.parts, result.unbind(0), places, strict=True)]
    torch._foreach_copy_(places, shaped)


@dataclass
class Fence:
    """A part of A_log that stays in its box; with eta below 1 and no relaxation it moves by (1 - eta) of its step."""

    part: Part
    box: Box
    eta: float
    relaxed: bool
    energy: Tensor  # (4,), float64: as of `Stack.moved`

    @torch.no_grad()
    def project(self, before: Tensor, after: Tensor, counted: bool = True) -> None:
        old, new = self.part.of(before), self.part.of(after)
        change = new - old
        protected = self.box.protects()
        if self.relaxed:
            allowed = new.clamp(self.box.lower, self.box.upper)
        else:
            allowed = torch.where(protected, old + (1 - self.eta) * change, new)
        if counted:
            applied = allowed - old
            sums = (change, change * protected, applied, applied * protected)
            self.energy += torch.stack([t.double().square().sum() for t in sums])
        new.copy_(allowed)
