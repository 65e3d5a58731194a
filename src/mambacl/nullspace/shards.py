"""Parameters that FSDP2 has cut: each rank holds some rows of each (a DTensor), and restricts those.

`layout_of` says which rows this rank holds, `pieces` what of a `Part` lies in them. A projector from the right
multiplies each row by itself, so a rank needs no other rows. `whole` gathers a parameter where all of it is needed.
"""

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mambacl.errors import UserError
from mambacl.nullspace.blocks import Part
from mambacl.nullspace.sharing import any_is_cut, is_cut


@dataclass(frozen=True)
class Rows:
    """The rows of a parameter that this rank holds, from `start` to before `end`, and the ranks that hold the rest."""

    start: int
    end: int
    group: Any = field(default=None, compare=False)  # a ProcessGroup


@dataclass(frozen=True)
class Held:
    """What this rank holds of a parameter of a shape: some of its rows, or all of it if `rows` is None."""

    shape: torch.Size
    rows: Rows | None = None

    @property
    def local_shape(self) -> torch.Size:
        """The shape of what this rank holds."""
        if self.rows is None:
            return self.shape
        return torch.Size((self.rows.end - self.rows.start, *self.shape[1:]))


Layout = Mapping[str, Held]  # by parameter


@dataclass(frozen=True)
class Piece:
    """What one rank holds of a part: a `Part` of its rows, the first of its groups among those of the part, and where
    its rows lie in the part, from `start` to before `end`; None if it has all of them."""

    part: Part
    first: int = 0
    start: int | None = None
    end: int | None = None

    @property
    def rows(self) -> slice:
        return slice(self.start, self.end)


def rows_of(tensor: Tensor) -> Rows | None:
    """None for a tensor that every rank holds completely."""
    if not is_cut(tensor):
        return None
    rows = rows_on_this_rank(len(tensor), tensor)
    cut: Any = tensor
    if rows is not None and len(cut.to_local()) != rows.end - rows.start:
        raise _other_placement(cut)
    return rows


def rows_on_this_rank(size: int, like: Tensor) -> Rows | None:
    """Which of so many rows this rank holds, of a tensor that is cut like another one; None if it holds all."""
    cut: Any = like
    over = [axis for axis, placement in enumerate(cut.placements) if not placement.is_replicate()]
    if not over:
        return None
    axis = over[0]
    if len(over) > 1 or not cut.placements[axis].is_shard(0):
        raise _other_placement(cut)
    each = -(-size // cut.device_mesh.size(axis))
    start = min(cut.device_mesh.get_local_rank(axis) * each, size)
    return Rows(start, min(start + each, size), cut.device_mesh.get_group(axis))


def _other_placement(cut: Any) -> UserError:
    return UserError(
        f"NullSpace reads parameters cut along their first axis, as fully_shard does, not {cut.placements}: use "
        "fully_shard with its default placement."
    )


def layout_of(tensors: Mapping[str, Tensor]) -> Layout | None:
    """What this rank holds of each tensor; None if every rank holds all of them."""
    if not any_is_cut(tensors):
        return None
    return {name: Held(tensor.shape, rows_of(tensor)) for name, tensor in tensors.items()}


def on_this_rank(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """What this rank holds of each tensor, as views: where gradients are switched off."""
    if not any_is_cut(tensors):
        return tensors
    return {name: t.to_local() if is_cut(t) else t for name, t in tensors.items()}  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor. If it is cut, all its ranks must call this together."""
    found: Tensor = tensor.full_tensor() if is_cut(tensor) else tensor  # type: ignore[attr-defined]
    return found


def cut_like(tensor: Tensor, other: Tensor) -> Tensor:
    """What `other` would be with the values of a whole tensor, in the dtype of the latter."""
    rows = rows_of(other)
    if not is_cut(other) or is_cut(tensor):
        return tensor.to(other.device)
    return with_rows(tensor if rows is None else tensor[rows.start : rows.end], len(tensor), other)


def with_rows(own: Tensor, size: int, like: Tensor) -> Tensor:
    """A tensor of so many rows, cut like another one, of which this rank holds `own`."""
    from torch.distributed.tensor import DTensor

    cut: Any = like
    shape = torch.Size((size, *own.shape[1:]))
    return DTensor.from_local(
        own.to(cut.device).clone(), cut.device_mesh, cut.placements, run_check=False, shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )  # fmt: skip


def let_go(model: nn.Module) -> None:
    """Frees the whole parameters that FSDP2 has kept since the last pass without a backward pass. Before parameters
    change: the next pass would not see it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def of_whole_shape(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors without values for those that are cut, with their whole shape, on the same device."""
    return {
        name: torch.empty((), dtype=t.dtype, device=t.device).expand(t.shape) if is_cut(t) else t
        for name, t in named.items()
    }


def group_of(layout: Layout) -> Any:
    """The ranks that hold the rows of the parameters that are cut."""
    return next((held.rows.group for held in layout.values() if held.rows is not None), None)


def is_first_of(layout: Layout) -> bool:
    """Whether this rank is the first of them: it counts what all of them have."""
    return torch.distributed.get_rank(group_of(layout)) == 0


def is_cut_across(part: Part, layout: Layout) -> bool:
    """Whether other ranks hold some of the values that a projector from the left adds up."""
    held = layout.get(part.parameter)
    one_of_several = part.index and isinstance(part.index[0], int)
    return held is not None and held.rows is not None and part.side == "left" and not one_of_several


def pieces(part: Part, held: Held) -> list[Piece]:
    """What this rank holds of a part: nothing, one piece, or up to three if a convolution is cut within groups."""
    rows = held.rows
    if rows is None:
        return [Piece(part)]
    first = part.index[0] if part.index else (0, held.shape[0])
    if isinstance(first, int):  # one matrix of several: here, or not
        here = rows.start <= first < rows.end
        return [Piece(_piece(part, (first - rows.start, *part.index[1:]), part.groups))] if here else []
    start, end = max(first[0], rows.start), min(first[1], rows.end)
    if start >= end:
        return []
    each = (first[1] - first[0]) // part.groups  # rows of a group
    found, at = [], start
    while at < end:
        group, within = divmod(at - first[0], each)
        complete = (end - at) // each if within == 0 else 0
        until = at + complete * each if complete else min(end, at + each - within)
        local = _piece(part, ((at - rows.start, until - rows.start), *part.index[1:]), max(complete, 1))
        found.append(Piece(local, group, at - first[0], until - first[0]))
        at = until
    return found


def pieces_of(parts: Sequence[Part], layout: Layout) -> Iterator[tuple[int, Piece, bool, torch.Size]]:
    """What this rank holds of parts: the index of each, the piece, whether its energy counts here, and the shape of
    what this rank holds of its parameter."""
    first = is_first_of(layout)
    for number, part in enumerate(parts):
        if part.parameter in layout:
            held = layout[part.parameter]
            for piece in pieces(part, held):
                yield number, piece, held.rows is not None or first, held.local_shape


def _piece(part: Part, index: Any, groups: int) -> Part:
    return dataclasses.replace(part, index=index, groups=groups, whole=part.name)
