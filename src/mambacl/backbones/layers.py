"""Small pieces that several backbones share."""

import torch
from torch import Tensor, nn

from mambacl import ops
from mambacl.errors import UserError


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the norm taken in float32 or better. `before_linear`: a linear layer follows, so that under
    autocast the output may have the type that it would be cast to."""

    def __init__(self, features: int, eps: float, before_linear: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.eps, self.before_linear = eps, before_linear

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        if self.before_linear and device != "meta" and torch.is_autocast_enabled(device):
            return ops.rms_norm(x, self.weight, self.eps, torch.get_autocast_dtype(device))
        return ops.rms_norm(x, self.weight, self.eps)


def drop_path(x: Tensor, rate: float, training: bool) -> Tensor:
    """Leaves out the whole branch of random images, and scales the others so that the mean stays."""
    if rate == 0.0 or not training:
        return x
    keep = x.new_empty(x.shape[0], *[1] * (x.dim() - 1)).bernoulli_(1 - rate)
    return x * keep / (1 - rate)


def refuse_other_pooling(global_pool: str | None) -> None:
    """timm gives `reset_classifier` a pooling too; no backbone here has a choice of it."""
    if global_pool is not None:
        raise UserError(f"This model pools in one way only: leave global_pool out, got {global_pool!r}.")


class PatchEmbed(nn.Module):
    """Image to tokens by a convolution whose stride is its kernel.

    Tokens run row by row. With `regions` = r the image is cut into r x r regions that follow one another, each row by
    row.
    """

    def __init__(self, patch_size: int, embed_dim: int, regions: int = 1) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, embed_dim, kernel_size=patch_size, stride=patch_size)
        self.regions = regions

    def forward(self, images: Tensor) -> Tensor:
        x = self.proj(images)  # (b, c, h, w)
        if self.regions > 1:
            r = self.regions
            x = x.unflatten(3, (r, -1)).unflatten(2, (r, -1))  # (b, c, r, h / r, r, w / r)
            x = x.permute(0, 1, 2, 4, 3, 5)
        return x.flatten(2).transpose(1, 2)  # (b, l, c)
