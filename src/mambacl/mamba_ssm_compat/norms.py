"""mamba-ssm's layer norm and RMS norm, which add the residual first."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.errors import UserError
from mambacl.ops import rms_norm

Normed = Tensor | tuple[Tensor, ...]


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
) -> Normed:
    """The norm of dropout(x rowscale) + dropout(x1) + residual; with `prenorm` also the sum, as the next residual.

    Computes in float32 or better. The norm has x's dtype, the sum the residual's, or float32 with `residual_in_fp32`.
    With weight1, returns two norms of the same sum.
    """
    if return_dropout_mask:
        raise UserError("mambacl's layer_norm_fn returns no dropout mask: omit return_dropout_mask.")
    if x1 is not None and rowscale is not None:
        raise UserError("layer_norm_fn takes rowscale or x1, not both: omit one of them.")
    wide = torch.promote_types(torch.float32, x.dtype)
    kept = x.dtype if residual is None else residual.dtype
    kept = torch.promote_types(kept, torch.float32) if residual is None and residual_in_fp32 else kept
    total = x.to(wide) if rowscale is None else x.to(wide) * rowscale[..., None].to(wide)
    total = F.dropout(total, dropout_p)
    total = total if x1 is None else total + F.dropout(x1.to(wide), dropout_p)
    total = total if residual is None else total + residual
    found = [_norm(total, weight, bias, eps, is_rms_norm).to(x.dtype)]
    if weight1 is not None:
        found.append(_norm(total, weight1, bias1, eps, is_rms_norm).to(x.dtype))
    if prenorm:
        found.append(total.to(kept))
    return found[0] if len(found) == 1 else tuple(found)


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Normed:
    """`layer_norm_fn` with the root mean square in place of mean and variance."""
    return layer_norm_fn(x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm,
                         residual_in_fp32, True, return_dropout_mask)  # fmt: skip


class RMSNorm(nn.Module):
    bias: None  # registered as in mamba-ssm, because callers pass it on

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.drop = nn.Dropout(dropout_p) if dropout_p > 0 else None
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Normed:
        dropout = self.drop.p if self.drop is not None and self.training else 0.0
        return rms_norm_fn(x, self.weight, self.bias, residual, eps=self.eps, dropout_p=dropout, prenorm=prenorm,
                           residual_in_fp32=residual_in_fp32)  # fmt: skip


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, is_rms_norm: bool) -> Tensor:
    if is_rms_norm:
        y = rms_norm(x, weight.to(x.dtype), eps)
        return y if bias is None else y + bias
    return F.layer_norm(x, weight.shape, weight.to(x.dtype), None if bias is None else bias.to(x.dtype), eps)
