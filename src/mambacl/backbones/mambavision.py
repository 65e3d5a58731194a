"""MambaVision: two stages of convolutions, then two of windows, with Mamba mixers before attention.

Written from a description of the model; tensor names and shapes are those of the public checkpoints. The public code
(NVIDIA Source Code License-NC) and the public weights (CC-BY-NC-SA-4.0) are for non-commercial use only, and so are
models trained from those weights. The mixer's equations are numbered in `MambaVisionMixer.forward`.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl import ops
from mambacl.backbones.layers import (
    Backbone,
    check_floating,
    check_positive,
    drop_path,
    drop_path_rates,
    feature_info,
    initialize_linear,
    mlp,
    run_blocks,
)
from mambacl.backbones.registry import MODELS, ModelEntry, PublicWeights, packaged
from mambacl.errors import UserError
from mambacl.log import logger
from mambacl.ops.precision import at_least_float32, full_precision

LICENCE = "CC-BY-NC-SA-4.0, non-commercial"
NVIDIA = ("model.", "encoder.")  # how names begin in its files other than those of the registry
PerStage = tuple[int, ...] | list[int]


@dataclass(frozen=True)
class MambaVisionConfig:
    """A MambaVision model; options per stage have four entries."""

    dim: int = 80  # channels of the first stage; each later stage has twice as many
    in_dim: int = 32  # channels between the two convolutions of the stem
    depths: PerStage = (1, 3, 8, 4)
    window_size: PerStage = (8, 8, 14, 7)  # the first two stages ignore theirs
    num_heads: PerStage = (2, 4, 8, 16)  # the first two stages ignore theirs
    mlp_ratio: float = 4.0
    d_state: int = 8
    d_conv: int = 3
    expand: int = 1
    layer_scale: float = 0.0  # initial value of gamma_1 and gamma_2; 0 for none
    layer_scale_conv: float | None = None  # initial gamma of the convolution blocks; None for none
    drop_path_rate: float = 0.0
    num_classes: int = 1000
    resolution: int = 224  # for default_cfg; the model takes images of any size
    crop_pct: float = 1.0
    stem_stride: int = 4  # 4 in the public models; 2 or 1 for small images

    def __post_init__(self) -> None:
        check_positive(self, "dim", "in_dim", "d_state", "d_conv", "expand", "resolution")
        for name in ("depths", "window_size", "num_heads"):
            given = getattr(self, name)
            valid = isinstance(given, (tuple, list)) and all(type(n) is int and n > 0 for n in given)
            if not valid or len(given) != 4:
                raise UserError(f"{name} must be four positive whole numbers, one per stage, got {given!r}.")
            object.__setattr__(self, name, tuple(given))
        for stage in (2, 3):
            width, heads = self.dim * 2**stage, self.num_heads[stage]
            if width % heads:
                raise UserError(
                    f"The {width} channels of stage {stage} (counted from 0) do not divide into {heads} attention "
                    "heads: change dim or num_heads."
                )
        if self.num_classes < 0:
            raise UserError(f"num_classes must not be negative, got {self.num_classes}.")
        if not 0 <= self.drop_path_rate < 1:
            raise UserError(f"drop_path_rate must be at least 0 and below 1, got {self.drop_path_rate}.")
        if int(self.mlp_ratio * self.dim) < 1:
            raise UserError(f"mlp_ratio must be positive, got {self.mlp_ratio}.")
        if self.layer_scale_conv is not None and type(self.layer_scale_conv) not in (int, float):
            raise UserError(f"layer_scale_conv must be a number, or None, got {self.layer_scale_conv!r}.")
        if self.stem_stride not in (1, 2, 4):
            raise UserError(f"stem_stride must be 1, 2 or 4, got {self.stem_stride}.")


class MambaVisionMixer(nn.Module):
    """The selective SSM of one block: half of the channels are scanned, the other half bypass the scan."""

    def __init__(self, width: int, config: MambaVisionConfig) -> None:
        super().__init__()
        inner = config.expand * width // 2  # h; width is a multiple of 4
        self.state_size = config.d_state
        self.time_step_rank = math.ceil(width / 16)
        self.A_log = nn.Parameter(torch.arange(1, config.d_state + 1).float().log().repeat(inner, 1))  # (h, n)
        self.D = nn.Parameter(torch.ones(inner))
        self.in_proj = nn.Linear(width, 2 * inner, bias=False)
        self.x_proj = nn.Linear(inner, self.time_step_rank + 2 * config.d_state, bias=False)  # rows: delta, B, C
        self.dt_proj = nn.Linear(self.time_step_rank, inner)
        self.out_proj = nn.Linear(2 * inner, width, bias=False)
        self.conv1d_x = nn.Conv1d(inner, inner, config.d_conv, groups=inner, padding="same", bias=False)
        self.conv1d_z = nn.Conv1d(inner, inner, config.d_conv, groups=inner, padding="same", bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, z = ops.split_linear(self.in_proj, tokens)  # 1. (b, l, h) each
        x = ops.causal_conv_silu(x, self.conv1d_x.weight.squeeze(1), same=True)  # 2.
        z = ops.causal_conv_silu(z, self.conv1d_z.weight.squeeze(1), same=True)
        projected = self.x_proj(x)  # 3. (b, l, rank + 2 n)
        dt, B, C = projected.split([self.time_step_rank, self.state_size, self.state_size], dim=-1)
        with full_precision(x):
            # The public weights were trained with the bias added twice.
            delta = at_least_float32(self.dt_proj(dt.to(self.dt_proj.weight.dtype)) + self.dt_proj.bias)  # 4.
            y, _ = ops.scan_tokens(
                x, delta, self.A_log, B.unsqueeze(2), C.unsqueeze(2), log_A=True, softplus=True
            )  # 5.
            y = torch.addcmul(y, at_least_float32(self.D), at_least_float32(x))
            y = torch.cat((y, at_least_float32(z)), dim=-1)  # 6. (b, l, 2 h); no gate
        return self.out_proj(y.to(tokens.dtype))  # 7.


class Attention(nn.Module):
    """Multi-head attention within a window, without position embeddings."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        qkv = self.qkv(tokens).unflatten(-1, (3, self.heads, -1))  # (b, l, 3, heads, c / heads)
        q, k, v = qkv.transpose(1, 3).unbind(2)  # (b, heads, l, c / heads) each
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class WindowBlock(nn.Module):
    """A mixer or attention, then an MLP, on the tokens of windows (windows, l, c); drop path drops entire windows."""

    def __init__(self, width: int, mixer: nn.Module, config: MambaVisionConfig, drop_path_rate: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.mixer = mixer
        self.norm2 = nn.LayerNorm(width)
        self.mlp = mlp(width, int(width * config.mlp_ratio))
        scale = torch.full((width,), float(config.layer_scale))
        self.gamma_1 = nn.Parameter(scale) if config.layer_scale else None
        self.gamma_2 = nn.Parameter(scale.clone()) if config.layer_scale else None
        self.drop_path_rate = drop_path_rate

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._branch(self.mixer(self.norm1(x)), self.gamma_1)
        return x + self._branch(self.mlp(self.norm2(x)), self.gamma_2)

    def _branch(self, x: Tensor, gamma: Tensor | None) -> Tensor:
        return drop_path(x if gamma is None else gamma * x, self.drop_path_rate, self.training)


class ConvBlock(nn.Module):
    def __init__(self, width: int, layer_scale: float | None, drop_path_rate: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(width)
        self.gamma = None if layer_scale is None else nn.Parameter(torch.full((width,), float(layer_scale)))
        self.drop_path_rate = drop_path_rate

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.norm1(self.conv1(x)), approximate="tanh")
        y = self.norm2(self.conv2(y))
        y = y if self.gamma is None else y * self.gamma[:, None, None]
        return x + drop_path(y, self.drop_path_rate, self.training)


def _stem(config: MambaVisionConfig) -> nn.Sequential:
    first, second = (2 if config.stem_stride > 1 else 1), (2 if config.stem_stride > 2 else 1)
    layers = nn.Sequential(
        nn.Conv2d(3, config.in_dim, 3, first, 1, bias=False),
        nn.BatchNorm2d(config.in_dim, eps=1e-4),
        nn.ReLU(),
        nn.Conv2d(config.in_dim, config.dim, 3, second, 1, bias=False),
        nn.BatchNorm2d(config.dim, eps=1e-4),
        nn.ReLU(),
    )
    return nn.Sequential(OrderedDict(conv_down=layers))


def _downsample(width: int) -> nn.Sequential:
    convolution = nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False)
    return nn.Sequential(OrderedDict(reduction=nn.Sequential(convolution)))


