# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"
"""The projection of a low-rank dt to all channels and its softplus, softplus(dt W^T + b), in float32.

It needs no backward: the scan's backward returns the gradient with respect to the input of the softplus.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mambacl.ops.kernels.launch import as_exact_as_float32, as_rows, launch
from mambacl.ops.kernels.softplus import softplus


@triton.jit
def _forward(
    dt, weight, bias, delta, rows, dt_l, RANK: tl.constexpr, D: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SUMMED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.static_range(0, RANK, SUMMED):
        k = start + tl.arange(0, SUMMED)
        a = tl.load(dt + row * dt_l + k[None, :], mask=(row < rows) & (k < RANK)[None, :], other=0.0)
        w = tl.load(weight + column * RANK + k[:, None], mask=(column < D) & (k < RANK)[:, None], other=0.0)
        acc = tl.dot(a.to(tl.float32), w, acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias + column, mask=column < D, other=0.0)
    tl.store(delta + row * D + column, softplus(acc), mask=(row < rows) & (column < D))


def delta_projection(dt: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """softplus(dt W^T + b) in float32; dt (.., rank), weight (d, rank) and bias (d,) in float32."""
    given, weight = as_rows(dt), weight.contiguous()
    width, rank = weight.shape
    delta = torch.empty(*dt.shape[:-1], width, dtype=torch.float32, device=dt.device)
    exact = torch.backends.cuda.matmul.fp32_precision != "tf32"  # the older setting can raise when read
    rows, columns = 64, 64
    launch(
        _forward, (triton.cdiv(len(given), rows) * triton.cdiv(width, columns),),
        given, weight, weight if bias is None else bias.contiguous(), delta, len(given), given.stride(0),
        RANK=rank, D=width, BIAS=bias is not None, ROWS=rows, COLUMNS=columns,
        SUMMED=16 if rank <= 16 else 32,
        PRECISION=as_exact_as_float32(dt.device) if exact else "tf32", num_warps=4, num_stages=1,
    )  # fmt: skip
    return delta
