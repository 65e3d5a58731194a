# mypy: disable-error-code="import-untyped, import-not-found"
"""Launches the convolution's kernels: block sizes, partial sums added up."""

import torch
import triton
from torch import Tensor

from mambacl.fused import conv_kernels
from mambacl.fused.launch import accumulator, launch, torch_type, unit_stride
from mambacl.fused.plain import padding

ROWS = 4  # loaded before the first is used
ENOUGH_THREADS = 2**17  # about half of what a large GPU holds at a time


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, reverse: bool, silu: bool, same: bool) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y
    x = unit_stride(x)
    batch, length, width = x.shape
    taps = weight.shape[1]
    block, warps, tokens = _blocks(x, taps)
    tiles, chunks = triton.cdiv(width, block), triton.cdiv(length, tokens)
    launch(
        conv_kernels.forward,
        (tiles * chunks * batch,),
        *(x, weight, weight if bias is None else bias.contiguous(), y),
        *(length, width, tiles, chunks, x.stride(0), x.stride(1), *weight.stride()),
        K=taps,
        LEFT=padding(taps, reverse, same)[0],
        FLIP=reverse,
        SILU=silu,
        BIAS=bias is not None,
        TOKENS=tokens,
        ROWS=ROWS,
        BLOCK=block,
        ACC=accumulator(x),
        num_warps=warps,
    )
    return y


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    reverse: bool,
    silu: bool,
    same: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight, dbias; what is not needed has no elements and costs nothing."""
    x, dy = unit_stride(x), unit_stride(dy)
    batch, length, width = x.shape
    taps = weight.shape[1]
    block, warps, tokens = _blocks(x, taps)
    tiles, chunks = triton.cdiv(width, block), triton.cdiv(length, tokens)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    wide = torch_type(accumulator(x))
    dweight = torch.empty((chunks * batch, taps, width) if needs_weight else (0,), dtype=wide, device=x.device)
    dbias = torch.empty((chunks * batch, width) if needs_bias else (0,), dtype=wide, device=x.device)
    if x.numel():
        launch(
            conv_kernels.backward,
            (tiles * chunks * batch,),
            *(x, dy, weight, weight if bias is None else bias.contiguous(), dx, dweight, dbias),
            *(length, width, tiles, chunks, x.stride(0), x.stride(1), dy.stride(0), dy.stride(1)),
            *weight.stride(),
            K=taps,
            LEFT=padding(taps, reverse, same)[0],
            FLIP=reverse,
            SILU=silu,
            BIAS=bias is not None,
            DWEIGHT=needs_weight,
            DBIAS=needs_bias,
            TOKENS=tokens,
            ROWS=ROWS,
            BLOCK=block,
            ACC=accumulator(x),
            num_warps=warps,
        )
    if needs_weight:
        dweight = dweight.sum(0).t().to(weight.dtype).contiguous()
    if needs_bias and bias is not None:
        dbias = dbias.sum(0).to(bias.dtype)
    return dx, dweight, dbias


def _blocks(x: Tensor, taps: int) -> tuple[int, int, int]:
    """Channels of a block, its warps, tokens of a chunk.

    The block that leaves the fewest lanes idle; chunks of one length, as long as still gives enough threads, for k - 1
    tokens are read twice where chunks meet.
    """
    batch, length, width = x.shape
    block = min((256, 128, 64), key=lambda size: triton.cdiv(width, size) * size)
    channels = (8 if x.element_size() == 2 else 4) // (
        2 if taps <= 4 else 4
    )  # of one thread: more taps, more registers
    warps = max(1, block // (32 * channels))
    threads = triton.cdiv(width, block) * batch * warps * 32
    tokens = 64
    while tokens > 16 and threads * max(1, round(length / tokens)) < ENOUGH_THREADS:
        tokens //= 2
    chunks = max(1, round(length / tokens))
    return block, warps, triton.cdiv(triton.cdiv(length, chunks), ROWS) * ROWS