class Level(nn.Module):
    """A stage and its downsampling: turns the map (b, c, h, w) into (b, 2 c, h / 2, w / 2), except in the last
    stage."""

    def __init__(self, stage: int, config: MambaVisionConfig, drop_path_rates: list[float]) -> None:
        super().__init__()
        width, depth = config.dim * 2**stage, config.depths[stage]
        self.window = config.window_size[stage] if stage >= 2 else 0
        self.grad_checkpointing = False
        blocks: list[nn.Module] = []
        for i, rate in enumerate(drop_path_rates):
            if not self.window:
                blocks.append(ConvBlock(width, config.layer_scale_conv, rate))
                continue
            scans = i < (depth + 1) // 2
            mixer = MambaVisionMixer(width, config) if scans else Attention(width, config.num_heads[stage])
            blocks.append(WindowBlock(width, mixer, config, rate))
        self.blocks = nn.ModuleList(blocks)
        self.downsample = _downsample(width) if stage < 3 else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(x)
        return x if self.downsample is None else self.downsample(x)

    def run(self, x: Tensor) -> Tensor:
        """The stage without its downsampling."""
        height, width = x.shape[-2:]
        if self.window:
            x = F.pad(x, (0, -width % self.window, 0, -height % self.window))  # at the right and the bottom
            padded = x.shape
            x = to_windows(x, self.window)
        # Recomputing a block with batch norms would count its batch twice in their running statistics.
        x = run_blocks(self.blocks, x, self.grad_checkpointing and (bool(self.window) or not self.training))
        if self.window:
            x = from_windows(x, self.window, padded)[:, :, :height, :width]
        return x


