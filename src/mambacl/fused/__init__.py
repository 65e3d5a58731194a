"""The elementwise work around the selective scan, fused: on a GPU one kernel each, forward and backward.

Tokens before channels, (b, l, d), unit stride over the channels; halves of a linear layer's output are taken as they
are, without a copy. Computed in float32, in float64 where an input is float64. Each backward computes again what it
needs from the inputs, and nothing for frozen parameters. `backend`: "auto" takes the Triton kernel for CUDA tensors
where Triton imports (`mambacl.fused.switch`), else the plain twin in `mambacl.fused.plain`; "triton" and "plain" force
one.
"""

import torch
from torch import Tensor

from mambacl.errors import UserError
from mambacl.fused import ops, plain, switch
from mambacl.fused.halves import halves

__all__ = ["causal_conv_silu", "gated_group_norm", "halves", "plain", "rms_norm", "rotate", "skip_gate", "switch"]

MOST_TAPS = 8
WIDEST_NORM = 16384  # channels whose norm one program takes; wider ones are left to the plain twin


def causal_conv_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    reverse: bool = False,
    silu: bool = True,
    same: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Depthwise convolution of x (b, l, d) over the present token and the k - 1 before it, zero before the start, then
    SiLU; weight (d, k), bias (d,). The output is contiguous and has x's dtype.

    `reverse`: the tokens after instead of before, as if x were flipped, convolved and flipped back. `same`: as many
    tokens before as after, as `F.conv1d(padding="same")`. `silu` = False leaves the SiLU out.
    """
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[0] != x.shape[2]:
        raise UserError(f"A convolution takes x (b, l, d), weight (d, k), got {_shapes(x, weight)}.")
    _check_channels(x, bias=bias)
    if 2 <= weight.shape[1] <= MOST_TAPS and switch.takes_kernel(x, backend):
        return ops.causal_conv(x, weight, bias, reverse, silu, same)
    return plain.causal_conv_silu(x, weight, bias, reverse=reverse, silu=silu, same=same)


def gated_group_norm(
    y: Tensor,
    x: Tensor,
    D: Tensor,
    z: Tensor,
    group: int,
    eps: float,
    dtype: torch.dtype | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """(n + D x) silu(z), where n is y divided by its root mean square over each `group` of channels; group 0: n = y.

    y, x, z (b, l, d) of any floating types, D (d,). The output is contiguous and has `dtype`, or y's.
    """
    if y.shape != x.shape or y.shape != z.shape:
        raise UserError(f"The gated norm takes y, x and z of one shape, got {_shapes(y, x, z)}.")
    if group < 0 or (group and y.shape[-1] % group):
        raise UserError(f"The width {y.shape[-1]} must be a multiple of the group {group}; 0 for no norm.")
    _check_channels(y, D=D)
    if group <= WIDEST_NORM and switch.takes_kernel(y, backend):
        return ops.gated_group_norm(y, x, D, z, group, eps, dtype or y.dtype)
    return plain.gated_group_norm(y, x, D, z, group, eps, dtype)


def skip_gate(
    y: Tensor, x: Tensor, D: Tensor, z: Tensor, dtype: torch.dtype | None = None, *, backend: str = "auto"
) -> Tensor:
    """(y + D x) silu(z): `gated_group_norm` without the norm."""
    return gated_group_norm(y, x, D, z, 0, 0.0, dtype, backend=backend)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None, *, backend: str = "auto"
) -> Tensor:
    """weight x / rms(x) over the last dimension, with the arithmetic of `backbones.layers.RMSNorm`: the norm in float32
    or better, rounded to x's dtype, then the weight. The output has `dtype`, or the wider of x's and weight's."""
    _check_channels(x, weight=weight)
    if x.shape[-1] <= WIDEST_NORM and switch.takes_kernel(x, backend):
        return ops.rms_norm(x, weight, eps, dtype or torch.promote_types(x.dtype, weight.dtype))
    return plain.rms_norm(x, weight, eps, dtype)


def rotate(M: Tensor, freq: Tensor, scale: float = 1.0, *, backend: str = "auto") -> Tensor:
    """Rotary embedding of M (b, l, m, n), token t by the angles t freq / scale; neighbouring states are pairs, but each
    has a frequency of its own. In float32 or better. The kernel serves frequencies that are fixed."""
    if M.dim() != 4 or M.shape[3] % 2 or freq.shape != M.shape[3:]:
        raise UserError(f"The rotation takes M (b, l, m, n) with n even, and freq (n,), got {_shapes(M, freq)}.")
    fixed = not (freq.requires_grad and torch.is_grad_enabled())
    if fixed and M.dtype != torch.float64 and switch.takes_kernel(M, backend):
        return ops.rotate(M, freq, scale)
    return plain.rotate(M, freq, scale)


def _check_channels(x: Tensor, **vectors: Tensor | None) -> None:
    for name, vector in vectors.items():
        if vector is not None and vector.shape != x.shape[-1:]:
            raise UserError(f"{name} must have one value for each of {x.shape[-1]} channels, got {_shapes(vector)}.")


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
