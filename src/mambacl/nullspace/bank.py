"""All projectors of a model at once: those of equal shape are stacked, and their updates projected by one batched
product. `Projector.apply` is the plain twin. On a GPU, the kernels of `bank_kernels` do the same in fewer passes.

On its way a bank counts, for each part, how much of the optimizer's update fell into protected directions.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mambacl.nullspace.adapters import Part
from mambacl.nullspace.elementwise import Box
from mambacl.nullspace.projectors import Decomposition
from mambacl.ops.precision import float32_products
from mambacl.ops.switch import takes_kernel

ALIGNED = 16  # columns: a GPU multiplies matrices faster whose rows begin where it loads four numbers at once, and
# Triton compiles a kernel again for numbers that are no multiple of 16
MOST_TABLES = 16  # an optimizer may keep copies of its parameters, each at places of its own
PADDING = 2.0  # bases are stacked with others that are at most so many times as wide: few stacks are few kernels
Tensors = Mapping[str, Tensor]  # parameters by name
Layout = tuple[tuple[int, torch.dtype, tuple[int, ...]], ...]  # where parameters lie, and how


@dataclass(frozen=True)
class Table:
    """Where matrices lie, on their device, and how far apart their rows and columns are: what a kernel needs to find
    them."""

    addresses: Tensor
    strides: tuple[int, int]


class Views:
    """Views of some parts of parameters, made anew only when the parameters are others than last time."""

    def __init__(self, parts: Sequence[Part], view: Callable[[Part, Tensor], Tensor]) -> None:
        self.parts, self.view = parts, view
        self._of: Layout = ()
        self._views: list[Tensor] = []
        self._tables: dict[Layout, Table] = {}
        self._recorded: list[Table] = []  # a CUDA graph reads them for as long as it lives

    def __call__(self, tensors: Tensors) -> list[Tensor]:
        given = [tensors[part.parameter] for part in self.parts]
        layout = tuple((tensor.data_ptr(), tensor.dtype, tensor.stride()) for tensor in given)
        if layout != self._of:
            views = [self.view(part, tensor.detach()) for part, tensor in zip(self.parts, given, strict=True)]
            if not all(map(_shares_memory, views, given)):  # of a weight in another layout, a matrix is a copy
                return views
            self._of, self._views = layout, views
        return self._views

    def table(self, tensors: Tensors) -> Table | None:
        """Of views (groups, n, D), an address for each group; None where they are no views, not of float32, or laid
        out each in its own way."""
        views = self(tensors)
        if views is not self._views:
            return None
        table = self._tables.get(self._of)
        if table is None:
            strides = {view.stride() for view in views}
            if len(strides) > 1 or any(v.dtype != torch.float32 or v.device != views[0].device for v in views):
                return None
            group, row, column = strides.pop()
            size = views[0].element_size()
            places = [view.data_ptr() + size * group * g for view in views for g in range(len(view))]
            table = Table(torch.tensor(places, device=views[0].device), (row, column))
            if len(self._tables) >= MOST_TABLES:
                del self._tables[next(iter(self._tables))]
            self._tables[self._of] = table
        if _recording(table.addresses):
            self._recorded.append(table)
        return table


def _recording(tensor: Tensor) -> bool:
    """Whether what reads it now goes into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@dataclass
class Slot:
    """Parts of equal shape, one for each of some bases of a stack."""

    parts: list[Part] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    energy: Tensor = field(default_factory=lambda: torch.empty(0))
    """(parts, groups, 2), float64: sums of squares of the updates, and of what the basis holds of them"""
    numbers: Tensor | None = None  # of the parts' bases, group by group, in the stack

    def __post_init__(self) -> None:
        self.matrices = Views(self.parts, Part.matrix)
        self.shaped = Views(self.parts, Part.of)

    def some(self, numbers: list[int]) -> "Slot":
        return Slot([self.parts[i] for i in numbers], [self.places[i] for i in numbers], self.energy[numbers])