def to_windows(x: Tensor, window: int) -> Tensor:
    """Cuts a map (b, c, h, w) into windows (b * windows, window * window, c), windows and tokens in row order."""
    x = x.unflatten(3, (-1, window)).unflatten(2, (-1, window))  # (b, c, rows, window, columns, window)
    return x.permute(0, 2, 4, 3, 5, 1).flatten(3, 4).flatten(0, 2).contiguous()  # channels last in memory


def from_windows(x: Tensor, window: int, shape: torch.Size) -> Tensor:
    """The inverse of `to_windows`: the map of the given shape."""
    batch, channels, height, width = shape
    x = x.view(batch, height // window, width // window, window, window, channels)
    return x.permute(0, 5, 1, 3, 2, 4).reshape(shape)


class MambaVision(Backbone):
    """MambaVision with a head, or without one (`num_classes` = 0)."""

    hierarchical = True

    def __init__(self, config: MambaVisionConfig) -> None:
        super().__init__(8 * config.dim, config.resolution, config.crop_pct)
        self.config = config
        self.patch_embed = _stem(config)
        rates = iter(drop_path_rates(config.drop_path_rate, sum(config.depths)))
        levels = [Level(i, config, [next(rates) for _ in range(depth)]) for i, depth in enumerate(config.depths)]
        self.levels = nn.ModuleList(levels)
        names = [f"levels.{i}.blocks.{depth - 1}" for i, depth in enumerate(config.depths)]
        widths, strides = [config.dim << i for i in range(4)], [config.stem_stride << i for i in range(4)]
        self.feature_info = feature_info(names, widths, strides)
        self.norm = nn.BatchNorm2d(self.num_features)
        self.reset_classifier(config.num_classes)
        self.apply(initialize_linear)  # even dt_proj, unlike Mamba; convolutions keep PyTorch's default

    def forward_features(self, images: Tensor) -> Tensor:
        """The last stage's map after the norm, (b, c, h, w)."""
        x = self.embed(images)
        for level in self.levels:
            x = level(x)
        return self.norm(x)

    def embed(self, images: Tensor) -> Tensor:
        if images.dim() != 4 or images.shape[1] != 3 or 0 in images.shape:
            raise UserError(f"MambaVision needs images of shape (b, 3, height, width), got {tuple(images.shape)}.")
        check_floating(images)
        return self.patch_embed(images)

    def run_depth(self, index: int, x: Tensor) -> Tensor:
        """A stage ends before its downsampling, as in timm; the next one starts with it."""
        levels: Any = self.levels
        return levels[index].run(levels[index - 1].downsample(x) if index else x)

    def final_norm(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def prefix_and_map(self, x: Tensor, images: Tensor) -> tuple[None, Tensor]:
        return None, x.permute(0, 2, 3, 1)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        pooled = x.mean((2, 3))
        return pooled if pre_logits else self.head(pooled)

    def adapt_state(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Translates a public file's tensors to this model's names. From a pre-training file it takes the encoder;
        other tensors keep their names, to be reported as unexpected, or are dropped if this model has the same name."""
        tensors = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
        if any(name.startswith(NVIDIA) for name in tensors):
            logger.info("The file has the names of NVIDIA's weights. Their licence, and that of models trained from "
                        "them: %s.", LICENCE)  # fmt: skip
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        encoder = {name[8:]: tensor for name, tensor in tensors.items() if name.startswith("encoder.")}
        if not encoder:
            return tensors
        own = self.state_dict()
        rest = {name: tensor for name, tensor in tensors.items() if not name.startswith("encoder.") and name not in own}
        return {**rest, **encoder}


def _register(size: str, config: dict[str, Any], weights: Mapping[str, PublicWeights] | None = None) -> None:
    name = f"mambavision_{size}" if size else "mambavision"
    MODELS.add(name, ModelEntry(name, MambaVision, MambaVisionConfig, config, weights or {}))


def _public(repository: str, file: str, top1: float) -> dict[str, PublicWeights]:
    url = f"https://huggingface.co/nvidia/MambaVision-{repository}/resolve/main/mambavision_{file}.pth.tar"
    return {"in1k": PublicWeights(url=url, licence=LICENCE, top1=top1)}


_SMALL = {"dim": 96, "in_dim": 64, "depths": (3, 3, 7, 5)}
_BASE = {"dim": 128, "in_dim": 64, "depths": (3, 3, 10, 5), "layer_scale": 1e-5}
_LARGE = {**_BASE, "dim": 196, "num_heads": (4, 8, 16, 32)}
_NANO = {"dim": 16, "in_dim": 8, "depths": (1, 1, 3, 2), "window_size": (8, 8, 8, 4), "num_heads": (2, 2, 4, 8)}
_MINI = {**_NANO, "dim": 32, "in_dim": 32, "depths": (1, 2, 6, 3)}

_register("", {})
_register("nano", {**_NANO, "mlp_ratio": 2.0, "num_classes": 200, "resolution": 32, "stem_stride": 1})
_register(
    "mini",
    {**_MINI, "num_classes": 200, "resolution": 32, "stem_stride": 1},
    {"tin32-38ep": packaged("mambavision_mini_tin32_38ep.safetensors", 44.2)},
)
_register("tiny", {}, _public("T-1K", "tiny_1k", 82.3))
_register("tiny2", {"depths": (1, 3, 11, 4), "crop_pct": 0.98}, _public("T2-1K", "tiny2_1k", 82.7))
_register("small", {**_SMALL, "crop_pct": 0.93}, _public("S-1K", "small_1k", 83.3))
_register("base", _BASE, _public("B-1K", "base_1k", 84.2))
_register("base_21k", _BASE, _public("B-21K", "base_21k", 84.9))
_register("large", _LARGE, _public("L-1K", "large_1k", 85.0))
_register("large_21k", _LARGE, _public("L-21K", "large_21k", 86.1))
_register("large2", {**_LARGE, "depths": (3, 3, 12, 5)}, _public("L2-1K", "large2_1k", 85.3))
