"""Storage of a Gram matrix as a rounded Cholesky factor: half the bytes of `int24`, so 1.4 times as many units.

    G + j I = a s s^T / n + L L^T

s is the sum of h and n the number of images, which the classifier knows anyway; L is lower triangular. A value of L
below the diagonal is q / 2047 times a scale per column (float32) times one per row and panel of PANEL columns (half
precision), with an integer q of 12 bits. The diagonal is float32. All of it is in one tensor of bytes.

Why a factor: an error E of L changes G by about E L^T + L E^T, which is small where G is small. The solution feels an
error of G as 1 / r, with the ridge r, and one of L as 1 / sqrt(r).

Each write rounds all of L, so errors add up over the writes, as a random walk does. The jitter j is what makes G
definite in spite of them; ridges must be larger, since G is read without it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mambacl.classifiers import least_squares
from mambacl.classifiers.gram import PANEL, ROWS
from mambacl.errors import UserError

LARGEST = 2047  # of 12 bits
JITTER = 1e-5  # j over G's mean diagonal; the ridges that `auto` chooses are about 1e-4 of it
CENTRED = 1 - 1e-4  # a; with 1, rounding of s could leave a rest that is not a covariance
UPWARDS = 1 + 2**-10  # more than half precision rounds down
RAISED, TRIES = 4, 10  # if a jitter does not suffice


@dataclass(frozen=True)
class Panel:
    """Columns of L, from the diagonal down, and their places in storage."""

    columns: slice
    rows: slice  # of the scales per row
    stored: slice  # of the integers' bytes


def panels(units: int) -> Iterator[Panel]:
    row = place = 0
    for start in range(0, units, PANEL):
        end, height = min(start + PANEL, units), units - start
        width = end - start
        count = height * width - width * (width + 1) // 2  # below the diagonal
        size = 3 * (-(-count // 2))
        yield Panel(slice(start, end), slice(row, row + height), slice(place, place + size))
        row, place = row + height, place + size


def sections(units: int) -> list[int]:
    """Bytes of the jitter, the scales per column, the diagonal, the scales per row and the integers, in this order,
    which aligns them."""
    *_, last = panels(units)
    return [8, 4 * units, 4 * units, 2 * last.rows.stop, last.stored.stop]


def empty(units: int) -> Tensor:
    """The bytes of a Gram matrix that is 0."""
    return torch.zeros(sum(sections(units)), dtype=torch.uint8)


def to_bytes(values: Tensor) -> Tensor:
    """Integers of 12 bits (n,), two in three bytes."""
    first, second = torch.nn.functional.pad(values.to(torch.int32) & 0xFFF, (0, len(values) % 2)).view(-1, 2).unbind(1)
    return torch.stack([first & 0xFF, first >> 8 | (second & 0xF) << 4, second >> 4], dim=1).to(torch.uint8).flatten()


def from_bytes(stored: Tensor, count: int) -> Tensor:
    low, middle, high = stored.view(-1, 3).to(torch.int32).unbind(1)
    values = torch.stack([low | (middle & 0xF) << 8, middle >> 4 | high << 4], dim=1).flatten()[:count]
    return (values ^ 0x800) - 0x800


def below(panel: Panel, units: int, device: torch.device) -> Tensor:
    """Which values of a panel (height, width) are below the diagonal."""
    start, end = panel.columns.start, panel.columns.stop
    return torch.ones(units - start, end - start, dtype=torch.bool, device=device).tril_(-1)


def add_products(whole: Tensor, lifted: Tensor) -> None:
    """Adds h^T h of lifted features (n, units) to a symmetric matrix."""
    for start in range(0, len(whole), ROWS):
        rows = slice(start, min(start + ROWS, len(whole)))
        for h in lifted.split(ROWS):
            whole[rows, : rows.stop] += h[:, rows].T @ h[:, : rows.stop]
        _mirror(whole, rows)


def _mirror(whole: Tensor, rows: slice) -> None:
    """Copies these rows below the diagonal to the columns above it."""
    whole[: rows.start, rows] = whole[rows, : rows.start].T
    square = whole[rows, rows]
    square.copy_(square.tril() + square.tril(-1).T)


@dataclass
class Factor:
    """A Gram matrix in storage. `sums` and `images` are s and n of the last write."""

    flat: Tensor
    sums: Tensor  # (units,), float64
    images: int

    @property
    def units(self) -> int:
        return len(self.sums)

    @property
    def jitter(self) -> float:
        return float(self.flat[:8].view(torch.float64))

    def _parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Views of the five sections."""
        jitter, columns, diagonal, rows, stored = self.flat.split(sections(self.units))
        floats = (part.view(torch.float32) for part in (columns, diagonal))
        return jitter.view(torch.float64), *floats, rows.view(torch.float16), stored

    def lower(self) -> Tensor:
        """L (units, units) in float64"""
        _, columns, diagonal, scales, stored = self._parts()
        made = torch.zeros(self.units, self.units, dtype=torch.float64, device=self.flat.device)
        for panel in panels(self.units):
            mask = below(panel, self.units, made.device)
            values = from_bytes(stored[panel.stored], int(mask.sum())).double()
            part = made[panel.columns.start :, panel.columns]
            part.copy_(torch.zeros_like(part).masked_scatter_(mask, values))
            part *= scales[panel.rows, None].double() / LARGEST
            part *= columns[panel.columns].double()
        made.diagonal().copy_(diagonal)
        return made

    def block(self, block: slice, dtype: torch.dtype) -> Tensor:
        """The whole symmetric matrix; there is one block."""
        lower = self.lower()
        whole, share = torch.empty_like(lower), CENTRED / max(1, self.images)
        for start in range(0, self.units, ROWS):
            rows = slice(start, min(start + ROWS, self.units))
            part = lower[rows, : rows.stop] @ lower[: rows.stop, : rows.stop].T
            whole[rows, : rows.stop] = part.addr_(self.sums[rows], self.sums[: rows.stop], alpha=share)
            _mirror(whole, rows)
        whole.diagonal().sub_(self.jitter)
        return whole.to(dtype)

    def merge(self, other: "Factor", sums: Tensor, images: int) -> "Factor":
        """Adds another with as many units. `sums` and `images` are the new totals."""
        every = slice(0, self.units)
        whole = self.block(every, torch.float64).add_(other.block(every, torch.float64))
        return self.replaced(whole, sums, images)

    def replaced(self, whole: Tensor, sums: Tensor, images: int) -> "Factor":
        """Stores another matrix (units, units) instead, and overwrites it."""
        unit = float(whole.diagonal().mean()) or 1.0
        whole.addr_(sums, sums, alpha=-CENTRED / max(1, images))
        diagonal = whole.diagonal().clone()
        for tried in range(TRIES):
            jitter = JITTER * unit * RAISED**tried
            lower = least_squares.factor(whole, diagonal, jitter)
            if lower is not None:
                break
        else:
            raise UserError(least_squares.NOT_FINITE)
        made = Factor(torch.zeros_like(self.flat), sums, images)
        made._parts()[0].fill_(jitter)
        made._write(lower)
        return made

    def _write(self, lower: Tensor) -> None:
        _, columns, diagonal, scales, stored = self._parts()
        diagonal.copy_(lower.diagonal())
        for panel in panels(self.units):
            part = lower[panel.columns.start :, panel.columns].tril(-1)
            column = columns[panel.columns]
            column.copy_(part.square().mean(0).sqrt().clamp(min=torch.finfo(torch.float32).tiny))
            part /= column.double()
            row = scales[panel.rows]
            row.copy_(part.abs().amax(1) * UPWARDS)
            part *= torch.where(row > 0, LARGEST / row.double(), 0.0)[:, None]
            part.round_().clamp_(-LARGEST, LARGEST)
            stored[panel.stored] = to_bytes(part.masked_select(below(panel, self.units, part.device)))

    def to(self, device: torch.device) -> "Factor":
        return Factor(self.flat.to(device), self.sums.to(device), self.images)
