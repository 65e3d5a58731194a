"""The projected step: replaces the change of an optimizer's step by the allowed part of it.

    before = projected_step.snapshot(parameters)
    ...                                             # the optimizer steps as usual
    before.restrict(parameters)                     # each change is restricted, in place

Parts of parameters are restricted in one of three ways: `FixedParts` are reset, `ClampedParts` stay in their boxes, and
the change of `ProjectedParts` (or of `recursive.RecursiveParts`) is multiplied by a projector. `project_gradients` does
this to the gradients instead, if the setting says so. Parts of equal shape are stacked and projected by one
batched product; `projectors.project_part` is the plain twin. On a GPU, the kernels of `projected_step_kernels` do the
same in fewer passes.

The squared norms of each update, and of its share in protected directions, are added up along the way.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mambacl import processes
from mambacl.nullspace.blocks import Part
from mambacl.nullspace.elementwise import Box
from mambacl.nullspace.fixed_parts import ClampedParts, FixedParts, move
from mambacl.nullspace.offload import STACK_BYTES, Carrier
from mambacl.nullspace.part_views import PartViews, Tensors
from mambacl.nullspace.projectors import Decomposition
from mambacl.nullspace.recursive import Clock, RecursiveParts
from mambacl.nullspace.shards import Held, Layout, Piece, is_cut_across, layout_of, on_this_rank, pieces_of, whole
from mambacl.nullspace.split_step import CutParts, Exchange, Here, costs_of, energies_together
from mambacl.ops.precision import float32_products
from mambacl.ops.switch import takes_kernel

# Bases are padded to a multiple of this many columns: a GPU multiplies aligned rows faster, and Triton would compile a
# kernel again for other widths.
ALIGNED = 16
PADDING = 2.0  # a stack's widest basis has at most this many times the columns of its narrowest
CARRIED, PROJECTOR, MASTER, CLOCK = "carried.", "projector.", "master.", "clock"  # names in the state of a step
Keep = Callable[[Tensor], Tensor]  # puts a tensor where it is stored, and returns it there


class ProjectedStep:
    """The restrictions on a model's updates between two consolidations."""

    def __init__(self, constraints: "Sequence[Constraint]" = (), acts_on: str = "update") -> None:
        """`acts_on`: what projectors multiply, the update or the gradient; whatever is fixed or in a box restricts the
        update."""
        self.constraints = list(constraints)
        kinds = (ProjectedParts, RecursiveParts) if acts_on == "gradient" else RecursiveParts
        self._on_gradients = [constraint for constraint in self.constraints if isinstance(constraint, kinds)]
        self.clock = Clock()
        self.carried: dict[str, Tensor] = {}  # energy of this task's updates before a merge or `forget`
        self.shared = False
        """whether ranks that hold the same parameters share the projections out"""
        self.masters: MutableMapping[str, Tensor] = {}
        """float32 masters by parameter, which change with each step"""
        self._here = Here([(constraint, constraint in self._on_gradients) for constraint in self.constraints])
        self._counted = {
            part.name: (constraint, number)
            for constraint in self.constraints
            if not isinstance(constraint, FixedParts)
            for number, part in enumerate(constraint.parts)
        }

    @torch.no_grad()
    def snapshot(self, tensors: Tensors) -> "Snapshot":
        """Copies the current values of the restricted parts in `tensors`; other parts are skipped."""
        here, tensors, found = self._on_this_rank(tensors), on_this_rank(tensors), []
        for constraint in (constraint for constraint, on_gradients in here.constraints if not on_gradients):
            present = [i for i, part in enumerate(constraint.parts) if part.parameter in tensors]
            if present:
                found.append((constraint, present, constraint.copy(tensors, present)))
        return Snapshot(found, None if self._on_gradients else here.exchange)

    def project(self, before: Tensors, after: Tensors, *, counted: bool = True) -> None:
        """Replaces the change from `before` to `after`, in place, by the allowed part of it."""
        self.snapshot(before).restrict(after, counted=counted)

    @torch.no_grad()
    def project_gradients(self, parameters: Tensors) -> None:
        """Replaces gradients, in place, by what is allowed of them, if that is what is projected."""
        if not self._on_gradients:
            return
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        here, found = self._on_this_rank(gradients), on_this_rank(gradients)
        for constraint in (constraint for constraint, on_gradients in here.constraints if on_gradients):
            present = [i for i, part in enumerate(constraint.parts) if part.parameter in found]
            if present:
                before: Any = constraint.copy(found, present)
                for tensor in before:
                    tensor.zero_()
                constraint.restrict(found, present, before, True)
        if here.exchange is not None:
            here.exchange(found)
        self.clock.tick()

    def _on_this_rank(self, tensors: Tensors) -> Here:
        """What this rank restricts of these tensors. All ranks call it, for the same tensors."""
        layout = layout_of(tensors)
        shared = layout is None and self.shared and processes.count() > 1
        if shared:
            layout = {name: Held(tensor.shape) for name, tensor in tensors.items()}
        wanted = None if layout is None else {**(self._here.layout or {}), **layout}
        if wanted == self._here.layout:
            return self._here
        self.count_together()
        if wanted is None:
            self._here = Here([(one, one in self._on_gradients) for one in self.constraints])
        else:
            projected = [one for one in self.constraints if isinstance(one, ProjectedParts)]
            exchange = Exchange(costs_of(projected, tensors)) if shared else None
            self._here = Here([], wanted, [], exchange)
            for one in self.constraints:
                mine: Sequence[Any] = [one] if shared else one.on_this_rank(wanted)
                if exchange is not None and isinstance(one, ProjectedParts):
                    own_names = [name for name, owner in exchange.owners.items() if owner == processes.rank()]
                    mine = one.of_parameters(own_names)
                self._here.constraints += [(own, one in self._on_gradients) for own in mine]
                self._here.counted += [own for own in mine if own is not one and not isinstance(own, FixedParts)]
        return self._here

    def count_together(self) -> None:
        """Adds what each rank has counted of the energies; all ranks call it."""
        if self._here.layout is not None:
            energies_together({name: one.energy[number] for name, (one, number) in self._counted.items()}, self._here)

    def recursive(self) -> "dict[str, RecursiveParts]":
        """The parts with a projector that changes with each step, by the name of the first."""
        return {c.parts[0].name: c for c in self.constraints if isinstance(c, RecursiveParts)}

    def decomposition(self, part: str) -> Decomposition:
        constraint, number = self._counted[part]
        assert isinstance(constraint, ProjectedParts)
        return constraint.bases.decomposition(constraint.places[number])

    def boxes(self) -> dict[str, Box]:
        """The box of each part that is protected element by element."""
        clamped = [constraint for constraint in self.constraints if isinstance(constraint, ClampedParts)]
        return {part.name: Box(c.lower[i], c.upper[i]) for c in clamped for i, part in enumerate(c.parts)}

    def update_energy(self) -> dict[str, Tensor]:
        """By part, (4,): sums over steps of the squared norms of the optimizer's update, of its share in protected
        directions, of the applied update, and of its share in protected directions. All ranks call it."""
        self.count_together()
        rows = {name: constraint.update_energy(i).cpu() for name, (constraint, i) in self._counted.items()}
        for name, row in self.carried.items():
            rows[name] = rows[name] + row if name in rows else row
        return rows

    def nbytes(self) -> int:
        """Bytes of the bases."""
        projected = [constraint for constraint in self.constraints if isinstance(constraint, ProjectedParts)]
        return sum({id(c.bases): c.bases.basis.nbytes for c in projected}.values())

    def state_dict(self) -> dict[str, Tensor]:
        """What changes with each step: the energies so far, recursive projectors and masters. All ranks call it."""
        self.count_together()
        return self._state() | {f"{MASTER}{name}": whole(tensor).clone() for name, tensor in self.masters.items()}

    def _state(self) -> dict[str, Tensor]:
        state = {name: constraint.energy[number] for name, (constraint, number) in self._counted.items()}
        state |= {f"{CARRIED}{name}": row for name, row in self.carried.items()}
        if recursive := self.recursive():
            state |= {f"{PROJECTOR}{name}": constraint.projector for name, constraint in recursive.items()}
            state[CLOCK] = self.clock.state
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.carried = {n.removeprefix(CARRIED): row.cpu() for n, row in state.items() if n.startswith(CARRIED)}
        for one in self._here.counted:
            one.energy.zero_()
        self.masters.update({n.removeprefix(MASTER): t.clone() for n, t in state.items() if n.startswith(MASTER)})
        for name, tensor in self._state().items():
            if name in state:
                tensor.copy_(state[name])


