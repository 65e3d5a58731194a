"""The Vision Transformer, made of timm's own modules: the backbone of the prompt-based methods in the paper's tables.

Tensor names and shapes are timm's. timm is an extra, imported when a model is built. The feature is the class token
after the last norm.

The public weights are three different things, which papers often do not tell apart. Each has its tag:
`augreg_in21k` (ImageNet-21k), `augreg_in21k_ft_in1k` (the same, fine-tuned on ImageNet-1k) and `orig_in21k` (the first
release, of ViT-B only). All of them take pixels from -1 to 1, which `mean` and `std` of the configuration say.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mambacl.backbones.layers import (
    Backbone,
    check_floating,
    check_positive,
    feature_info,
    initialize_linear,
    run_blocks,
)
from mambacl.backbones.registry import MODELS, ModelEntry, PublicWeights, packaged
from mambacl.errors import UserError

HALF = (0.5, 0.5, 0.5)
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@dataclass(frozen=True)
class ViTConfig:
    """A Vision Transformer, with timm's names. `mean` and `std`: of the pixels that its weights were trained on."""

    img_size: int = 224
    patch_size: int = 16
    embed_dim: int = 768
    depth: int = 12
    num_heads: int = 12
    mlp_ratio: float = 4.0
    qkv_bias: bool = True
    num_classes: int = 1000
    drop_path_rate: float = 0.0
    mean: tuple[float, ...] = HALF
    std: tuple[float, ...] = HALF

    def __post_init__(self) -> None:
        check_positive(self, "img_size", "patch_size", "embed_dim", "depth", "num_heads")
        if self.num_classes < 0:
            raise UserError(f"num_classes must not be negative, got {self.num_classes}.")
        if self.embed_dim % self.num_heads:
            raise UserError(
                f"embed_dim ({self.embed_dim}) must be a multiple of num_heads ({self.num_heads}): choose another."
            )
        if self.mlp_ratio <= 0:
            raise UserError(f"mlp_ratio must be positive, got {self.mlp_ratio}.")
        if not 0.0 <= self.drop_path_rate < 1.0:
            raise UserError(f"drop_path_rate must be in [0, 1), got {self.drop_path_rate}.")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise UserError("mean and std need three values each, one per colour, and std positive ones.")
        self.grid(self.img_size, self.img_size)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches in an image."""
        patch = self.patch_size
        if not height or not width or height % patch or width % patch:
            raise UserError(f"Images of {height} x {width} pixels do not divide into patches of {patch}; resize them.")
        return height // patch, width // patch


def timm_module() -> Any:
    """timm's module with the Vision Transformer."""
    try:
        import timm.models.vision_transformer as module
    except ImportError:
        raise UserError("The vit backbones are timm's, which is not installed: pip install 'mambacl[vit]'.") from None
    return module


