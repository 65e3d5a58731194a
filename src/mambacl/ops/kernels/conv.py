# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, assignment"
"""Depthwise convolution over tokens and SiLU, channels last.

    a_t = bias + sum_i w_i x_{t - left + i},    y_t = silu(a_t),    i = 0 .. k - 1; x is zero outside 0 .. l - 1

`left` is k - 1 for the causal convolution; the reverse one has mirrored taps and left = 0. A program processes a block
of channels and a chunk of one image's tokens. The last k tokens stay in registers, so each input is read once, except
for k - 1 tokens at chunk boundaries. Several rows are loaded before the first is used, to hide the latency of memory.
The backward recomputes g_t = dy_t silu'(a_t) and also keeps it in registers:

    dx_s = sum_i w_i g_{s + left - i},    dw_i = sum_t g_t x_{t - left + i},    dbias = sum_t g_t

Each chunk writes one partial sum over its tokens, and PyTorch adds them up: no atomics, so results are reproducible.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mambacl.ops.kernels.launch import accumulator, launch, torch_type, unit_stride

ROWS = 4  # rows loaded before the first is used
ENOUGH_THREADS = 2**17  # about half of what a large GPU holds at once


@triton.jit
def _appended(values, value):
    return values + (value,)  # noqa: RUF005 - Triton does not unpack


@triton.jit
def _row_mask(channel, width, exists):
    """The mask of a token's row; all false if the token does not exist. The interpreter cannot combine a scalar and a
    mask."""
    return channel < tl.where(exists, width, 0)


@triton.jit
def _rows(x, first, stride, length, channel, width, COUNT: tl.constexpr, ACC: tl.constexpr):
    """COUNT tokens of every channel of the block, zero outside the sequence."""
    rows = ()
    for i in tl.static_range(COUNT):
        token = first + i
        there = _row_mask(channel, width, (token >= 0) & (token < length))
        rows = _appended(rows, tl.load(x + token * stride + channel, mask=there, other=0.0).to(ACC))
    return rows


@triton.jit
def _taps(weight, channel, w_d, w_k, inside, K: tl.constexpr, FLIP: tl.constexpr, ACC: tl.constexpr):
    taps = ()
    for i in tl.static_range(K):
        tap = K - 1 - i if FLIP else i
        taps = _appended(taps, tl.load(weight + channel * w_d + tap * w_k, mask=inside, other=0.0).to(ACC))
    return taps


@triton.jit
def _preactivation(window, taps, offset, K: tl.constexpr):
    total = offset
    for i in tl.static_range(K):
        total += taps[i] * window[i]
    return total


@triton.jit
def _gradient(window, taps, offset, dy, valid, K: tl.constexpr, SILU: tl.constexpr):
    """g of one token; zero if the token does not exist, whatever its neighbours are."""
    g = dy
    if SILU:
        a = _preactivation(window, taps, offset, K)
        s = 1.0 / (1.0 + tl.exp(-a))
        g = tl.where(valid, dy * s * (1.0 + a * (1.0 - s)), 0.0)
    return g


@triton.jit
def _added(sums, window, g, own, K: tl.constexpr):
    added = ()
    for i in tl.static_range(K):
        added = _appended(added, tl.where(own, sums[i] + g * window[i], sums[i]))
    return added


@triton.jit
def _forward(
    x, weight, bias, y, length, width, tiles, chunks, x_b, x_l, w_d, w_k, K: tl.constexpr, LEFT: tl.constexpr,
    FLIP: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    channel = (program % tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    image = (program // tiles // chunks).to(tl.int64)
    first = (program // tiles % chunks).to(tl.int64) * TOKENS
    x += image * x_b
    y += image * length * width
    taps = _taps(weight, channel, w_d, w_k, inside, K, FLIP, ACC)
    offset = tl.zeros((BLOCK,), ACC)
    if BIAS:
        offset = tl.load(bias + channel, mask=inside, other=0.0).to(ACC)

    window = _rows(x, first - LEFT, x_l, length, channel, width, K - 1, ACC)
    for t in range(0, TOKENS, ROWS):
        token = first + t
        rows = window + _rows(x, token + (K - 1 - LEFT), x_l, length, channel, width, ROWS, ACC)
        for u in tl.static_range(ROWS):
            a = _preactivation(rows[u : u + K], taps, offset, K)
            if SILU:
                a = a / (1.0 + tl.exp(-a))
            there = _row_mask(channel, width, token + u < length)
            tl.store(y + (token + u) * width + channel, a.to(y.dtype.element_ty), mask=there)
        window = rows[ROWS:]


@triton.jit
def _backward(
    x, dy, weight, bias, dx, dweight, dbias, length, width, tiles, chunks, x_b, x_l, dy_b, dy_l, w_d, w_k,
    K: tl.constexpr, LEFT: tl.constexpr, FLIP: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr,
    DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    channel = (program % tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    chunk = (program // tiles).to(tl.int64)
    image = (program // tiles // chunks).to(tl.int64)
    first = (program // tiles % chunks).to(tl.int64) * TOKENS
    end = tl.minimum(first + TOKENS, length)
    x += image * x_b
    dy += image * dy_b
    dx += image * length * width
    taps = _taps(weight, channel, w_d, w_k, inside, K, FLIP, ACC)
    zero = tl.zeros((BLOCK,), ACC)
    offset = zero
    if BIAS:
        offset = tl.load(bias + channel, mask=inside, other=0.0).to(ACC)
    sums = ()
    for _i in tl.static_range(K):
        sums = _appended(sums, zero)
    total = zero

    # g of the k - 1 tokens from first - RIGHT on. Other programs sum those before this chunk.
    RIGHT: tl.constexpr = K - 1 - LEFT
    head = _rows(x, first - (K - 1), x_l, length, channel, width, 2 * K - 2, ACC)
    head_dy = _rows(dy, first - RIGHT, dy_l, length, channel, width, K - 1, ACC)
    g = ()
    for i in tl.static_range(K - 1):
        q = first + (i - RIGHT)
        head_g = _gradient(head[i : i + K], taps, offset, head_dy[i], (q >= 0) & (q < length), K, SILU)
        g = _appended(g, head_g)
        if i >= RIGHT:
            if DWEIGHT:
                sums = _added(sums, head[i : i + K], head_g, q < end, K)
            if DBIAS:
                total += tl.where(q < end, head_g, 0.0)
    window = head[K - 1 :]

    for t in range(0, TOKENS, ROWS):
        token = first + t
        rows = window + _rows(x, token + (K - 1), x_l, length, channel, width, ROWS, ACC)
        rows_dy = _rows(dy, token + LEFT, dy_l, length, channel, width, ROWS, ACC)
        for u in tl.static_range(ROWS):
            p = token + (u + LEFT)
            new = _gradient(rows[u : u + K], taps, offset, rows_dy[u], p < length, K, SILU)
            g = _appended(g, new)
            if DWEIGHT:
                sums = _added(sums, rows[u : u + K], new, p < end, K)
            if DBIAS:
                total += tl.where(p < end, new, 0.0)
            out = zero
            for i in tl.static_range(K):
                out += taps[i] * g[u + K - 1 - i]
            there = _row_mask(channel, width, token + u < length)
            tl.store(dx + (token + u) * width + channel, out.to(dx.dtype.element_ty), mask=there)
        window = rows[ROWS:]
        g = g[ROWS:]

    if DWEIGHT:
        for i in tl.static_range(K):
            tap = K - 1 - i if FLIP else i
            tl.store(dweight + (chunk * K + tap) * width + channel, sums[i], mask=inside)
    if DBIAS:
        tl.store(dbias + chunk * width + channel, total, mask=inside)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, reverse: bool, silu: bool, left: int) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y
    x = unit_stride(x)
    sizes, constants = _arguments(x, weight, bias, reverse, silu, left)
    inputs = (x, weight, weight if bias is None else bias.contiguous(), y)
    strides = (x.stride(0), x.stride(1), *weight.stride())
    launch(_forward, (sizes[2] * sizes[3] * len(x),), *inputs, *sizes, *strides, **constants)
    return y


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, reverse: bool, silu: bool, left: int,
    needs_weight: bool, needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns dx, dweight and dbias; those not needed are empty."""
    x, dy = unit_stride(x), unit_stride(dy)
    sizes, constants = _arguments(x, weight, bias, reverse, silu, left)
    _, width, tiles, chunks = sizes
    parts, wide = chunks * len(x), torch_type(accumulator(x))
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dweight = torch.empty((parts, weight.shape[1], width) if needs_weight else (0,), dtype=wide, device=x.device)
    dbias = torch.empty((parts, width) if needs_bias else (0,), dtype=wide, device=x.device)
    if x.numel():
        inputs = (x, dy, weight, weight if bias is None else bias.contiguous(), dx, dweight, dbias)
        strides = (x.stride(0), x.stride(1), dy.stride(0), dy.stride(1), *weight.stride())
        launch(
            _backward, (tiles * parts,), *inputs, *sizes, *strides, **constants,
            DWEIGHT=needs_weight, DBIAS=needs_bias,
        )  # fmt: skip
    if needs_weight:
        dweight = dweight.sum(0).t().to(weight.dtype).contiguous()
    if needs_bias and bias is not None:
        dbias = dbias.sum(0).to(bias.dtype)
    return dx, dweight, dbias


