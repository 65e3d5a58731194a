# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"
"""Group norm of the scan's output, skip and gate, in one pass: De-focus Mamba's equations 7 and 8.

    n = y r,   r = (mean of y^2 over the group + eps)^(-1/2)      (no group: n = y)
    v = n + D x,   out = v silu(z)

The backward recomputes everything from y, x and z:

    dv = dout silu(z),   dz = dout v silu'(z),   dx = dv D,   dD = sum over tokens of dv x,
    dy = r (dv - n mean(dv n))

A program processes one group of channels (without norm: one block) and a tile of rows; every token of every image is a
row. For dD it takes several tiles and writes one partial sum; PyTorch adds them up.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mambacl.ops.kernels.launch import accumulator, as_rows, launch, row_blocks, tile_constants, torch_type


@triton.jit
def _tile(x, row, stride, column, mask, ACC: tl.constexpr):
    return tl.load(x + row * stride + column, mask=mask, other=0.0).to(ACC)


@triton.jit
def _forward(
    y, x, D, z, out, rows, width, span, tiles, y_l, x_l, z_l, EPS: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    local = tl.arange(0, COLUMNS)
    column = (program % tiles) * span + local
    inside = (local < span) & (column < width)
    row = ((program // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    mask = inside[None, :] & (row < rows)
    skip = tl.load(D + column, mask=inside, other=0.0).to(ACC)[None, :]
    column = column[None, :]
    v = _tile(y, row, y_l, column, mask, ACC)
    b = _tile(x, row, x_l, column, mask, ACC)
    c = _tile(z, row, z_l, column, mask, ACC)
    if NORM:
        v *= tl.rsqrt(tl.sum(v * v, axis=1) / span + EPS)[:, None]
    v = (v + skip * b) * (c / (1.0 + tl.exp(-c)))
    tl.store(out + row * width + column, v.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    dout, y, x, D, z, dy, dx, dz, dD, rows, width, span, tiles, dout_l, y_l, x_l, z_l, EPS: tl.constexpr,
    NORM: tl.constexpr, DSKIP: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    local = tl.arange(0, COLUMNS)
    channel = (program % tiles) * span + local
    inside = (local < span) & (channel < width)
    part = (program // tiles).to(tl.int64)
    skip = tl.load(D + channel, mask=inside, other=0.0).to(ACC)[None, :]
    column = channel[None, :]
    total = tl.zeros((ROWS, COLUMNS), ACC)
    for step in range(0, STEPS):
        row = ((part * STEPS + step) * ROWS + tl.arange(0, ROWS))[:, None]
        mask = inside[None, :] & (row < rows)
        g = _tile(dout, row, dout_l, column, mask, ACC)
        n = _tile(y, row, y_l, column, mask, ACC)
        b = _tile(x, row, x_l, column, mask, ACC)
        c = _tile(z, row, z_l, column, mask, ACC)
        s = 1.0 / (1.0 + tl.exp(-c))
        dv = g * (c * s)
        dn = dv
        if NORM:
            r = tl.rsqrt(tl.sum(n * n, axis=1) / span + EPS)[:, None]
            n *= r
            dn = r * (dv - n * (tl.sum(dv * n, axis=1) / span)[:, None])
        at = row * width + column
        tl.store(dy + at, dn.to(dy.dtype.element_ty), mask=mask)
        tl.store(dx + at, (dv * skip).to(dx.dtype.element_ty), mask=mask)
        slope = s * (1.0 + c * (1.0 - s))
        tl.store(dz + at, (g * (n + skip * b) * slope).to(dz.dtype.element_ty), mask=mask)
        if DSKIP:
            total += dv * b
    if DSKIP:
        tl.store(dD + part * width + channel, tl.sum(total, axis=0), mask=inside)


def forward(y: Tensor, x: Tensor, D: Tensor, z: Tensor, group: int, eps: float, dtype: torch.dtype) -> Tensor:
    out = torch.empty(y.shape, dtype=dtype, device=y.device)
    if y.numel() == 0:
        return out
    y, x, z = as_rows(y), as_rows(x), as_rows(z)
    span, tiles, columns = _columns(y.shape[1], group)
    block, _, programs = row_blocks(len(y), columns, summed=False)
    launch(
        _forward,
        (programs * tiles,),
        *(y, x, D.contiguous(), z, out),
        *(*y.shape, span, tiles, y.stride(0), x.stride(0), z.stride(0)),
        EPS=eps, NORM=group > 0, ACC=accumulator(y, x, z), **tile_constants(block, columns),
    )  # fmt: skip
    return out


def backward(
    dout: Tensor, y: Tensor, x: Tensor, D: Tensor, z: Tensor, group: int, eps: float, needs_D: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns dy, dx, dz and dD; dD is empty if it is not needed."""
    dy, dx, dz = (torch.empty(tensor.shape, dtype=tensor.dtype, device=y.device) for tensor in (y, x, z))
    acc = accumulator(y, x, z)
    dout, y, x, z = as_rows(dout), as_rows(y), as_rows(x), as_rows(z)
    span, tiles, columns = _columns(y.shape[1], group)
    block, steps, programs = row_blocks(len(y), columns, summed=needs_D)
    dD = torch.empty((programs, y.shape[1]) if needs_D else (0,), dtype=torch_type(acc), device=y.device)
    if y.numel():
        launch(
            _backward,
            (programs * tiles,),
            *(dout, y, x, D.contiguous(), z, dy, dx, dz, dD),
            *(*y.shape, span, tiles, dout.stride(0), y.stride(0), x.stride(0), z.stride(0)),
            EPS=eps, NORM=group > 0, DSKIP=needs_D, STEPS=steps, ACC=acc, **tile_constants(block, columns),
        )  # fmt: skip
    return dy, dx, dz, dD.sum(0).to(D.dtype) if needs_D else dD


def _columns(width: int, group: int) -> tuple[int, int, int]:
    """Channels per program, programs needed for all channels, columns of a tile."""
    if group:
        return group, width // group, triton.next_power_of_2(group)
    columns = min((256, 128, 64), key=lambda size: triton.cdiv(width, size) * size)
    return columns, triton.cdiv(width, columns), columns
