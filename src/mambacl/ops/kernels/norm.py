# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"
"""RMS norm over the channels, with its weight.

    n = x r,   r = (mean of x^2 + eps)^(-1/2),   out = w n

As in PyTorch, n is rounded to x's dtype, and the product to the wider of the two dtypes. Backward:

    dn = w dout,   dx = r (dn - n mean(dn n)),   dw = sum over rows of dout n

A program processes whole rows. For dw it takes several tiles and writes one partial sum; PyTorch adds them up.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mambacl.ops.kernels.launch import accumulator, as_rows, launch, row_blocks, tile_constants, torch_type, triton_type


@triton.jit
def _forward(
    x, weight, out, rows, width, x_l, EPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRODUCT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)
    inside = column < width
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    mask = inside[None, :] & (row < rows)
    w = tl.load(weight + column, mask=inside, other=0.0).to(ACC)[None, :]
    a = tl.load(x + row * x_l + column[None, :], mask=mask, other=0.0).to(ACC)
    n = a * tl.rsqrt(tl.sum(a * a, axis=1) / width + EPS)[:, None]
    y = (w * n.to(x.dtype.element_ty).to(ACC)).to(PRODUCT)
    tl.store(out + row * width + column[None, :], y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    dout, x, weight, dx, dweight, rows, width, dout_l, x_l, EPS: tl.constexpr, DWEIGHT: tl.constexpr,
    STEPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < width
    w = tl.load(weight + column, mask=inside, other=0.0).to(ACC)[None, :]
    total = tl.zeros((ROWS, COLUMNS), ACC)
    for step in range(0, STEPS):
        row = ((part * STEPS + step) * ROWS + tl.arange(0, ROWS))[:, None]
        mask = inside[None, :] & (row < rows)
        g = tl.load(dout + row * dout_l + column[None, :], mask=mask, other=0.0).to(ACC)
        n = tl.load(x + row * x_l + column[None, :], mask=mask, other=0.0).to(ACC)
        r = tl.rsqrt(tl.sum(n * n, axis=1) / width + EPS)[:, None]
        n *= r
        dn = g * w
        da = r * (dn - n * (tl.sum(dn * n, axis=1) / width)[:, None])
        tl.store(dx + row * width + column[None, :], da.to(dx.dtype.element_ty), mask=mask)
        if DWEIGHT:
            total += tl.where(mask, g * n.to(x.dtype.element_ty).to(ACC), 0.0)
    if DWEIGHT:
        tl.store(dweight + part * width + column, tl.sum(total, axis=0), mask=inside)


def forward(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel() == 0:
        return out
    x = as_rows(x)
    columns = triton.next_power_of_2(x.shape[1])
    block, _, programs = row_blocks(len(x), columns, summed=False)
    launch(
        _forward,
        (programs,),
        *(x, weight.contiguous(), out, *x.shape, x.stride(0)),
        EPS=eps, PRODUCT=triton_type(torch.promote_types(x.dtype, weight.dtype)), ACC=accumulator(x, weight),
        **tile_constants(block, columns),
    )  # fmt: skip
    return out


def backward(dout: Tensor, x: Tensor, weight: Tensor, eps: float, needs_weight: bool) -> tuple[Tensor, Tensor]:
    """Returns dx and dweight; dweight is empty if it is not needed."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dout, x = as_rows(dout), as_rows(x)
    columns = triton.next_power_of_2(x.shape[1])
    block, steps, programs = row_blocks(len(x), columns, summed=needs_weight)
    acc = accumulator(x, weight)
    dweight = torch.empty((programs, x.shape[1]) if needs_weight else (0,), dtype=torch_type(acc), device=x.device)
    if x.numel():
        launch(
            _backward,
            (programs,),
            *(dout, x, weight.contiguous(), dx, dweight, *x.shape, dout.stride(0), x.stride(0)),
            EPS=eps, DWEIGHT=needs_weight, STEPS=steps, ACC=acc, **tile_constants(block, columns),
        )  # fmt: skip
    return dx, dweight.sum(0).to(weight.dtype) if needs_weight else dweight