def _arguments(
    x: Tensor, weight: Tensor, bias: Tensor | None, reverse: bool, silu: bool, left: int
) -> tuple[tuple[int, int, int, int], dict[str, Any]]:
    """What both kernels get: length, width, blocks of channels and chunks of tokens; and the constants."""
    _, length, width = x.shape
    block, warps, tokens = _blocks(x, weight.shape[1])
    constants = {
        "K": weight.shape[1], "LEFT": left, "FLIP": reverse, "SILU": silu, "BIAS": bias is not None, "TOKENS": tokens,
        "ROWS": ROWS, "BLOCK": block, "ACC": accumulator(x), "num_warps": warps,
    }  # fmt: skip
    return (length, width, triton.cdiv(width, block), triton.cdiv(length, tokens)), constants


def _blocks(x: Tensor, taps: int) -> tuple[int, int, int]:
    """Channels per block, warps per block, tokens per chunk.

    The block size leaves the fewest lanes idle. Chunks are as long as possible while enough threads remain, because
    k - 1 tokens are read twice at each chunk boundary.
    """
    batch, length, width = x.shape
    block = min((256, 128, 64), key=lambda size: triton.cdiv(width, size) * size)
    channels = (8 if x.element_size() == 2 else 4) // (2 if taps <= 4 else 4)  # per thread; taps take registers
    warps = max(1, block // (32 * channels))
    threads = triton.cdiv(width, block) * batch * warps * 32
    tokens = 64
    while tokens > 16 and threads * max(1, round(length / tokens)) < ENOUGH_THREADS:
        tokens //= 2
    chunks = max(1, round(length / tokens))
    return block, warps, triton.cdiv(triton.cdiv(length, chunks), ROWS) * ROWS