@dataclass(frozen=True)
class Snapshot:
    """Restricted parts before a step: for each constraint, the indices of its parts and their values."""

    found: "Sequence[tuple[Any, list[int], Any]]"
    exchange: Exchange | None = None

    @torch.no_grad()
    def restrict(self, tensors: Tensors, *, counted: bool = True) -> None:
        """Replaces the change since the snapshot, in place, by the allowed part of it."""
        tensors = on_this_rank(tensors)
        for constraint, present, before in self.found:
            constraint.restrict(tensors, present, before, counted)
        if self.exchange is not None:
            self.exchange(tensors)


class ProjectedParts:
    """Parts of equal shape, each with one of the stacked bases. `backend`: `auto` (kernels if they can run), `triton`
    or `plain`."""

    backend = "auto"

    def __init__(
        self,
        parts: Sequence[Part],
        places: Sequence[int],
        bases: "StackedBases",
        firsts: Sequence[int] | None = None,
        groups: int | None = None,
    ) -> None:
        """`places`: the index of each part's basis in the stack. `firsts`: the first group of each part, if it has only
        some `groups` of its basis."""
        self.parts, self.places, self.bases = list(parts), list(places), bases
        self.groups = bases.basis.shape[1] if groups is None else groups
        self.firsts, self.counts = [0] * len(self.parts) if firsts is None else list(firsts), True
        self.energy = torch.zeros(len(parts), self.groups, 2, dtype=torch.float64, device=bases.identity.device)
        """(parts, groups, 2): sums of squares of the updates, and of their components in the basis"""
        self.matrices, self._shaped = PartViews(self.parts, Part.matrix), PartViews(self.parts, Part.of)
        self._numbers: Tensor | None = None

    def on_this_rank(self, layout: Layout) -> "list[ProjectedParts | CutParts]":
        found: dict[tuple[bool, torch.Size], list[tuple[int, Piece]]] = {}
        across = [i for i, part in enumerate(self.parts) if is_cut_across(part, layout)]
        for number, piece, counts, shape in pieces_of(self.parts, layout):
            if number not in across:
                matrix = piece.part.matrix(torch.empty(shape, device="meta"))
                found.setdefault((counts, matrix.shape), []).append((number, piece))
        made: list[ProjectedParts | CutParts] = []
        for (counts, shape), some in found.items():
            places, firsts = [self.places[number] for number, _ in some], [piece.first for _, piece in some]
            own = ProjectedParts([piece.part for _, piece in some], places, self.bases, firsts, shape[0])
            own.counts, own.backend = counts, self.backend
            made.append(own)
        if across:
            made.append(CutParts([self.parts[i] for i in across], [self.places[i] for i in across], self.bases, layout))
        return made

    def of_parameters(self, names: Sequence[str]) -> "list[ProjectedParts]":
        """The same for some parameters only."""
        some = [i for i, part in enumerate(self.parts) if part.parameter in names]
        return (
            [ProjectedParts([self.parts[i] for i in some], [self.places[i] for i in some], self.bases)] if some else []
        )

    def copy(self, tensors: Tensors, present: list[int]) -> Tensor:
        values = torch.stack(self.matrices(tensors, present))
        self.bases.to(values.device)
        move(self, values.device, "energy")
        return values

    def restrict(self, tensors: Tensors, present: list[int], before: Tensor, counted: bool) -> None:
        counted = counted and self.counts
        if len(present) == len(self.parts) and self._restrict_by_kernels(tensors, before, counted):
            return
        old = before.to(torch.promote_types(self.bases.identity.dtype, before.dtype))
        change = torch.stack(self.matrices(tensors, present)).to(old.dtype).sub_(old)
        allowed = self._project_(change, present, counted).add_(old)
        views = self._shaped(tensors, present)
        shaped = [self.parts[i].restored(m, view.shape) for i, m, view in zip(present, allowed, views, strict=True)]
        torch._foreach_copy_(views, shaped)

    def _project_(self, changes: Tensor, present: list[int], counted: bool) -> Tensor:
        """Projects changes (parts, groups, n, D), in place, in at least float32 even if bases are stored in half
        precision."""
        all_present = len(present) == len(self.parts)
        complete = self.groups == self.bases.basis.shape[1]
        every_basis = all_present and complete and self.places == list(range(len(self.bases.basis)))
        chosen = slice(None) if every_basis else self._bases_of(None if all_present else present)
        stacked = (self.bases.on(changes.device), self.bases.identity, self.bases.factor)
        V, identity, factor = (t.flatten(0, 1)[chosen].to(changes.dtype) for t in stacked)
        flat = changes.flatten(0, 1)  # a view: one batch of products over all parts and groups
        with float32_products(tf32=False):  # TF32's three digits would leak into protected directions
            inside = flat @ V
            if counted:
                norms = [torch.linalg.vector_norm(t, dim=(1, 2)) for t in (flat, inside)]
                energy = torch.stack(norms, dim=-1).double().square().unflatten(0, (len(present), -1))
                if all_present:
                    self.energy += energy
                else:
                    self.energy[present] += energy
            flat.mul_(identity).baddbmm_(inside.mul_(factor), V.mT)
        return changes

    def _bases_of(self, present: list[int] | None = None) -> Tensor:
        """Indices of the parts' bases, group by group; on the device, so that a CUDA graph can read them."""
        device, groups = self.bases.identity.device, self.bases.basis.shape[1]
        if present is None and self._numbers is not None and self._numbers.device == device:
            return self._numbers
        chosen = range(len(self.parts)) if present is None else present
        starts = torch.tensor([self.places[i] * groups + self.firsts[i] for i in chosen])
        numbers = (starts[:, None] + torch.arange(self.groups)).flatten().to(device)
        if present is None:
            self._numbers = numbers
        return numbers

    def _restrict_by_kernels(self, tensors: Tensors, before: Tensor, counted: bool) -> bool:
        """Does what `_project_` does with kernels, if they can run; returns whether they did."""
        bases = self.bases
        simple = before.dtype == bases.identity.dtype == torch.float32 and bases.basis.shape[-1] > 0
        if not (simple and takes_kernel(before, self.backend)):
            return False
        found = self.matrices.addresses(tensors)
        if found is None or found.addresses.device != before.device:
            return False
        from mambacl.nullspace.projected_step_kernels import project_

        basis = bases.on(before.device).flatten(0, 1)
        project_(
            found.addresses, found.strides, before.flatten(0, 1), basis, self._bases_of(), bases.widths,
            bases.identity, bases.factor, self.energy.view(-1, 2) if counted else None,
        )  # fmt: skip
        torch.autograd.graph.increment_version(self.matrices(tensors))  # as every in-place operation does
        return True

    def update_energy(self, number: int) -> Tensor:
        bases, place = self.bases, self.places[number]
        total, inside = self.energy[number].unbind(-1)
        null, identity = bases.holds_null_space[place], bases.identity[place, :, 0, 0].double()
        both = identity + bases.factor[place, :, 0, 0].double()
        protected = torch.where(null, (total - inside).clamp(min=0), inside)
        let_through = torch.where(null, identity, both).square() * protected
        free = torch.where(null, both, identity).square() * (total - protected).clamp(min=0)
        return torch.stack([t.sum() for t in (total, protected, let_through + free, let_through)])


