"""Storage of a Gram matrix G = sum h h^T: its lower triangle, in panels of rows, in one flat tensor.

A panel holds PANEL rows and their columns up to the diagonal, so the triangle costs PANEL / 2 extra values per row and
needs no index arithmetic. With several blocks, each block of units has its own triangle, and products between blocks
are not stored.

`int24` and `int16` store G = s s^T / n + D R D, where s is the sum of h, n the number of images, D the diagonal of
standard deviations and R the correlations, as multiples of 1 / (2^23 - 1) or 1 / (2^15 - 1). s and n are known to the
classifier anyway, and removing them first leaves small numbers, which lose least. PyTorch has no integers of 24 bits:
they are stored as three bytes each.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

PANEL = 256
ROWS = 1024  # images per float32 product; products are added in float64
KINDS = {"float64": torch.float64, "float32": torch.float32, "int24": torch.uint8, "int16": torch.int16}
LARGEST = {torch.uint8: 2**23 - 1, torch.int16: 2**15 - 1}  # the integer that stands for a correlation of 1


@dataclass(frozen=True)
class Panel:
    rows: slice
    columns: slice
    stored: slice  # place in the flat tensor

    def view(self, flat: Tensor) -> Tensor:
        """(rows, columns), or (rows, columns, 3) bytes"""
        return flat[self.stored].unflatten(
            0, (self.rows.stop - self.rows.start, self.columns.stop - self.columns.start)
        )


def blocks_of(units: int, blocks: int) -> list[slice]:
    """The units in equal blocks, up to one unit."""
    bounds = [units * block // blocks for block in range(blocks + 1)]
    return [slice(*pair) for pair in pairwise(bounds)]


def panels(units: int, blocks: int = 1) -> Iterator[Panel]:
    place = 0
    for block in blocks_of(units, blocks):
        for first in range(block.start, block.stop, PANEL):
            last = min(first + PANEL, block.stop)
            size = (last - first) * (last - block.start)
            yield Panel(slice(first, last), slice(block.start, last), slice(place, place + size))
            place += size


def empty(units: int, blocks: int, storage: str) -> Tensor:
    """The flat tensor of a Gram matrix that is 0."""
    shape = (stored_values(units, blocks), 3) if storage == "int24" else (stored_values(units, blocks),)
    return torch.zeros(shape, dtype=KINDS[storage])


def to_bytes(values: Tensor) -> Tensor:
    """Whole numbers below 2^23 as (..., 3) bytes, the lowest first."""
    return values.to(torch.int32).unsqueeze(-1).view(torch.uint8)[..., :3]


def from_bytes(stored: Tensor) -> Tensor:
    shifted = stored.new_zeros(*stored.shape[:-1], 4)
    shifted[..., 1:] = stored  # to the top, so that the sign is in place
    return shifted.view(torch.int32).squeeze(-1) >> 8


def stored_values(units: int, blocks: int = 1) -> int:
    """Length of the flat tensor."""
    return sum(panel.stored.stop - panel.stored.start for panel in panels(units, blocks))


@dataclass
class Gram:
    """A Gram matrix in storage. `sums` and `images` are s and n; `spread` is D's diagonal. All three matter only for
    integers, where they must be those of the last change."""

    flat: Tensor
    blocks: int
    sums: Tensor  # (units,), float64
    images: int
    spread: Tensor  # (units,), float64; empty for floating-point storage

    @property
    def largest(self) -> int | None:
        """The integer that stands for 1; None for floating-point storage."""
        return LARGEST.get(self.flat.dtype)

    @property
    def units(self) -> int:
        return len(self.sums)

    def read(self, panel: Panel) -> Tensor:
        """A panel in float64."""
        stored = panel.view(self.flat)
        values = (from_bytes(stored) if stored.dtype == torch.uint8 else stored).double()
        if self.largest is None:
            return values
        values *= self.spread[panel.rows, None] / self.largest
        values *= self.spread[panel.columns]
        return values.addr_(self.sums[panel.rows], self.sums[panel.columns], alpha=1 / max(1, self.images))

    def write(self, panel: Panel, values: Tensor) -> None:
        """Changes `values`."""
        if self.largest is not None:
            values.addr_(self.sums[panel.rows], self.sums[panel.columns], alpha=-1 / max(1, self.images))
            inverse = torch.where(self.spread > 0, 1 / self.spread, 0.0)
            values *= inverse[panel.rows, None] * self.largest
            values *= inverse[panel.columns]
            values.round_().clamp_(-self.largest, self.largest)
        stored = panel.view(self.flat)
        stored.copy_(to_bytes(values) if stored.dtype == torch.uint8 else values)

    def diagonal(self) -> Tensor:
        """(units,) in float64"""
        if self.largest is not None:
            return self.sums.square() / max(1, self.images) + self.spread.square()
        parts = [panel.view(self.flat).diagonal(panel.rows.start - panel.columns.start) for panel in self.panels()]
        return torch.cat(parts).double()

    def panels(self) -> Iterator[Panel]:
        return panels(self.units, self.blocks)

    def add(self, lifted: Tensor, sums: Tensor, images: int) -> "Gram":
        """Adds h^T h of lifted features (n, units), and rounds each stored value once. `sums` and `images` are the new
        totals."""
        slices = lifted.split(ROWS)
        diagonal = self.diagonal() + torch.stack([h.double().square().sum(0) for h in slices]).sum(0)
        made = self._changed(diagonal, sums, images)
        for panel in self.panels():
            values = self.read(panel)
            for h in slices:
                values += h[:, panel.rows].T @ h[:, panel.columns]
            made.write(panel, values)
        return made

    def merge(self, other: "Gram", sums: Tensor, images: int) -> "Gram":
        """Adds another with the same layout."""
        made = self._changed(self.diagonal() + other.diagonal(), sums, images)
        for panel in self.panels():
            made.write(panel, self.read(panel) + other.read(panel))
        return made

    def replaced(self, whole: Tensor, sums: Tensor, images: int) -> "Gram":
        """Stores another matrix (units, units) instead; there must be one block."""
        made = self._changed(whole.diagonal(), sums, images)
        for panel in self.panels():
            made.write(panel, whole[panel.rows, panel.columns].clone())
        return made

    def _changed(self, diagonal: Tensor, sums: Tensor, images: int) -> "Gram":
        """The same storage, to be rewritten for new totals."""
        centred = (diagonal - sums.square() / max(1, images)).clamp(min=0)
        return Gram(self.flat, self.blocks, sums, images, centred.sqrt() if len(self.spread) else self.spread)

    def to(self, device: torch.device) -> "Gram":
        tensors = (tensor.to(device) for tensor in (self.flat, self.sums, self.spread))
        flat, sums, spread = tensors
        return Gram(flat, self.blocks, sums, self.images, spread)

    def block(self, block: slice, dtype: torch.dtype) -> Tensor:
        """The whole symmetric matrix of one block."""
        size, start = block.stop - block.start, block.start
        whole = torch.empty(size, size, dtype=dtype, device=self.flat.device)
        for panel in self.panels():
            if panel.columns.start == start:
                rows = slice(panel.rows.start - start, panel.rows.stop - start)
                left, square = self.read(panel).to(dtype).split([rows.start, rows.stop - rows.start], dim=1)
                whole[rows, : rows.start] = left
                whole[: rows.start, rows] = left.T
                whole[rows, rows] = square.tril() + square.tril(-1).T
        return whole
