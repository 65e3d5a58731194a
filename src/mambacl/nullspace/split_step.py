"""A projected step on several ranks: each restricts what it holds, or its share of what all hold.

- FSDP2 has cut the parameters: each rank restricts its rows. Only a projector from the left, which multiplies columns,
  needs the other ranks' rows; they exchange the products with the basis (`CutParts`), which have as many rows as the
  basis has columns.
- All ranks hold the same parameters and share the work out: each projects some, and sends them to the others
  (`Exchange`). This pays if bases have many columns: see `NullSpace`.

Either way each rank counts the energies of what it restricts, and `energies_together` adds them up.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mambacl import processes
from mambacl.nullspace.blocks import Part
from mambacl.nullspace.shards import Layout, Piece, group_of, is_first_of, pieces
from mambacl.nullspace.sharing import shared_out
from mambacl.ops.precision import float32_products

Tensors = Mapping[str, Tensor]


@dataclass
class Here:
    """What this rank does of a step. `constraints`: what it restricts, and whether in gradients."""

    constraints: list[tuple[Any, bool]]
    layout: Layout | None = None  # None: all ranks hold all parameters
    counted: list[Any] = field(default_factory=list)  # constraints whose energies cover only this rank's share
    exchange: "Exchange | None" = None


class Exchange:
    """Sends parameters, or gradients, from the rank that has projected them to the others."""

    def __init__(self, costs: Mapping[str, float]) -> None:
        """`costs`: of the projections of each parameter."""
        self.owners = shared_out(costs)

    def __call__(self, tensors: Tensors) -> None:
        for owner in range(processes.count()):
            names = [name for name, rank in self.owners.items() if rank == owner and name in tensors]
            for dtype in dict.fromkeys(tensors[name].dtype for name in names):
                some = [tensors[name].detach() for name in names if tensors[name].dtype == dtype]
                flat = torch.cat([tensor.reshape(-1) for tensor in some])
                processes.copy_from([flat], owner)
                if owner != processes.rank():
                    for tensor, values in zip(some, flat.split([t.numel() for t in some]), strict=True):
                        tensor.copy_(values.view_as(tensor))


def costs_of(constraints: Iterable[Any], tensors: Tensors) -> dict[str, float]:
    """By parameter, what its projection costs. All parts of a parameter stay together: they can overlap, and whole
    parameters are exchanged."""
    found: dict[str, float] = {}
    for constraint in constraints:
        for part in constraint.parts:
            if part.parameter in tensors:
                work = part.of(tensors[part.parameter]).numel() * (1 + constraint.bases.basis.shape[-1])
                found[part.parameter] = found.get(part.parameter, 0.0) + work
    return found


class CutParts:
    """Parts with a projector from the left, whose columns are cut: what V^T U is on all ranks is the sum over them."""

    def __init__(self, parts: Sequence[Part], places: Sequence[int], bases: Any, layout: Layout) -> None:
        """`places`: the index of each part's basis in the stack."""
        self.parts, self.places, self.bases = list(parts), list(places), bases
        found = [pieces(part, layout[part.parameter]) for part in parts]
        self.pieces: list[Piece | None] = [some[0] if some else None for some in found]
        self.group, self.is_first = group_of(layout), is_first_of(layout)
        blank = (part.matrix(torch.empty(layout[part.parameter].shape, device="meta")) for part in parts)
        self.rows = [matrix.shape[1] for matrix in blank]
        """of each part's matrix, whose columns are cut"""
        self.energy = torch.zeros(len(parts), 1, 2, dtype=torch.float64, device=bases.identity.device)
        self.firsts = [0] * len(self.parts)

    def _matrix(self, i: int, tensors: Tensors) -> Tensor | None:
        """What this rank holds of a part, as (n, rows)."""
        piece = self.pieces[i]
        return None if piece is None else piece.part.matrix(tensors[piece.part.parameter].detach())[0]

    def copy(self, tensors: Tensors, present: list[int]) -> list[Tensor | None]:
        self.bases.to(tensors[self.parts[present[0]].parameter].device)
        found = (self._matrix(i, tensors) for i in present)
        return [None if matrix is None else matrix.clone() for matrix in found]

    def restrict(self, tensors: Tensors, present: list[int], before: list[Tensor | None], counted: bool) -> None:
        bases = self.bases
        self.energy = self.energy.to(bases.identity.device)
        dtype = bases.identity.dtype
        for i in present:
            dtype = torch.promote_types(dtype, tensors[self.parts[i].parameter].dtype)
        changes: list[Tensor | None] = []
        inside: list[Tensor] = []
        with float32_products(tf32=False):
            for i, old in zip(present, before, strict=True):
                V, piece, now = self._basis(i, dtype), self.pieces[i], self._matrix(i, tensors)
                if piece is None or now is None or old is None:
                    changes.append(None)
                    inside.append(V.new_zeros(self.rows[i], V.shape[1]))
                    continue
                change = now.to(dtype) - old.to(dtype)
                changes.append(change)
                inside.append(change @ V[piece.rows])
            flat = torch.cat([one.reshape(-1) for one in inside])
            torch.distributed.all_reduce(flat, group=self.group)
            sums = flat.split([one.numel() for one in inside])
            for i, old, moved, total in zip(present, before, changes, sums, strict=True):
                V, piece = self._basis(i, dtype), self.pieces[i]
                share = total.view(-1, V.shape[1])
                if counted and self.is_first:
                    self.energy[i, 0, 1] += torch.linalg.vector_norm(share).double().square()
                if piece is None or moved is None or old is None:
                    continue
                if counted:
                    self.energy[i, 0, 0] += torch.linalg.vector_norm(moved).double().square()
                identity, factor = (n[self.places[i], 0].to(dtype) for n in (bases.identity, bases.factor))
                allowed = identity * moved + factor * (share @ V[piece.rows].mT)
                place = piece.part.of(tensors[piece.part.parameter].detach())
                place.copy_(piece.part.restored((old.to(dtype) + allowed)[None], place.shape))

    def _basis(self, i: int, dtype: torch.dtype) -> Tensor:
        basis: Tensor = self.bases.on(self.bases.identity.device)[self.places[i], 0]
        return basis.to(dtype)


def energies_together(names: Mapping[str, Tensor], here: Here) -> None:
    """Adds what ranks have counted since the last time to the energies of whole parts, in place: `names`, by part."""
    sums = {name: torch.zeros_like(energy) for name, energy in names.items()}
    for constraint in here.counted:
        for number, part in enumerate(constraint.parts):
            own, first = constraint.energy[number], constraint.firsts[number]
            total = sums[part.name][first : first + len(own)]
            total += own.to(total.device)
        constraint.energy.zero_()
    if not sums:
        return
    device = next((constraint.energy.device for constraint in here.counted), next(iter(sums.values())).device)
    flat = torch.cat([total.reshape(-1).to(device) for total in sums.values()])
    torch.distributed.all_reduce(flat, group=group_of(here.layout or {}))
    for energy, total in zip(names.values(), flat.split([t.numel() for t in sums.values()]), strict=True):
        energy += total.view_as(energy).to(energy.device)
