# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"
"""The steps of a scan from their low-rank form, softplus(dt W^T + b), in float32 and written once.

    softplus(x) = max(x, 0) + log(1 + e),   e = exp(-|x|),   log(1 + e) = 2 artanh(e / (2 + e))

so that small steps, of which a GPU's own logarithm of 1 + e would leave three digits, keep all of theirs. There is no
backward of its own: the scan's gives the gradient with regard to what went into the softplus.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mambacl.fused.launch import as_exact_as_float32, as_rows, launch

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.693359375)  # its leading bits, few enough for exact products with small numbers, and the rest
LN2_REST = tl.constexpr(-2.12194440054690583e-4)


@triton.jit
def _softplus(x):
    size = -tl.abs(x)
    size = tl.where(size < -200.0, -200.0, size)  # infinity too, of which an exponent would be no number
    whole = tl.floor(size * LOG2E + 0.5)
    rest = (size - whole * LN2) - whole * LN2_REST
    e = tl.exp2(whole) * tl.exp2(rest * LOG2E)
    s = e / (2 + e)
    q = s * s  # at most 1 / 9
    series = 1 / 13 + q * (1 / 15 + q * (1 / 17))
    series = 1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q * series)))
    return tl.maximum(x, 0.0) + 2 * s * (1 + q * (1 / 3 + q * series))


@triton.jit
def _forward(
    dt, weight, bias, steps, rows, dt_l, RANK: tl.constexpr, D: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr,
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
    tl.store(steps + row * D + column, _softplus(acc), mask=(row < rows) & (column < D))


def project_steps(dt: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """softplus(dt W^T + b): dt (.., rank), weight (d, rank) and bias (d,) of float32."""
    given, weight = as_rows(dt), weight.contiguous()
    width, rank = weight.shape
    steps = torch.empty(*dt.shape[:-1], width, dtype=torch.float32, device=dt.device)
    exact = torch.backends.cuda.matmul.fp32_precision != "tf32"  # however that was set; the older question may raise
    rows, columns = 64, 64
    launch(
        _forward, (triton.cdiv(len(given), rows) * triton.cdiv(width, columns),),
        given, weight, weight if bias is None else bias.contiguous(), steps, len(given), given.stride(0),
        RANK=rank, D=width, BIAS=bias is not None, ROWS=rows, COLUMNS=columns,
        SUMMED=16 if rank <= 16 else 32,
        PRECISION=as_exact_as_float32(dt.device) if exact else "tf32", num_warps=4, num_stages=1,
    )  # fmt: skip
    return steps
