# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"
"""Projecting the updates of equally large matrices in two Triton kernels: the fast twin of `Stack.project_`.

With W0 the matrices before a step, W after it, and V a basis:

    inside = (W - W0) V,   W <- W0 + identity (W - W0) + factor inside V^T

Nothing as large as a parameter is written but the result: `_inside` leaves as many columns as a basis has, and the sums
of squares that a bank counts, tile by tile. The matrices are found by their addresses, wherever they lie.

A GPU's fast products take numbers of eight bits. Three of them make a float32, and six of the nine products of such
thirds are added up: as exact as float32, and several times as fast.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mambacl.fused.launch import launch


@triton.jit
def _tile(pid, ROWS: tl.constexpr, COLUMNS: tl.constexpr, N_ROWS: tl.constexpr, N_COLUMNS: tl.constexpr):
    """A program's matrix (64 bits), the rows and columns of its tile, and whether it is the first of these rows."""
    column_tiles: tl.constexpr = (N_COLUMNS + COLUMNS - 1) // COLUMNS
    tiles: tl.constexpr = (N_ROWS + ROWS - 1) // ROWS * column_tiles
    tile = pid % tiles
    rows = (tile // column_tiles) * ROWS + tl.arange(0, ROWS)
    columns = (tile % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    return (pid // tiles).to(tl.int64), rows[:, None], columns[None, :], tile % column_tiles == 0


@triton.jit
def _inside(
    addresses, old, basis, bases, inside, sums,
    ROW: tl.constexpr, COLUMN: tl.constexpr, N: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """inside (matrices, N, R); sums (matrices x tiles, 2), of squares."""
    pid = tl.program_id(0)
    matrix, rows, columns, first = _tile(pid, BN, BR, N, R)
    new = tl.load(addresses + matrix).to(tl.pointer_type(tl.float32))
    old += matrix * N * D
    basis += tl.load(bases + matrix) * D * R
    acc = tl.zeros([BN, BR], tl.float32)
    squares = tl.zeros([BN, BD], tl.float32)
    for start in range(0, D, BD):
        k = start + tl.arange(0, BD)
        mask = (rows < N) & (k < D)[None, :]
        change = tl.load(new + rows * ROW + k[None, :] * COLUMN, mask=mask, other=0.0)
        change -= tl.load(old + rows * D + k[None, :], mask=mask, other=0.0)
        V = tl.load(basis + k[:, None] * R + columns, mask=(k < D)[:, None] & (columns < R), other=0.0)
        acc = tl.dot(change, V.to(tl.float32), acc, input_precision=PRECISION)
        squares += change * change
    tl.store(inside + matrix * N * R + rows * R + columns, acc, mask=(rows < N) & (columns < R))
    tl.store(sums + 2 * pid, tl.where(first, tl.sum(tl.sum(squares, axis=1), axis=0), 0.0))
    tl.store(sums + 2 * pid + 1, tl.sum(tl.sum(acc * acc, axis=1), axis=0))


@triton.jit
def _apply(
    addresses, old, basis, bases, inside, identity, factor,
    ROW: tl.constexpr, COLUMN: tl.constexpr, N: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    matrix, rows, columns, _ = _tile(tl.program_id(0), BN, BD, N, D)
    new = tl.load(addresses + matrix).to(tl.pointer_type(tl.float32))
    base = tl.load(bases + matrix)
    basis += base * D * R
    inside += matrix * N * R
    acc = tl.zeros([BN, BD], tl.float32)
    for start in range(0, R, BR):
        k = start + tl.arange(0, BR)
        share = tl.load(inside + rows * R + k[None, :], mask=(rows < N) & (k < R)[None, :], other=0.0)
        V = tl.load(basis + columns * R + k[:, None], mask=(columns < D) & (k < R)[:, None], other=0.0)
        acc = tl.dot(share, V.to(tl.float32), acc, input_precision=PRECISION)
    mask = (rows < N) & (columns < D)
    places = new + rows * ROW + columns * COLUMN
    before = tl.load(old + matrix * N * D + rows * D + columns, mask=mask, other=0.0)
    change = tl.load(places, mask=mask, other=0.0) - before
    result = before + (tl.load(identity + base) * change + tl.load(factor + base) * acc)
    tl.store(places, result, mask=mask)


@dataclass(frozen=True)
class Tiles:
    """Of a product: rows, columns of the result, and how much is summed at a time."""

    rows: int
    columns: int
    summed: int
    warps: int
    stages: int


def tiles(n: int, columns: int) -> Tiles:
    """For n rows. Where they are few, more programs of smaller tiles."""
    if n > 64:
        return Tiles(64, min(128, _power(columns)), 32, 4, 3)
    return Tiles(_power(n), min(64, _power(columns)), 64, 4, 2)


def _power(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def precision(device: torch.device) -> str:
    """Of products that are as exact as float32: six of bfloat16 thirds, on a GPU that has these."""
    return "bf16x6" if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0) else "ieee"


def project_(
    addresses: Tensor, strides: tuple[int, int], old: Tensor, basis: Tensor, bases: Tensor, identity: Tensor,
    factor: Tensor, energy: Tensor | None,
) -> None:  # fmt: skip
    """Projects in place what lies at `addresses`, one for each of old's matrices (matrices, n, D), rows and columns
    `strides` apart. basis (bases, D, r); identity, factor (bases,); `bases`: of each matrix. The sums of squares are
    added to energy (matrices, 2)."""
    matrices, n, size = old.shape
    rank = basis.shape[-1]
    shape = {"ROW": strides[0], "COLUMN": strides[1], "N": n, "D": size, "R": rank}
    options = {"PRECISION": precision(old.device)}
    inside = old.new_empty(matrices, n, rank)
    plan = tiles(n, rank)
    programs = triton.cdiv(n, plan.rows) * triton.cdiv(rank, plan.columns)
    sums = old.new_empty(matrices, programs, 2)
    launch(
        _inside, (matrices * programs,), addresses, old, basis, bases, inside, sums, **shape,
        BN=plan.rows, BD=plan.summed, BR=plan.columns, num_warps=plan.warps, num_stages=plan.stages, **options,
    )  # fmt: skip
    if energy is not None:
        energy += sums.sum(1, dtype=torch.float64)
    plan = tiles(n, size)
    programs = triton.cdiv(n, plan.rows) * triton.cdiv(size, plan.columns)
    launch(
        _apply, (matrices * programs,), addresses, old, basis, bases, inside, identity, factor, **shape,
        BN=plan.rows, BD=plan.columns, BR=plan.summed, num_warps=plan.warps, num_stages=plan.stages, **options,
    )  # fmt: skip
