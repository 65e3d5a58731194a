"""Layers and functions that several backbones share."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mambacl import ops
from mambacl.errors import UserError

T = TypeVar("T")


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
        x = recomputed(block, x, block) if recompute else block(x)
    return x


def recomputed(run: Callable[[Tensor], Tensor], x: Tensor, block: nn.Module) -> Tensor:
    """`run(x)`, which the backward computes again. The state of random numbers is kept only while the block trains,
    because a CUDA graph cannot read it: in evaluation mode there are none."""
    return checkpoint(run, x, use_reentrant=False, preserve_rng_state=block.training)


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


def check_floating(images: Tensor) -> None:
    if not images.is_floating_point():
        kind = str(images.dtype).removeprefix("torch.")
        raise UserError(
            f"The model needs images of floating-point numbers, got {kind}: divide bytes by 255, subtract the mean and "
            'divide by the standard deviation in default_cfg ("mean", "std").'
        )


def chosen_indices(count: int, indices: int | Sequence[int] | None, option: str = "indices") -> list[int]:
    """Which of `count` depths these are, as in timm, in ascending order: all (None), the last n (an int), or a list
    that counts from 0, or from the end if negative. `option`: the name for error messages."""
    if isinstance(indices, int):
        if not 1 <= indices <= count:
            raise UserError(f"{option} = {indices} must be between 1 and {count}, the number of depths.")
        return list(range(count - indices, count))
    chosen = list(range(count) if indices is None else indices)
    if not chosen or not all(isinstance(index, int) and -count <= index < count for index in chosen):
        raise UserError(f"{option} = {chosen} does not fit a model of {count} depths: list some of 0 to {count - 1}.")
    return sorted({index % count for index in chosen})


class Backbone(nn.Module):
    """What all backbones have of timm's interface. A subclass adds `forward_features` and `forward_head`.

    For features of several depths it also sets `feature_info` and adds `embed`, `run_depth`, `final_norm` and
    `prefix_and_map`. A depth is a block, or a stage if stages differ in width.
    """

    num_classes: int
    head: nn.Module
    hierarchical: ClassVar[bool] = False
    """whether depths are stages; the last norm fits only the last of them"""
    num_prefix_tokens: int = 0

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
        self.feature_info: list[dict[str, Any]] = []  # of each depth, with timm's keys
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

    def embed(self, images: Tensor) -> Tensor:
        """The input of the first block."""
        raise NotImplementedError

    def run_depth(self, index: int, x: Tensor) -> Tensor:
        """The output of a depth, given that of the depth before, or of `embed`."""
        raise NotImplementedError

    def final_norm(self, x: Tensor) -> Tensor:
        """What `forward_features` returns, given the output of the last depth."""
        raise NotImplementedError

    def prefix_and_map(self, x: Tensor, images: Tensor) -> tuple[Tensor | None, Tensor]:
        """Splits the output of a depth into the class token (b, 1, c), if the model has one, and a map (b, h, w, c)."""
        raise NotImplementedError

    def class_index(self, length: int) -> int | None:
        """Where the class token is among `length` tokens; None if the model has none."""
        return None

    def run_depths(
        self, images: Tensor, indices: Sequence[int], take: Callable[[int, Tensor], T], stop_early: bool = False
    ) -> tuple[Tensor, list[T]]:
        """Runs one depth after the other. Returns the last output and what `take` makes of the outputs at `indices`,
        so that a reader need not keep all tokens. With `stop_early`, deeper depths are not run."""
        x = self.embed(images)
        taken = []
        for index in range(max(indices) + 1 if stop_early else len(self.feature_info)):
            x = self.run_depth(index, x)
            if index in indices:
                taken.append(take(index, x))
        return x, taken

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        *,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """The outputs of several depths, as in timm: a list of them, or with the final features in front of it.

        `indices`: the last n, a list of indices from 0 (from the end if negative), or all; always in ascending order.
        `return_prefix_tokens`: each is a pair, map and class token, if the model has a class token. `norm`: also
        applies the last norm, in hierarchical models to the last stage only. `stop_early`: does not run what is deeper.
        `output_fmt`: (b, c, h, w), or "NLC" for (b, l, c) in row order.
        """
        if not self.feature_info:
            raise UserError(f"{type(self).__name__} cannot show its depths: it sets no feature_info.")
        if output_fmt not in ("NCHW", "NLC"):
            raise UserError(f"output_fmt must be NCHW or NLC, got {output_fmt!r}.")
        count = len(self.feature_info)
        chosen = chosen_indices(count, indices)

        def normed(index: int, output: Tensor) -> Tensor:
            return output if self.hierarchical and index < count - 1 else self.final_norm(output)

        def take(index: int, output: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            prefix, image = self.prefix_and_map(normed(index, output) if norm else output, x)
            image = image.permute(0, 3, 1, 2).contiguous() if output_fmt == "NCHW" else image.flatten(1, 2)
            return image if prefix is None or not return_prefix_tokens else (image, prefix)

        last, intermediates = self.run_depths(x, chosen, take, stop_early)
        if intermediates_only:
            return intermediates
        return normed(chosen[-1] if stop_early else count - 1, last), intermediates


def feature_info(modules: Sequence[str], widths: Sequence[int], reductions: Sequence[int]) -> list[dict[str, Any]]:
    """timm's description of depths: the last block of each, its channels, and how many pixels apart its tokens are."""
    rows = zip(modules, widths, reductions, strict=True)
    return [{"module": module, "num_chs": width, "reduction": reduction} for module, width, reduction in rows]


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

    def in_rows(self, tokens: Tensor, height: int, width: int) -> Tensor:
        """The map (b, h, w, c) of tokens (b, l, c)."""
        r = self.regions
        if r == 1:
            return tokens.unflatten(1, (height, width))
        x = tokens.unflatten(1, (r, r, height // r, width // r))
        return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)