def without_tf32() -> AbstractContextManager[None]:
    """Whatever the model is trained in: an update that is projected to three digits leaves what it should not touch
    unchanged to three digits."""
    return float32_products(tf32=False)


@dataclass
class Stack:
    """Bases of equal shape, (stacked, groups, D, r), padded with zero columns to the widest."""

    basis: Tensor
    identity: Tensor  # (stacked, groups, 1, 1)
    factor: Tensor
    holds_null_space: Tensor  # (stacked, groups)
    widths: Tensor  # (stacked, groups): columns of each basis before the padding
    slots: list[Slot] = field(default_factory=list)

    def follow(self, device: torch.device) -> None:
        """Moves to where the parameters are now."""
        if self.basis.device != device:
            for name in ("basis", "identity", "factor", "holds_null_space", "widths"):
                setattr(self, name, getattr(self, name).to(device))
            for slot in self.slots:
                slot.energy = slot.energy.to(device)

    def project_(self, slot: Slot, changes: Tensor, counted: bool = True) -> Tensor:
        """Projects changes (parts, groups, n, D), in place. Bases kept in half precision are brought up for it."""
        whole = slot.places == list(range(len(self.basis)))
        chosen = slice(None) if whole else self._numbers(slot)
        stacked = (self.basis, self.identity, self.factor)
        V, identity, factor = (t.flatten(0, 1)[chosen].to(changes.dtype) for t in stacked)
        flat = changes.flatten(0, 1)  # a view: one batch of products over all parts and groups
        with without_tf32():
            inside = flat @ V
            if counted:
                norms = [torch.linalg.vector_norm(t, dim=(1, 2)) for t in (flat, inside)]
                slot.energy += torch.stack(norms, dim=-1).double().square().view_as(slot.energy)
            flat.mul_(identity).baddbmm_(inside.mul_(factor), V.mT)
        return changes

    def _numbers(self, slot: Slot) -> Tensor:
        """On the device, where a step that waits for nobody can read them."""
        if slot.numbers is None or slot.numbers.device != self.basis.device:
            groups = self.basis.shape[1]
            numbers = torch.tensor(slot.places)[:, None] * groups + torch.arange(groups)
            slot.numbers = numbers.flatten().to(self.basis.device)
        return slot.numbers

    def replace_(self, slot: Slot, tensors: Tensors, old: Tensor, counted: bool, backend: str) -> bool:
        """Does by kernels, where they serve, what `Remembered.project` does by `project_`; says whether they did."""
        simple = old.dtype == self.identity.dtype == torch.float32 and self.basis.shape[-1] > 0
        if not (simple and takes_kernel(old, backend)):
            return False
        table = slot.matrices.table(tensors)
        if table is None or table.addresses.device != old.device:
            return False
        from mambacl.nullspace.bank_kernels import project_

        project_(
            table.addresses, table.strides, old.flatten(0, 1), self.basis.flatten(0, 1), self._numbers(slot),
            self.widths, self.identity, self.factor, slot.energy.view(-1, 2) if counted else None,
        )  # fmt: skip
        torch.autograd.graph.increment_version(slot.matrices(tensors))  # as everything does that changes a tensor
        return True

    def moved(self, slot: Slot, number: int) -> Tensor:
        """Squares of a part's updates, of their protected share, of what was applied, and of its share: (4,)."""
        place = slot.places[number]
        total, inside = slot.energy[number].unbind(-1)
        null, identity = self.holds_null_space[place], self.identity[place, :, 0, 0].double()
        both = identity + self.factor[place, :, 0, 0].double()
        protected = torch.where(null, (total - inside).clamp(min=0), inside)
        let_through = torch.where(null, identity, both).square() * protected
        free = torch.where(null, both, identity).square() * (total - protected).clamp(min=0)
        return torch.stack([t.sum() for t in (total, protected, let_through + free, let_through)])


