"""The plain selective scan, differentiated by autograd. Every fast backend is tested against it."""

import torch
import torch.nn.functional as F
from torch import Tensor


def selective_scan_reference(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns the output (b, d, l) and the last state (b, d, n), in the inputs' dtype.

    h_t = exp(delta_t A) h_{t-1} + delta_t u_t B_t,  y_t = <C_t, h_t> + D u_t,  out = y silu(z),  h_{-1} = 0
    """
    if delta_bias is not None:
        delta = delta + delta_bias[:, None]
    if delta_softplus:
        delta = F.softplus(delta)
    length = u.shape[-1]
    h = u.new_zeros(u.shape[0], *A.shape)  # (b, d, n)
    outputs = []
    for t in range(length):
        step = delta[:, :, t, None]  # (b, d, 1)
        h = torch.exp(step * A) * h + step * u[:, :, t, None] * _at(B, t, u.shape[1])
        outputs.append((h * _at(C, t, u.shape[1])).sum(-1))
    y = torch.stack(outputs, dim=-1)  # (b, d, l)
    if D is not None:
        y = y + D[:, None] * u
    if z is not None:
        y = y * F.silu(z)
    return y, h


def _at(M: Tensor, t: int, channels: int) -> Tensor:
    """The (b or 1, d or 1, n) slice of B or C at time t: constant (d, n), shared (b, n, l) or grouped (b, g, n, l)."""
    if M.dim() == 2:
        return M[None]
    if M.dim() == 3:
        return M[:, None, :, t]
    return M[..., t].repeat_interleave(channels // M.shape[1], dim=1)
