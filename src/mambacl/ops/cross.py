"""The scan of a map in four directions, each with its own parameters: by rows, by columns, and both backwards."""

import torch
from torch import Tensor

from mambacl.ops.precision import at_least_float32
from mambacl.ops.scan import chosen_backend, scan_tokens
from mambacl.ops.scan_operator import differentiable_scan

DIRECTIONS = 4


def cross_scan(maps: Tensor) -> Tensor:
    """Turns one map per direction, (b, h, w, 4, f), into tokens in the order of each direction, (b, l, 4, f)."""
    rows, columns = maps[..., 0::2, :], maps[..., 1::2, :].transpose(1, 2)
    ahead, back = torch.stack((rows.flatten(1, 2), columns.flatten(1, 2)), dim=3).unbind(2)
    return torch.cat((ahead, back.flip(1)), dim=2)


def cross_merge(tokens: Tensor, height: int, width: int) -> Tensor:
    """Puts the tokens (b, l, 4, f) back in their places and sums over the directions: (b, h, w, f)."""
    rows, columns = (tokens[:, :, :2] + tokens[:, :, 2:].flip(1)).unbind(2)
    return rows.unflatten(1, (height, width)) + columns.unflatten(1, (width, height)).transpose(1, 2)


def scan_map(
    u: Tensor, delta: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, bias: Tensor, backend: str = "auto"
) -> Tensor:
    """The sum of the four scans of u (b, h, w, d), with dt = softplus(delta + bias), in float32 or better.

    delta (b, h, w, 4, d); A_log (4 d, n), the logarithm of -A; B, C (b, h, w, 4, n); D, bias (4 d,). The Triton kernel
    reads each direction in place; the other backends copy the tokens into the four orders and back.
    """
    height, width = u.shape[1:3]
    if chosen_backend(u, A_log, backend, torch.promote_types(torch.float32, u.dtype)) == "triton":
        u, delta, B, C = (x.flatten(1, 2) for x in (u, delta.flatten(3), B, C))
        y, _, _, _ = differentiable_scan(
            *(u, delta, A_log.float(), B, C, D, None, bias, None),
            *(True, True, "cross", height, torch.float32, "triton"),
        )
        return y.unflatten(2, (DIRECTIONS, -1)).sum(2).unflatten(1, (height, width))
    x = at_least_float32(u)
    tokens = cross_scan(x.unsqueeze(3).expand(-1, -1, -1, DIRECTIONS, -1)).flatten(2)
    delta, B, C = cross_scan(delta).flatten(2), cross_scan(B), cross_scan(C)
    y, _ = scan_tokens(tokens, delta, A_log, B, C, backend, bias=bias, log_A=True, softplus=True)
    y = cross_merge(y.unflatten(2, (DIRECTIONS, -1)), height, width)
    # Every direction adds its own D * x; with the tokens back in place, x is the same for all of them.
    return torch.addcmul(y, at_least_float32(D).unflatten(0, (DIRECTIONS, -1)).sum(0).to(y.dtype), x)
