"""Rotary embedding over the states of B and C."""

import torch
from torch import Tensor

from mambacl.errors import UserError
from mambacl.ops import kernels, switch
from mambacl.ops.operator import operator, shapes
from mambacl.ops.precision import at_least_float32, full_precision


def rotate(M: Tensor, freq: Tensor, scale: float = 1.0, *, backend: str = "auto") -> Tensor:
    """Rotates M (b, l, m, n): token t by the angles t freq / scale. Neighbouring states form pairs, but each state has
    its own frequency. Computes in float32 or better. The kernel is used only if freq needs no gradient."""
    if M.dim() != 4 or M.shape[3] % 2 or freq.shape != M.shape[3:]:
        raise UserError(f"rotate needs M (b, l, m, n) with n even and freq (n,), got {shapes(M, freq)}.")
    fixed = not (freq.requires_grad and torch.is_grad_enabled())
    if fixed and M.dtype != torch.float64 and switch.takes_kernel(M, backend):
        return _rotate(M, freq, scale)
    return rotate_plain(M, freq, scale)


def rotate_plain(M: Tensor, freq: Tensor, scale: float = 1.0) -> Tensor:
    with full_precision(M):
        M = at_least_float32(M)
        position = torch.arange(M.shape[1], device=M.device, dtype=M.dtype) / scale
        angle = (position[:, None] * freq).unsqueeze(1)  # (l, 1, n)
        even, odd = M[..., ::2], M[..., 1::2]
        return M * angle.cos() + torch.stack((-odd, even), dim=-1).flatten(-2) * angle.sin()


def _turn(M: Tensor, freq: Tensor, scale: float) -> Tensor:
    return kernels.rotary.run(M, freq, scale, False, torch.float32)


def _turn_back(dout: Tensor, freq: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return kernels.rotary.run(dout, freq, scale, True, dtype)


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
_rotate = operator("rotate", _turn, _fake_turn, _keep_turn, _differentiate_turn)