class StackedBases:
    """Bases of equal size, (stacked, groups, D, r), padded with zero columns to `width`.

    They are stored on the device, or elsewhere: then `keep` puts them there, and the carrier brings them."""

    def __init__(
        self, members: Sequence[Decomposition], width: int, eta: float, scaling: str, dtype: torch.dtype,
        device: torch.device, keep: Keep | None = None, carrier: Carrier | None = None,
    ) -> None:  # fmt: skip
        size, groups = members[0].spectrum.shape[-1], members[0].ranks.numel()
        if device.type == "cuda":
            width = -(-width // ALIGNED) * ALIGNED
        self.spectra = [(member.spectrum, member.ranks) for member in members]
        home = device if keep is None else torch.device("cpu")
        self.basis = torch.zeros(len(members), groups, size, width, dtype=dtype, device=home)
        numbers = torch.empty(2, len(members), groups, 1, 1, dtype=torch.float64)
        for place, member in enumerate(members):
            projector = member.projector(eta, scaling)
            own = member.basis.reshape(groups, size, -1)
            self.basis[place, :, :, : own.shape[-1]] = own
            for row, number in enumerate((projector.identity, projector.factor)):
                numbers[row, place] = torch.as_tensor(number, dtype=torch.float64).cpu()
        self.carrier, self.number = carrier, 0
        if keep is not None:
            self.basis = keep(self.basis)
        if carrier is not None:
            self.number = carrier.add(self.basis)
        self.identity, self.factor = numbers.to(device, torch.promote_types(dtype, torch.float32))
        """(stacked, groups, 1, 1)"""
        null = torch.stack([member.holds_null_space.reshape(groups) for member in members])
        self.holds_null_space = null.to(device)  # (stacked, groups)
        ranks = torch.stack([member.ranks.reshape(groups) for member in members])
        self.widths = torch.minimum(ranks, size - ranks).to(device, torch.int32)
        """(stacked, groups): columns of each basis before the padding"""

    def to(self, device: torch.device) -> None:
        """Moves to the device of the parameters."""
        moving = ("basis",) if self.carrier is None else ()
        move(self, device, *moving, "identity", "factor", "holds_null_space", "widths")

    def on(self, device: torch.device) -> Tensor:
        """The bases on the device, for use at once."""
        return self.basis if self.carrier is None else self.carrier.bring(self.number, device)

    def decomposition(self, place: int) -> Decomposition:
        spectrum, ranks = self.spectra[place]
        width = int(torch.minimum(ranks, spectrum.shape[-1] - ranks).max())
        basis = self.basis[place, :, :, :width]
        return Decomposition(spectrum, ranks, basis if ranks.dim() else basis[0])


Constraint = FixedParts | ClampedParts | ProjectedParts | RecursiveParts


def projected_parts(
    uses: Sequence[tuple[Decomposition, Sequence[Part]]],
    shapes: Mapping[str, torch.Size],
    eta: float,
    scaling: str,
    dtype: torch.dtype,
    device: torch.device,
    keep: Keep | None = None,
) -> list[ProjectedParts]:
    """Stacks bases and parts. `uses`: for each decomposition, the parts it projects; `shapes`: of their parameters;
    `keep`: where bases are stored that are not on the device, in stacks of limited size."""
    carrier = None if keep is None else Carrier()
    alike: dict[tuple[int, int], list[tuple[Decomposition, Sequence[Part]]]] = {}
    for decomposition, parts in uses:
        size, groups = decomposition.spectrum.shape[-1], decomposition.ranks.numel()
        alike.setdefault((size, groups), []).append((decomposition, parts))
    found = []
    for (size, groups), members in alike.items():
        members.sort(key=lambda member: member[0].basis.shape[-1])
        while members:
            widest = PADDING * members[0][0].basis.shape[-1]
            count = sum(decomposition.basis.shape[-1] <= widest for decomposition, _ in members)
            width = members[count - 1][0].basis.shape[-1]
            most = count if keep is None else max(1, STACK_BYTES // max(1, groups * size * width * dtype.itemsize))
            for start in range(0, count, most):
                own = members[start : min(start + most, count)]
                bases = StackedBases([d for d, _ in own], width, eta, scaling, dtype, device, keep, carrier)
                found += _by_shape([parts for _, parts in own], bases, shapes)
            del members[:count]
    return found


def _by_shape(
    users: Sequence[Sequence[Part]], bases: StackedBases, shapes: Mapping[str, torch.Size]
) -> list[ProjectedParts]:
    """Groups the parts of a stack by shape; parts of one shape that share a basis go into different groups."""
    together: dict[tuple[int | str, ...], list[tuple[Part, int]]] = {}
    for place, parts in enumerate(users):
        seen: dict[tuple[int, ...], int] = {}
        for part in parts:
            shape = tuple(part.matrix(torch.empty(shapes[part.parameter], device="meta")).shape)
            seen[shape] = seen.get(shape, -1) + 1
            together.setdefault((*shape, part.side, seen[shape]), []).append((part, place))
    return [ProjectedParts([part for part, _ in some], [p for _, p in some], bases) for some in together.values()]


def restrict_steps(
    optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor], current: Callable[[], ProjectedStep]
) -> None:
    """Makes every future step of the optimizer go through the projected step that is `current` then. `named`: the
    parameters, by the names that its parts use."""
    taken: list[Snapshot] = []
    optimizer.register_step_pre_hook(lambda *_: taken.append(current().snapshot(named)))
    optimizer.register_step_post_hook(lambda *_: taken.pop().restrict(named, counted=False))