class Bank:
    """`uses`: for each projector, the parts whose updates it projects; `shapes`: of their parameters. `backend` is
    whether kernels do it, `auto` where they serve, or `triton` or `plain`."""

    backend = "auto"

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
        slots: dict[tuple[int | str, ...], Slot] = {}
        for place, parts in enumerate(users):
            seen: dict[tuple[int, ...], int] = {}
            for part in parts:
                shape = tuple(part.matrix(torch.empty(shapes[part.parameter], device="meta")).shape)
                seen[shape] = seen.get(shape, -1) + 1  # two parts of one shape go to two slots
                slot = slots.setdefault((*shape, part.side, seen[shape]), Slot())
                slot.parts.append(part)
                slot.places.append(place)
        groups, device = stack.basis.shape[1], stack.basis.device
        for slot in slots.values():
            slot.energy = torch.zeros(len(slot.parts), groups, 2, dtype=torch.float64, device=device)
            stack.slots.append(slot)
            self.slots |= {part.name: (stack, slot, number) for number, part in enumerate(slot.parts)}

    def remember(self, tensors: Tensors) -> "Remembered":
        """The parts as they are now. Parts of parameters that are not given are left out."""
        found = []
        for stack in self.stacks:
            stack.follow(next(iter(tensors.values())).device if tensors else stack.basis.device)
            for slot in stack.slots:
                there = [i for i, part in enumerate(slot.parts) if part.parameter in tensors]
                if there:
                    some = slot if len(there) == len(slot.parts) else slot.some(there)
                    found.append((stack, slot, some, there, torch.stack(some.matrices(tensors))))
        return Remembered(found, self.backend)

    def project(self, before: Tensors, after: Tensors, counted: bool = True) -> None:
        """Replaces the change of every part from `before` to `after`, in place, by its projection."""
        self.remember(before).project(after, counted)

    def moved(self) -> dict[str, Tensor]:
        return {name: stack.moved(slot, number) for name, (stack, slot, number) in self.slots.items()}

    def nbytes(self) -> int:
        """Of the bases, which projecting needs at hand."""
        return sum(stack.basis.nbytes for stack in self.stacks)


@dataclass(frozen=True)
class Remembered:
    """Parts as they were, slot by slot."""

    found: list[tuple[Stack, Slot, Slot, list[int], Tensor]]
    backend: str = "auto"

    @torch.no_grad()
    def project(self, tensors: Tensors, counted: bool = True) -> None:
        """Replaces the change of every part since then, in place, by its projection."""
        for stack, slot, some, there, then in self.found:
            if some is slot and stack.replace_(slot, tensors, then, counted, self.backend):
                continue
            old = then.to(torch.promote_types(stack.identity.dtype, then.dtype))
            change = torch.stack(some.matrices(tensors)).to(old.dtype).sub_(old)
            result = stack.project_(some, change, counted).add_(old)
            if some is not slot:
                slot.energy[there] = some.energy
            places = some.shaped(tensors)
            shaped = [p.restored(m, t.shape) for p, m, t in zip(some.parts, result.unbind(0), places, strict=True)]
            torch._foreach_copy_(places, shaped)


