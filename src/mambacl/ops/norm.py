"""RMS norm over the channels."""

import torch
from torch import Tensor

from mambacl.ops import kernels, switch
from mambacl.ops.operator import check_channels, like, operator
from mambacl.ops.precision import at_least_float32, full_precision

WIDEST_NORM = 16384  # most channels per kernel program; wider inputs use the plain twin


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None, *, backend: str = "auto"
) -> Tensor:
    """weight x / rms(x) over the last dimension. x / rms(x) is computed in float32 or better and rounded to x's dtype
    before the weight is applied. The output has `dtype`, by default the wider of x's and weight's."""
    check_channels(x, weight=weight)
    if x.shape[-1] <= WIDEST_NORM and switch.takes_kernel(x, backend):
        return _rms_norm(x, weight, eps, dtype or torch.promote_types(x.dtype, weight.dtype))
    return rms_norm_plain(x, weight, eps, dtype)


def rms_norm_plain(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    with full_precision(x):
        y = weight * rms_normalize(at_least_float32(x), eps).to(x.dtype)
        return y.to(dtype or y.dtype)


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """x divided by its root mean square over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return kernels.norm.forward(x, weight, eps, dtype)


def _norm_back(dout: Tensor, x: Tensor, weight: Tensor, eps: float, needs_weight: bool) -> tuple[Tensor, Tensor]:
    return kernels.norm.backward(dout, x, weight, eps, needs_weight)


def _fake_norm(x, weight, eps, dtype):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape, dtype=dtype)


def _fake_norm_back(dout, x, weight, eps, needs_weight):  # type: ignore[no-untyped-def]
    return like(x), like(weight, needs_weight)


def _keep_norm(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, weight, ctx.eps, _ = inputs
    ctx.save_for_backward(x, weight)


def _differentiate_norm(ctx, dout: Tensor):  # type: ignore[no-untyped-def]
    needs_weight = ctx.needs_input_grad[1]
    dx, dweight = _rms_norm_backward(dout, *ctx.saved_tensors, ctx.eps, needs_weight)
    return dx, dweight if needs_weight else None, None, None


_rms_norm_backward = operator("rms_norm_backward", _norm_back, _fake_norm_back)
_rms_norm = operator("rms_norm", _norm, _fake_norm, _keep_norm, _differentiate_norm)
