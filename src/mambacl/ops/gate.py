"""The operators after the scan: group norm of its output, skip and gate."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mambacl.errors import UserError
from mambacl.ops import kernels, switch
from mambacl.ops.norm import WIDEST_NORM, rms_normalize
from mambacl.ops.operator import check_channels, like, operator, shapes
from mambacl.ops.precision import at_least_float32, full_precision


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
    """(n + D x) silu(z), where n is y divided by its root mean square over each `group` of channels (0: n = y).

    y, x, z (b, l, d) with any floating dtypes, D (d,). The output is contiguous and has `dtype`, by default y's.
    """
    if y.shape != x.shape or y.shape != z.shape:
        raise UserError(f"The gated norm needs y, x and z of the same shape, got {shapes(y, x, z)}.")
    if group < 0 or (group and y.shape[-1] % group):
        raise UserError(f"The width {y.shape[-1]} must be a multiple of the group {group}; use 0 for no norm.")
    check_channels(y, D=D)
    if group <= WIDEST_NORM and switch.takes_kernel(y, backend):
        return _gated_group_norm(y, x, D, z, group, eps, dtype or y.dtype)
    return gated_group_norm_plain(y, x, D, z, group, eps, dtype)


def gated_group_norm_plain(
    y: Tensor, x: Tensor, D: Tensor, z: Tensor, group: int, eps: float, dtype: torch.dtype | None = None
) -> Tensor:
    with full_precision(y):
        wide = torch.promote_types(at_least_float32(y).dtype, torch.promote_types(x.dtype, z.dtype))
        n = y.to(wide)
        if group:
            n = rms_normalize(n.unflatten(-1, (-1, group)), eps).flatten(-2)
        return (torch.addcmul(n, D.to(wide), x.to(wide)) * F.silu(z.to(wide))).to(dtype or y.dtype)


def skip_gate(
    y: Tensor, x: Tensor, D: Tensor, z: Tensor, dtype: torch.dtype | None = None, *, backend: str = "auto"
) -> Tensor:
    """(y + D x) silu(z): `gated_group_norm` without the norm."""
    return gated_group_norm(y, x, D, z, 0, 0.0, dtype, backend=backend)


def _gate(y: Tensor, x: Tensor, D: Tensor, z: Tensor, group: int, eps: float, dtype: torch.dtype) -> Tensor:
    return kernels.gate.forward(y, x, D, z, group, eps, dtype)


def _gate_back(
    dout: Tensor, y: Tensor, x: Tensor, D: Tensor, z: Tensor, group: int, eps: float, needs_D: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return kernels.gate.backward(dout, y, x, D, z, group, eps, needs_D)


def _fake_gate(y, x, D, z, group, eps, dtype):  # type: ignore[no-untyped-def]
    return y.new_empty(y.shape, dtype=dtype)


def _fake_gate_back(dout, y, x, D, z, group, eps, needs_D):  # type: ignore[no-untyped-def]
    return like(y), like(x), like(z), like(D, needs_D)


def _keep_gate(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.group, ctx.eps, _ = inputs
    ctx.save_for_backward(*tensors)


def _differentiate_gate(ctx, dout: Tensor):  # type: ignore[no-untyped-def]
    needs_D = ctx.needs_input_grad[2]
    dy, dx, dz, dD = _gated_group_norm_backward(dout, *ctx.saved_tensors, ctx.group, ctx.eps, needs_D)
    return dy, dx, dD if needs_D else None, dz, None, None, None


_gated_group_norm_backward = operator("gated_group_norm_backward", _gate_back, _fake_gate_back)
_gated_group_norm = operator("gated_group_norm", _gate, _fake_gate, _keep_gate, _differentiate_gate)