def _stacked(
    members: Sequence[Decomposition], eta: float, scaling: str, dtype: torch.dtype, device: torch.device
) -> Stack:
    size, groups = members[0].spectrum.shape[-1], members[0].ranks.numel()
    width = max(member.basis.shape[-1] for member in members)
    if device.type == "cuda":
        width = -(-width // ALIGNED) * ALIGNED
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
    ranks = torch.stack([member.ranks.reshape(groups) for member in members])
    return Stack(basis, identity, factor, null, torch.minimum(ranks, size - ranks).to(device, torch.int32))


class Fence:
    """Parts of A_log, of one shape, that stay in their boxes; with eta below 1 and no relaxation they move by (1 - eta)
    of their step."""

    def __init__(self, parts: Sequence[Part], boxes: Sequence[Box], eta: float, relaxed: bool) -> None:
        self.parts, self.eta, self.relaxed = list(parts), eta, relaxed
        self.lower, self.upper = (torch.stack([getattr(box, end) for box in boxes]) for end in ("lower", "upper"))
        self.protects = torch.isfinite(self.lower)
        self.energy = torch.zeros(len(parts), 4, dtype=torch.float64, device=self.lower.device)  # as of Stack.moved
        self._views = Views(self.parts, Part.of)

    def boxes(self) -> dict[str, Box]:
        return {part.name: Box(self.lower[i], self.upper[i]) for i, part in enumerate(self.parts)}

    def remember(self, tensors: Tensors) -> tuple[list[int], Tensor]:
        """The parts as they are now, and which of them are given."""
        if all(part.parameter in tensors for part in self.parts):
            return list(range(len(self.parts))), torch.stack(self._views(tensors))
        there = [i for i, part in enumerate(self.parts) if part.parameter in tensors]
        views = [self.parts[i].of(tensors[self.parts[i].parameter].detach()) for i in there]
        return there, torch.stack(views) if views else torch.empty(0)

    @torch.no_grad()
    def project(self, remembered: tuple[list[int], Tensor], tensors: Tensors, counted: bool = True) -> None:
        there, old = remembered
        if not there:
            return
        if self.lower.device != old.device:
            for name in ("lower", "upper", "protects", "energy"):
                setattr(self, name, getattr(self, name).to(old.device))
        whole = len(there) == len(self.parts)
        chosen: slice | list[int] = slice(None) if whole else there
        views = self._views(tensors) if whole else [self.parts[i].of(tensors[self.parts[i].parameter]) for i in there]
        new, protects = torch.stack(views), self.protects[chosen]
        if self.relaxed:
            lower, upper = self.lower[chosen], self.upper[chosen]
            allowed = torch.where(lower <= upper, new.clamp(lower, upper), old)  # boxes that do not meet hold A still
        else:
            allowed = torch.where(protects, old + (1 - self.eta) * (new - old), new)
        if counted:  # of a relaxed part, what is protected is what lies outside of its box
            change, applied = new - old, allowed - old
            outside, let_through = (
                (change - applied, 0 * applied) if self.relaxed else (change * protects, applied * protects)
            )
            sums = (change, outside, applied, let_through)
            norms = [torch.linalg.vector_norm(t.flatten(1), dim=1) for t in sums]
            self.energy[chosen] += torch.stack(norms, dim=1).double().square()
        torch._foreach_copy_(views, list(allowed.unbind(0)))


def fences(parts: Sequence[Part], boxes: Mapping[str, Box], eta: float, relaxed: bool) -> list[Fence]:
    """One for each shape."""
    alike: dict[torch.Size, list[Part]] = {}
    for part in parts:
        alike.setdefault(boxes[part.name].lower.shape, []).append(part)
    return [Fence(members, [boxes[part.name] for part in members], eta, relaxed) for members in alike.values()]


@dataclass(frozen=True)
class Snapshot:
    """Parameters as they were before a step."""

    whole: Tensors
    fixed: Sequence[tuple[Part, Tensor]]
    projected: Remembered | None
    fenced: Sequence[tuple[Fence, tuple[list[int], Tensor]]]

    @torch.no_grad()
    def project(self, tensors: Tensors, *, counted: bool = True) -> None:
        """Replaces the change since then, in place, by what is allowed of it."""
        for name, old in self.whole.items():
            tensors[name].copy_(old)
        for part, old in self.fixed:
            part.of(tensors[part.parameter]).copy_(old)
        for fence, remembered in self.fenced:
            fence.project(remembered, tensors, counted)
        if self.projected is not None:
            self.projected.project(tensors, counted)