class ViT(Backbone):
    """A Vision Transformer with a head, or without one (`num_classes` = 0).

    Images can have any size that divides into patches, also rectangles. For a size other than `img_size`, each forward
    interpolates the position embedding to the images' grid. Loading a file for another size interpolates it once.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config.embed_dim, config.img_size, 0.9)
        self.config = config
        self.default_cfg |= {"mean": tuple(config.mean), "std": tuple(config.std)}
        timms = timm_module().VisionTransformer(
            img_size=config.img_size,
            patch_size=config.patch_size,
            embed_dim=config.embed_dim,
            depth=config.depth,
            num_heads=config.num_heads,
            mlp_ratio=config.mlp_ratio,
            qkv_bias=config.qkv_bias,
            drop_path_rate=config.drop_path_rate,
            dynamic_img_size=True,
            num_classes=0,
        )
        self.grid_size = config.grid(config.img_size, config.img_size)
        self.cls_token, self.pos_embed, self.patch_embed = timms.cls_token, timms.pos_embed, timms.patch_embed
        self.blocks, self.norm = timms.blocks, timms.norm
        names = [f"blocks.{i}" for i in range(config.depth)]
        self.feature_info = feature_info(names, [config.embed_dim] * len(names), [config.patch_size] * len(names))
        self.num_prefix_tokens = 1
        self.reset_classifier(config.num_classes)

    def replace_head(self) -> None:
        self.head: nn.Module = nn.Identity()
        if self.num_classes:
            like = self.pos_embed
            self.head = nn.Linear(self.num_features, self.num_classes, device=like.device, dtype=like.dtype)
            initialize_linear(self.head)

    def forward_features(self, images: Tensor) -> Tensor:
        """All tokens after the last norm, (b, 1 + l, c) for l patches; the class token is the first."""
        return self.final_norm(run_blocks(self.blocks, self.embed(images), self.grad_checkpointing))

    def embed(self, images: Tensor) -> Tensor:
        grid = self._checked(images)
        patches = self.patch_embed(images).flatten(1, 2)  # timm gives a map, (b, h, w, c)
        x = torch.cat((self.cls_token.expand(len(images), -1, -1).to(patches.dtype), patches), dim=1)
        return x + self.positions(grid)

    def positions(self, grid: tuple[int, int]) -> Tensor:
        """The position embedding for a grid of patches, (1, 1 + l, c)."""
        return self.pos_embed if grid == self.grid_size else resampled(self.pos_embed, self.grid_size, grid)

    def run_depth(self, index: int, x: Tensor) -> Tensor:
        return run_blocks([self.blocks[index]], x, self.grad_checkpointing)

    def class_index(self, length: int) -> int:
        return 0

    def final_norm(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def prefix_and_map(self, x: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :1], x[:, 1:].unflatten(1, self.config.grid(*images.shape[2:]))

    def forward_head(self, tokens: Tensor, pre_logits: bool = False) -> Tensor:
        pooled = tokens[:, 0]
        return pooled if pre_logits else self.head(pooled)

    def adapt_state(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """A file's tensors for this model, with positions interpolated if the file has another grid."""
        stored = tensors.get("pos_embed")
        if stored is None or stored.dim() != 3 or stored.shape[1] == self.pos_embed.shape[1]:
            return tensors
        side = math.isqrt(stored.shape[1] - 1)
        if side < 1 or side * side != stored.shape[1] - 1:
            return tensors  # not a square: the loader reports that it does not fit
        return {**tensors, "pos_embed": resampled(stored, (side, side), self.grid_size)}

    def _checked(self, images: Tensor) -> tuple[int, int]:
        """The grid of patches of the images."""
        if images.dim() != 4 or images.shape[1] != 3:
            raise UserError(f"A ViT needs images (b, 3, height, width), got a tensor of shape {tuple(images.shape)}.")
        check_floating(images)
        return self.config.grid(images.shape[2], images.shape[3])


def resampled(positions: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Interpolates position embeddings (1, 1 + l, c) as timm does; the class token keeps its own."""
    from timm.layers import resample_abs_pos_embed

    return resample_abs_pos_embed(positions, new_size=list(new), old_size=list(old), num_prefix_tokens=1)


def _timms(model: str, classes: int, data: str, top1: float | None = None) -> PublicWeights:
    """timm's weights, by its full name: model and tag."""
    url = f"https://huggingface.co/timm/{model}/resolve/main/model.safetensors"
    saved = f"{model}.safetensors"
    return PublicWeights(
        url=url, saved_as=saved, licence="Apache-2.0", data=data, top1=top1, full_name=model, classes=classes
    )


def _tags(model: str, top1: float, *others: tuple[str, int, str]) -> dict[str, PublicWeights]:
    kinds = (("augreg_in21k", 21843, "ImageNet-21k"), *others)
    own = {tag: _timms(f"{model}.{tag}", classes, data) for tag, classes, data in kinds}
    tuned = "augreg_in21k_ft_in1k"
    return {**own, tuned: _timms(f"{model}.{tuned}", 1000, "ImageNet-1k", top1)}


def _register(name: str, config: dict[str, Any], weights: Mapping[str, PublicWeights] | None = None) -> None:
    MODELS.add(name, ModelEntry(name, ViT, ViTConfig, config, weights or {}))


# A depth of 11 keeps it below 5 million parameters, like the other nano models.
NANO = {"img_size": 32, "patch_size": 4, "embed_dim": 192, "depth": 11, "num_heads": 3, "num_classes": 200, **IMAGENET}

_register("vit", {})
_register("vit_nano", NANO, {"tin32-59ep": packaged("vit_nano_tin32_59ep.safetensors", 33.6)})
_register("vit_tiny", {"embed_dim": 192, "num_heads": 3}, _tags("vit_tiny_patch16_224", 75.5))
_register("vit_small", {"embed_dim": 384, "num_heads": 6}, _tags("vit_small_patch16_224", 81.4))
_register("vit_base", {}, _tags("vit_base_patch16_224", 84.5, ("orig_in21k", 0, "ImageNet-21k")))
