"""Layers and functions that several backbones share."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mambacl import ops
from mambacl.errors import UserError


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32 or better. `before_linear`: a linear layer follows, so under autocast
    the output has the dtype that the layer would cast it to."""

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
    """Drops the branch for random images, and scales it for the others so that the mean stays the same."""
    if rate == 0.0 or not training:
        return x
    keep = x.new_empty(x.shape[0], *[1] * (x.dim() - 1)).bernoulli_(1 - rate)
    return x * keep / (1 - rate)


def run_blocks(blocks: Iterable[nn.Module], x: Tensor, grad_checkpointing: bool) -> Tensor:
    """Runs blocks in turn. With `grad_checkpointing` the backward recomputes each block, which saves memory."""
    recompute = grad_checkpointing and torch.is_grad_enabled()
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
    return x


def refuse_other_pooling(global_pool: str | None) -> None:
    """timm also passes a pooling to `reset_classifier`; the backbones here have only one each."""
    if global_pool is not None:
        raise UserError(f"This model has only one pooling: omit global_pool, got {global_pool!r}.")


class PatchEmbed(nn.Module):
    """Turns an image into tokens with a convolution whose stride equals its kernel size.

    Tokens are in row order. With `regions` = r the image is cut into r x r regions; their tokens follow one another,
    each region in row order.
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
