"""Layers and functions that several backbones share."""

from collections import OrderedDict
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


def drop_path_rates(last: float, depth: int) -> list[float]:
    """One rate per block, rising linearly from 0."""
    return [last * i / max(1, depth - 1) for i in range(depth)]


def mlp(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(OrderedDict(fc1=nn.Linear(width, hidden), act=nn.GELU(), fc2=nn.Linear(hidden, width)))


def initialize_linear(module: nn.Module) -> None:
    """Does nothing to other modules."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def check_positive(config: object, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise UserError(f"{name} must be positive, got {getattr(config, name)}.")


class Backbone(nn.Module):
    """What all backbones have of timm's interface. A subclass adds `forward_features` and `forward_head`."""

    num_classes: int
    head: nn.Module

    def __init__(
        self,
        num_features: int,
        size: int,
        crop_pct: float,
        classifier: str | tuple[str, ...] = "head",
        channels: int = 3,
    ) -> None:
        """`size`: of square images; `classifier`: names of the modules that belong to the classifier."""
        super().__init__()
        self.num_features = num_features
        self.grad_checkpointing = False
        self.default_cfg = {
            "input_size": (channels, size, size),
            "mean": (0.485, 0.456, 0.406),
            "std": (0.229, 0.224, 0.225),
            "crop_pct": crop_pct,
            "interpolation": "bicubic",
            "classifier": classifier,
        }

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the head by a new one for this many classes; 0 removes it."""
        if global_pool is not None:  # which timm also passes
            raise UserError(f"This model has only one pooling: omit global_pool, got {global_pool!r}.")
        self.num_classes = num_classes
        self.replace_head()

    def replace_head(self) -> None:
        """Sets the head for `num_classes`."""
        self.head = self.new_head()

    def new_head(self) -> nn.Module:
        like = next(self.parameters())
        head = nn.Linear(self.num_features, self.num_classes) if self.num_classes else nn.Identity()
        return head.apply(initialize_linear).to(like.device, like.dtype)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Saves memory: the backward recomputes each block instead of storing its activations."""
        for module in self.modules():
            if hasattr(module, "grad_checkpointing"):
                setattr(module, "grad_checkpointing", enable)  # noqa: B010

    def forward_features(self, images: Tensor) -> Tensor:
        raise NotImplementedError

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(images))


class PatchEmbed(nn.Module):
    """Turns an image into tokens with a convolution. Patches overlap if `stride` is below their size, the default.

    Tokens are in row order. With `regions` = r the image is cut into r x r regions; their tokens follow one another,
    each region in row order.
    """

    def __init__(self, patch_size: int, embed_dim: int, regions: int = 1, stride: int | None = None) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, embed_dim, kernel_size=patch_size, stride=stride or patch_size)
        self.regions = regions

    def forward(self, images: Tensor) -> Tensor:
        x = self.proj(images)  # (b, c, h, w)
        if self.regions > 1:
            r = self.regions
            x = x.unflatten(3, (r, -1)).unflatten(2, (r, -1))  # (b, c, r, h / r, r, w / r)
            x = x.permute(0, 1, 2, 4, 3, 5)
        return x.flatten(2).transpose(1, 2)  # (b, l, c)
