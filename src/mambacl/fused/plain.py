"""The plain PyTorch twin of each fused function: the same signature but for `backend`, the same numbers."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    reverse: bool = False,
    silu: bool = True,
    same: bool = False,
) -> Tensor:
    before, after = padding(weight.shape[1], reverse, same)
    with _full_precision(x):
        wide = _at_least_float32(x)
        # A 2-D convolution keeps channels last.
        image = F.pad(wide, (0, 0, before, after)).mT.unsqueeze(2)  # (b, d, 1, l + k - 1)
        taps = (weight.flip(1) if reverse else weight).to(wide.dtype)[:, None, None]  # (d, 1, 1, k)
        y = F.conv2d(image, taps, None if bias is None else bias.to(wide.dtype), groups=len(taps)).squeeze(2).mT
        return (F.silu(y) if silu else y).to(x.dtype)


def padding(taps: int, reverse: bool, same: bool) -> tuple[int, int]:
    """How many tokens before the present one and after it a convolution sees."""
    before = (taps - 1) // 2 if same else taps - 1
    return (taps - 1 - before, before) if reverse else (before, taps - 1 - before)


def gated_group_norm(
    y: Tensor, x: Tensor, D: Tensor, z: Tensor, group: int, eps: float, dtype: torch.dtype | None = None
) -> Tensor:
    with _full_precision(y):
        wide = torch.promote_types(_at_least_float32(y).dtype, torch.promote_types(x.dtype, z.dtype))
        n = y.to(wide)
        if group:
            n = _rms_normalize(n.unflatten(-1, (-1, group)), eps).flatten(-2)
        return (torch.addcmul(n, D.to(wide), x.to(wide)) * F.silu(z.to(wide))).to(dtype or y.dtype)


def skip_gate(y: Tensor, x: Tensor, D: Tensor, z: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return gated_group_norm(y, x, D, z, 0, 0.0, dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    with _full_precision(x):
        y = weight * _rms_normalize(_at_least_float32(x), eps).to(x.dtype)
        return y.to(dtype or y.dtype)


def rotate(M: Tensor, freq: Tensor, scale: float = 1.0) -> Tensor:
    with _full_precision(M):
        M = _at_least_float32(M)
        position = torch.arange(M.shape[1], device=M.device, dtype=M.dtype) / scale
        angle = (position[:, None] * freq).unsqueeze(1)  # (l, 1, n)
        even, odd = M[..., ::2], M[..., 1::2]
        return M * angle.cos() + torch.stack((-odd, even), dim=-1).flatten(-2) * angle.sin()


def _rms_normalize(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Autocast switched off where x lives; the meta device knows no autocast."""
    return nullcontext() if x.device.type == "meta" else torch.autocast(x.device.type, enabled=False)
