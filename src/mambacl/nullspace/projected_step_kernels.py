# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"
"""Projects the updates of matrices of one shape with two Triton kernels: the fast twin of `ProjectedParts._project_`.

With W0 the matrices before a step, W after it, and V a basis:

    inside = (W - W0) V,   W <- W0 + identity (W - W0) + factor inside V^T

The only output of a parameter's size is the result: `_inside` writes as many columns as a basis has, and the sums of
squares per tile. The kernels get the addresses of the matrices, which need not be in one tensor.

A GPU's tensor cores multiply TF32 numbers with eleven bits. `tf32x3` splits each number into two such parts and adds
three of the four products, which is as accurate as float32 and faster. Triton adds up a few terms in the tensor core
and the rest in float32; adding all of them in the tensor core, which rounds towards zero, would cost a digit. Tensor
cores need the summed axis of their second operand to be contiguous, which is why `_inside` computes its transpose.

The number of columns of a basis changes with every task. It is a run-time argument, so each parameter shape is compiled
once. Each basis is multiplied by its actual columns only, without the padding.

The mask `there` marks the elements that exist.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mambacl.ops.kernels.launch import as_exact_as_float32, launch


@triton.jit
def _tile(pid, n_rows: tl.constexpr, n_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The index of a program's matrix, the rows of its tile, and its first column."""
    across = (n_columns + COLUMNS - 1) // COLUMNS
    tiles = (n_rows + ROWS - 1) // ROWS * across
    tile = pid % tiles
    rows = (tile // across) * ROWS + tl.arange(0, ROWS)
    return (pid // tiles).to(tl.int64), rows, (tile % across) * COLUMNS


@triton.jit
def _inside(
    addresses, old, basis, bases, widths, inside, sums, r, n: tl.constexpr, D: tl.constexpr, row: tl.constexpr,
    column: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SUMMED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """inside (matrices, n, r); sums of squares (matrices x tiles, 2)."""
    pid = tl.program_id(0)
    matrix, rows, start_column = _tile(pid, n, r, ROWS, COLUMNS)
    rows, columns = rows[None, :], (start_column + tl.arange(0, COLUMNS))[:, None]
    new = tl.load(addresses + matrix).to(tl.pointer_type(tl.float32))
    old += matrix * n * D
    base = tl.load(bases + matrix)
    first, own = start_column == 0, tl.load(widths + base)
    basis += base * D * r
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    squares = tl.zeros([SUMMED, ROWS], tl.float32)
    length = tl.where(first | (start_column < own), D, 0)  # the first tile of each row also sums the squares
    for start in range(0, length, SUMMED):
        k = start + tl.arange(0, SUMMED)
        there = (rows < n) & (k < D)[:, None]
        change = tl.load(new + rows * row + k[:, None] * column, mask=there, other=0.0)
        change -= tl.load(old + rows * D + k[:, None], mask=there, other=0.0)
        V = tl.load(basis + k[None, :] * r + columns, mask=(k < D)[None, :] & (columns < own), other=0.0)
        acc = tl.dot(V.to(tl.float32), change, acc, input_precision=PRECISION)
        squares += change * change
    tl.store(inside + matrix * n * r + rows * r + columns, acc, mask=(rows < n) & (columns < r))
    tl.store(sums + 2 * pid, tl.where(first, tl.sum(tl.sum(squares, axis=1), axis=0), 0.0))
    tl.store(sums + 2 * pid + 1, tl.sum(tl.sum(acc * acc, axis=1), axis=0))


@triton.jit
def _apply(
    addresses, old, basis, bases, widths, inside, identity, factor, r, n: tl.constexpr, D: tl.constexpr,
    row: tl.constexpr, column: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SUMMED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    matrix, rows, start_column = _tile(tl.program_id(0), n, D, ROWS, COLUMNS)
    rows, columns = rows[:, None], (start_column + tl.arange(0, COLUMNS))[None, :]
    new = tl.load(addresses + matrix).to(tl.pointer_type(tl.float32))
    base = tl.load(bases + matrix)
    basis += base * D * r
    inside += matrix * n * r
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    own = tl.load(widths + base)
    for start in range(0, own, SUMMED):
        k = start + tl.arange(0, SUMMED)
        share = tl.load(inside + rows * r + k[None, :], mask=(rows < n) & (k < own)[None, :], other=0.0)
        V = tl.load(basis + columns * r + k[:, None], mask=(columns < D) & (k < own)[:, None], other=0.0)
        acc = tl.dot(share, V.to(tl.float32), acc, input_precision=PRECISION)
    there = (rows < n) & (columns < D)
    places = new + rows * row + columns * column
    before = tl.load(old + matrix * n * D + rows * D + columns, mask=there, other=0.0)
    change = tl.load(places, mask=there, other=0.0) - before
    result = before + (tl.load(identity + base) * change + tl.load(factor + base) * acc)
    tl.store(places, result, mask=there)


def project_(
    addresses: Tensor, strides: tuple[int, int], old: Tensor, basis: Tensor, bases: Tensor, widths: Tensor,
    identity: Tensor, factor: Tensor, energy: Tensor | None,
) -> None:  # fmt: skip
    """Projects, in place, the matrices at `addresses` with row and column `strides`. old (matrices, n, D): their values
    before the step; basis (bases, D, r), with widths (bases,) columns in use; identity, factor (bases,); `bases`: the
    index of each matrix's basis. Adds the sums of squares to energy (matrices, 2)."""
    matrices, n, size = old.shape
    rank = basis.shape[-1]
    sizes = {"n": n, "D": size, "row": strides[0], "column": strides[1]}
    common = {**sizes, "PRECISION": as_exact_as_float32(old.device), "num_warps": 4, "num_stages": 3}

    rows = min(64, max(16, triton.next_power_of_2(n)))
    columns = 128 if n > rows else 64
    tiles = triton.cdiv(n, rows) * triton.cdiv(rank, columns)
    inside, sums = old.new_empty(matrices, n, rank), old.new_empty(matrices, tiles, 2)
    launch(
        _inside, (matrices * tiles,), addresses, old, basis, bases, widths, inside, sums, rank,
        ROWS=rows, COLUMNS=columns, SUMMED=32 if rows == 64 else 64, **common,
    )  # fmt: skip
    if energy is not None:
        energy += sums.sum(1, dtype=torch.float64)
    tiles = triton.cdiv(n, rows) * triton.cdiv(size, 64)
    launch(
        _apply, (matrices * tiles,), addresses, old, basis, bases, widths, inside, identity,
        factor, rank, ROWS=rows, COLUMNS=64, SUMMED=32, **common,
    )  # fmt: skip
