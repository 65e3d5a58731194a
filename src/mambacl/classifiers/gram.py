"""Storage of a Gram matrix G = sum h h^T: its lower triangle, in panels of rows, in one flat tensor.

A panel holds PANEL rows and their columns up to the diagonal, so the triangle costs PANEL / 2 extra values per row and
needs no index arithmetic. With several blocks, each block of units has its own triangle, and products between blocks
are not stored.

`int16` stores G = s s^T / n + D R D, where s is the sum of h, n the number of images, D the diagonal of standard
deviations and R the correlations, as multiples of 1 / 32767. s and n are known to the classifier anyway, and removing
them first leaves small numbers, which lose least.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

PANEL = 256
ROWS = 1024  # images per float32 product; products are added in float64
LARGEST = 32767
KINDS = {"float64": torch.float64, "float32": torch.float32, "int16": torch.int16}


@dataclass(frozen=True)
class Panel:
    rows: slice
    columns: slice
    stored: slice  # place in the flat tensor

    def view(self, flat: Tensor) -> Tensor:
        """(rows, columns)"""
        return flat[self.stored].view(self.rows.stop - self.rows.start, self.columns.stop - self.columns.start)


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


def stored_values(units: int, blocks: int = 1) -> int:
    """Length of the flat tensor."""
    return sum(panel.stored.stop - panel.stored.start for panel in panels(units, blocks))


@dataclass
class Gram:
    """A Gram matrix in storage. `sums` and `images` are s and n; `spread` is D's diagonal. All three matter for int16
    only, where `spread` and `images` must be those of the last change."""

    flat: Tensor
    blocks: int
    sums: Tensor  # (units,), float64
    images: int
    spread: Tensor  # (units,), float64; empty for floating-point storage

    @property
    def units(self) -> int:
        return len(self.sums)

    def read(self, panel: Panel) -> Tensor:
        """A panel in float64."""
        values = panel.view(self.flat).double()
        if self.flat.dtype != torch.int16:
            return values
        values *= self.spread[panel.rows, None] / LARGEST
        values *= self.spread[panel.columns]
        return values.addr_(self.sums[panel.rows], self.sums[panel.columns], alpha=1 / max(1, self.images))

    def write(self, panel: Panel, values: Tensor) -> None:
        """Changes `values`."""
        if self.flat.dtype == torch.int16:
            values.addr_(self.sums[panel.rows], self.sums[panel.columns], alpha=-1 / max(1, self.images))
            inverse = torch.where(self.spread > 0, 1 / self.spread, 0.0)
            values *= inverse[panel.rows, None] * LARGEST
            values *= inverse[panel.columns]
            values.round_().clamp_(-LARGEST, LARGEST)
        panel.view(self.flat).copy_(values)

    def diagonal(self) -> Tensor:
        """(units,) in float64"""
        if self.flat.dtype == torch.int16:
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
