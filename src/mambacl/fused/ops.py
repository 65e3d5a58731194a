"""The kernels as PyTorch operators with their backwards, so that `torch.compile` takes each as a whole.

A kernel's file imports Triton, so it is imported when its operator first runs. A gradient that nobody needs is an empty
tensor inside and None outside.
"""

import torch
from torch import Tensor

from mambacl.fused.calling import operator


def _nothing(x: Tensor) -> Tensor:
    return x.new_empty(0)


def _needed(gradients: list[Tensor], needs: list[bool]) -> list[Tensor | None]:
    return [gradient if need else None for gradient, need in zip(gradients, needs, strict=True)]


# Causal convolution


def _conv(x: Tensor, weight: Tensor, bias: Tensor | None, reverse: bool, silu: bool, same: bool) -> Tensor:
    from mambacl.fused import conv

    return conv.forward(x, weight, bias, reverse, silu, same)


def _conv_back(
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
    from mambacl.fused import conv

    return conv.backward(dy, x, weight, bias, reverse, silu, same, needs_weight, needs_bias)


def _fake_conv(x, weight, bias, reverse, silu, same):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


def _fake_conv_back(dy, x, weight, bias, reverse, silu, same, needs_weight, needs_bias):  # type: ignore[no-untyped-def]
    dweight = weight.new_empty(weight.shape) if needs_weight else _nothing(x)
    return x.new_empty(x.shape), dweight, bias.new_empty(bias.shape) if needs_bias else _nothing(x)


def _keep_conv(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, weight, bias, *ctx.flags = inputs
    ctx.save_for_backward(x, weight, bias)


def _differentiate_conv(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
    needs = ctx.needs_input_grad[1:3]
    dx, *rest = _causal_conv_backward(dy, *ctx.saved_tensors, *ctx.flags, *needs)
    return dx, *_needed(rest, needs), None, None, None


_causal_conv_backward = operator("causal_conv_backward", _conv_back, _fake_conv_back)
causal_conv = operator("causal_conv", _conv, _fake_conv, _keep_conv, _differentiate_conv)


# Group norm, skip and gate


def _gate(y: Tensor, x: Tensor, D: Tensor, z: Tensor, group: int, eps: float, dtype: torch.dtype) -> Tensor:
    from mambacl.fused import gate

    return gate.forward(y, x, D, z, group, eps, dtype)


def _gate_back(
    dout: Tensor, y: Tensor, x: Tensor, D: Tensor, z: Tensor, group: int, eps: float, needs_D: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from mambacl.fused import gate

    return gate.backward(dout, y, x, D, z, group, eps, needs_D)


def _fake_gate(y, x, D, z, group, eps, dtype):  # type: ignore[no-untyped-def]
    return y.new_empty(y.shape, dtype=dtype)


def _fake_gate_back(dout, y, x, D, z, group, eps, needs_D):  # type: ignore[no-untyped-def]
    dy, dx, dz = (tensor.new_empty(tensor.shape) for tensor in (y, x, z))
    return dy, dx, dz, D.new_empty(D.shape) if needs_D else _nothing(y)


def _keep_gate(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.group, ctx.eps, _ = inputs
    ctx.save_for_backward(*tensors)


def _differentiate_gate(ctx, dout: Tensor):  # type: ignore[no-untyped-def]
    needs_D = ctx.needs_input_grad[2]
    dy, dx, dz, dD = _gated_group_norm_backward(dout, *ctx.saved_tensors, ctx.group, ctx.eps, needs_D)
    return dy, dx, *_needed([dD], [needs_D]), dz, None, None, None


_gated_group_norm_backward = operator("gated_group_norm_backward", _gate_back, _fake_gate_back)
gated_group_norm = operator("gated_group_norm", _gate, _fake_gate, _keep_gate, _differentiate_gate)


# RMS norm


def _norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    from mambacl.fused import norm

    return norm.forward(x, weight, eps, dtype)


def _norm_back(dout: Tensor, x: Tensor, weight: Tensor, eps: float, needs_weight: bool) -> tuple[Tensor, Tensor]:
    from mambacl.fused import norm

    return norm.backward(dout, x, weight, eps, needs_weight)


def _fake_norm(x, weight, eps, dtype):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape, dtype=dtype)


def _fake_norm_back(dout, x, weight, eps, needs_weight):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), weight.new_empty(weight.shape) if needs_weight else _nothing(x)


def _keep_norm(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, weight, ctx.eps, _ = inputs
    ctx.save_for_backward(x, weight)


def _differentiate_norm(ctx, dout: Tensor):  # type: ignore[no-untyped-def]
    needs_weight = ctx.needs_input_grad[1]
    dx, dweight = _rms_norm_backward(dout, *ctx.saved_tensors, ctx.eps, needs_weight)
    return dx, *_needed([dweight], [needs_weight]), None, None


_rms_norm_backward = operator("rms_norm_backward", _norm_back, _fake_norm_back)
rms_norm = operator("rms_norm", _norm, _fake_norm, _keep_norm, _differentiate_norm)


# Rotary embedding


def _turn(M: Tensor, freq: Tensor, scale: float) -> Tensor:
    from mambacl.fused import rotary

    return rotary.run(M, freq, scale, False, torch.float32)


def _turn_back(dout: Tensor, freq: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    from mambacl.fused import rotary

    return rotary.run(dout, freq, scale, True, dtype)


def _fake_turn(M, freq, scale):  # type: ignore[no-untyped-def]
    return M.new_empty(M.shape, dtype=torch.float32)


def _fake_turn_back(dout, freq, scale, dtype):  # type: ignore[no-untyped-def]
    return dout.new_empty(dout.shape, dtype=dtype)


def _keep_turn(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    M, freq, ctx.scale = inputs
    ctx.dtype = M.dtype
    ctx.save_for_backward(freq)


def _differentiate_turn(ctx, dout: Tensor):  # type: ignore[no-untyped-def]
    return _rotate_backward(dout, *ctx.saved_tensors, ctx.scale, ctx.dtype), None, None


_rotate_backward = operator("rotate_backward", _turn_back, _fake_turn_back)
rotate = operator("rotate", _turn, _fake_turn, _keep_turn, _differentiate_turn)
