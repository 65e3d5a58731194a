"""Depthwise convolution over tokens, followed by SiLU."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mambacl.errors import UserError
from mambacl.ops import kernels, switch
from mambacl.ops.operator import check_channels, like, operator, shapes
from mambacl.ops.precision import at_least_float32, full_precision

MOST_TAPS = 8
SMALL = 2**16  # values, up to which a CPU needs more time to set up a convolution than for one product per tap


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
    """Depthwise convolution of x (b, l, d) over each token and the k - 1 before it (zeros before the start), then SiLU;
    weight (d, k), bias (d,). The output is contiguous and has x's dtype.

    `reverse`: use the tokens after instead of before, as if x were flipped, convolved and flipped back. `same`: use as
    many tokens before as after, like `F.conv1d(padding="same")`. `silu=False` omits the SiLU.
    """
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[0] != x.shape[2]:
        raise UserError(f"causal_conv_silu needs x (b, l, d) and weight (d, k), got {shapes(x, weight)}.")
    check_channels(x, bias=bias)
    if 2 <= weight.shape[1] <= MOST_TAPS and switch.takes_kernel(x, backend):
        return _causal_conv(x, weight, bias, reverse, silu, same)
    if _is_small(x, weight, bias):
        return _by_taps(x, weight, bias, reverse, silu, same)
    return causal_conv_silu_plain(x, weight, bias, reverse=reverse, silu=silu, same=same)


def causal_conv_silu_plain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    reverse: bool = False,
    silu: bool = True,
    same: bool = False,
) -> Tensor:
    before, after = padding(weight.shape[1], reverse, same)
    with full_precision(x):
        wide = at_least_float32(x)
        # A 2-D convolution keeps channels last.
        image = F.pad(wide, (0, 0, before, after)).mT.unsqueeze(2)  # (b, d, 1, l + k - 1)
        taps = (weight.flip(1) if reverse else weight).to(wide.dtype)[:, None, None]  # (d, 1, 1, k)
        y = F.conv2d(image, taps, None if bias is None else bias.to(wide.dtype), groups=len(taps)).squeeze(2).mT
        return (F.silu(y) if silu else y).to(x.dtype)


def _is_small(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether to convolve by taps: few values on a CPU, in one dtype. In a traced graph the batch can have any size."""
    if x.device.type != "cpu" or torch.compiler.is_compiling() or x.numel() > SMALL:
        return False
    same = x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype)
    return same and x.dtype in (torch.float32, torch.float64)


def _by_taps(x: Tensor, weight: Tensor, bias: Tensor | None, reverse: bool, silu: bool, same: bool) -> Tensor:
    """One product per tap, added up."""
    before, after = padding(weight.shape[1], reverse, same)
    length, padded = x.shape[1], F.pad(x, (0, 0, before, after))
    taps = weight.T.unbind()
    y = bias
    for place, tap in enumerate(reversed(taps) if reverse else taps):
        tokens = padded[:, place : place + length]
        y = tokens * tap if y is None else torch.addcmul(y, tokens, tap)
    assert y is not None
    return (F.silu(y) if silu else y).contiguous()


def padding(taps: int, reverse: bool, same: bool) -> tuple[int, int]:
    """Number of tokens before and after the current one that a convolution reads."""
    before = (taps - 1) // 2 if same else taps - 1
    return (taps - 1 - before, before) if reverse else (before, taps - 1 - before)


def _conv(x: Tensor, weight: Tensor, bias: Tensor | None, reverse: bool, silu: bool, same: bool) -> Tensor:
    return kernels.conv.forward(x, weight, bias, reverse, silu, padding(weight.shape[1], reverse, same)[0])


def _conv_back(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, reverse: bool, silu: bool, same: bool,
    needs_weight: bool, needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    left = padding(weight.shape[1], reverse, same)[0]
    return kernels.conv.backward(dy, x, weight, bias, reverse, silu, left, needs_weight, needs_bias)


def _fake_conv(x, weight, bias, reverse, silu, same):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


def _fake_conv_back(dy, x, weight, bias, reverse, silu, same, needs_weight, needs_bias):  # type: ignore[no-untyped-def]
    return like(x), like(weight, needs_weight), like(bias if needs_bias else x, needs_bias)


def _keep_conv(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, weight, bias, *ctx.flags = inputs
    ctx.save_for_backward(x, weight, bias)


def _differentiate_conv(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
    needs = ctx.needs_input_grad[1:3]
    dx, *rest = _causal_conv_backward(dy, *ctx.saved_tensors, *ctx.flags, *needs)
    return dx, *(grad if need else None for grad, need in zip(rest, needs, strict=True)), None, None, None


_causal_conv_backward = operator("causal_conv_backward", _conv_back, _fake_conv_back)
_causal_conv = operator("causal_conv", _conv, _fake_conv, _keep_conv, _differentiate_conv)
