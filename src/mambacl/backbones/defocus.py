"""De-focus Mamba: a one-dimensional causal vision Mamba with a learnable band-pass (rotary B and C, decay A).

Tensor names and shapes are those of the public checkpoints. One block is x + mixer(norm(x)); the mixer's equations are
numbered in `Mixer.forward`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl import ops
from mambacl.backbones.layers import (
    Backbone,
    PatchEmbed,
    RMSNorm,
    check_floating,
    check_positive,
    drop_path,
    drop_path_rates,
    feature_info,
    initialize_linear,
    run_blocks,
)
from mambacl.backbones.registry import MODELS, ModelEntry, PublicWeights, packaged
from mambacl.errors import UserError
from mambacl.ops.precision import at_least_float32, full_precision


@dataclass(frozen=True)
class MixerConfig:
    """One selective SSM; the names are those of the public configuration files."""

    state_size: int = 16
    conv_kernel: int = 4
    intermediate_size: int = 1536
    time_step_rank: int = 48
    time_step_scale: float = 1.0
    time_step_init_scheme: str = "random"
    time_step_max: float = 0.1
    time_step_min: float = 0.001
    time_step_floor: float = 1e-4
    use_conv_bias: bool = True
    hidden_act: str = "silu"
    use_bias: bool = False
    residual_in_fp32: bool = True
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.1
    rescale_prenorm_residual: bool = False
    use_out_norm: bool = False
    group_norm_size: int = 64
    rope_scale_factor: float = 1.0
    delta_scale_factor: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self, "state_size", "conv_kernel", "intermediate_size", "time_step_rank")
        if self.hidden_act != "silu" or self.use_out_norm:
            raise UserError(
                "De-focus Mamba supports only hidden_act 'silu' and use_out_norm false, like the public code."
            )
        if self.group_norm_size and self.intermediate_size % self.group_norm_size:
            raise UserError(
                f"intermediate_size ({self.intermediate_size}) must be a multiple of group_norm_size "
                f"({self.group_norm_size}); choose another, or 0 for no group norm."
            )


@dataclass(frozen=True)
class DefocusConfig:
    """A De-focus Mamba model. `head_type` contains "IN1k" (linear) or "IN22k" (two layers), and "cls" or "avg"
    (pooling)."""

    img_size: int = 224
    patch_size: int = 16
    embed_dim: int = 768
    depth: int = 24
    num_classes: int = 1000
    head_type: str = "IN1k_cls"
    use_aux_loss: bool = True
    use_rope: bool = True
    use_pos_embed: bool = False
    patch_embed_change_res: bool = False
    drop_path_rate: float = 0.0
    mamba: MixerConfig = field(default_factory=MixerConfig)

    def __post_init__(self) -> None:
        check_positive(self, "img_size", "patch_size", "embed_dim", "depth")
        if self.num_classes < 0:
            raise UserError(f"num_classes must not be negative, got {self.num_classes}.")
        if self.use_rope and self.mamba.state_size % 2:
            raise UserError(
                f"Rotary B and C need an even state_size, got {self.mamba.state_size}; or set use_rope to false."
            )
        if not any(head in self.head_type for head in ("IN1k", "IN22k")):
            raise UserError(f"head_type '{self.head_type}' must contain IN1k (linear) or IN22k (two layers).")
        if ("cls" in self.head_type) == ("avg" in self.head_type):
            raise UserError(f"head_type '{self.head_type}' must contain one pooling, cls or avg.")
        if self.use_aux_loss and "avg" in self.head_type:
            raise UserError("The auxiliary head needs the class token: set use_aux_loss to false for average pooling.")


class Mixer(nn.Module):
    """The selective SSM of one block. Its linear layers are called as modules, so that hooks see their inputs."""

    def __init__(self, embed_dim: int, config: MixerConfig, use_rope: bool) -> None:
        super().__init__()
        width, states, rank = config.intermediate_size, config.state_size, config.time_step_rank
        self.config = config
        self.A_log = nn.Parameter(torch.arange(1, states + 1).float().log().repeat(width, 1))  # (d, n)
        self.D = nn.Parameter(torch.ones(width))
        if use_rope:
            decades = 100.0 ** (-torch.arange(1, states + 1) / states)
            self.freq = nn.Parameter((decades - 0.01) / 0.99)
        else:
            self.register_parameter("freq", None)
        self.conv1d = nn.Conv1d(width, width, config.conv_kernel, groups=width, bias=config.use_conv_bias)
        self.in_proj = nn.Linear(embed_dim, 2 * width, bias=config.use_bias)
        self.x_proj = nn.Linear(width, rank + 2 * states, bias=False)  # rows: delta (rank), B (n), C (n)
        self.dt_proj = nn.Linear(rank, width)
        self.out_proj = nn.Linear(width, embed_dim, bias=config.use_bias)

    def reset_parameters(self) -> None:
        """Initialises dt_proj as in Mamba: delta is log-spaced over the channels from time_step_min to
        time_step_max."""
        config = self.config
        scale = config.time_step_scale * config.time_step_rank**-0.5
        nn.init.uniform_(self.dt_proj.weight, -scale, scale)
        low, high = math.log(config.time_step_min), math.log(config.time_step_max)
        dt = torch.linspace(low, high, config.intermediate_size).exp().clamp(min=config.time_step_floor)
        with torch.no_grad():
            self.dt_proj.bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus

    def forward(self, tokens: Tensor) -> Tensor:
        config = self.config
        x, z = ops.split_linear(self.in_proj, tokens)  # 1. (b, l, d) each, like everything below
        x = ops.causal_conv_silu(x, self.conv1d.weight.squeeze(1), self.conv1d.bias)  # 2.
        dt, BC = self.x_proj(x).split([config.time_step_rank, 2 * config.state_size], dim=-1)  # 3.
        with full_precision(x):
            B, C = self.rotate(BC.unflatten(-1, (2, -1))).split(1, dim=2)  # 4. (b, l, 1, n)
            # 5. delta = softplus(dt_proj(dt)), and 6. with A = -exp(A_log)
            if config.delta_scale_factor == 1.0:
                y, _ = ops.scan_low_rank(x, dt, self.dt_proj, self.A_log, B, C)
            else:
                delta = F.softplus(at_least_float32(self.dt_proj(dt.to(self.dt_proj.weight.dtype))))
                y, _ = ops.scan_tokens(x, delta / config.delta_scale_factor, self.A_log, B, C, log_A=True)
            y = ops.gated_group_norm(y, x, self.D, z, config.group_norm_size, 1e-6, z.dtype)  # 7. and 8.
        return self.out_proj(y)  # 9.

    def rotate(self, M: Tensor) -> Tensor:
        """Rotary embedding of B and C, given as m matrices (b, l, m, n), over the states."""
        return at_least_float32(M) if self.freq is None else ops.rotate(M, self.freq, self.config.rope_scale_factor)


class Block(nn.Module):
    def __init__(self, config: DefocusConfig, drop_path_rate: float) -> None:
        super().__init__()
        self.norm = RMSNorm(config.embed_dim, config.mamba.layer_norm_epsilon, before_linear=True)
        self.mixer = Mixer(config.embed_dim, config.mamba, config.use_rope)
        self.residual_in_fp32 = config.mamba.residual_in_fp32
        self.drop_path_rate = drop_path_rate

    def forward(self, x: Tensor) -> Tensor:
        residual = at_least_float32(x) if self.residual_in_fp32 else x
        return residual + drop_path(self.mixer(self.norm(x)), self.drop_path_rate, self.training)


class DefocusMamba(Backbone):
    """De-focus Mamba with a head, or without one (`num_classes` = 0).

    With the auxiliary head, the output is (b, l + 1, classes): `head2` of each patch, then `head` of the class token.
    """

    def __init__(self, config: DefocusConfig) -> None:
        super().__init__(config.embed_dim, config.img_size, 224 / 256, ("head", "head2"))
        self.config = config
        self.patch_embed = PatchEmbed(config.patch_size, config.embed_dim, 2 if config.patch_embed_change_res else 1)
        self.grid_size = config.img_size // config.patch_size
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.embed_dim)) if "cls" in config.head_type else None
        pos_embed = torch.zeros(1, self.grid_size**2, config.embed_dim)
        self.pos_embed = nn.Parameter(pos_embed) if config.use_pos_embed else None
        rates = drop_path_rates(config.drop_path_rate, config.depth)
        self.blocks = nn.ModuleList([Block(config, rate) for rate in rates])
        names = [f"blocks.{i}" for i in range(config.depth)]
        self.feature_info = feature_info(names, [config.embed_dim] * len(names), [config.patch_size] * len(names))
        self.num_prefix_tokens = int(self.cls_token is not None)
        self.norm = nn.LayerNorm(config.embed_dim, eps=1e-6)
        self.reset_classifier(config.num_classes)
        self.apply(self._initialize)

    def _initialize(self, module: nn.Module) -> None:
        initialize_linear(module)
        if isinstance(module, Mixer):  # `apply` visits its linear layers first
            module.reset_parameters()
            if self.config.mamba.rescale_prenorm_residual:
                nn.init.kaiming_uniform_(module.out_proj.weight, a=math.sqrt(5))
                with torch.no_grad():
                    module.out_proj.weight /= math.sqrt(self.config.depth)
        elif module is self:
            for parameter in (self.cls_token, self.pos_embed):
                if parameter is not None:
                    nn.init.trunc_normal_(parameter, std=0.02)

    def replace_head(self) -> None:
        like = self.norm.weight
        self.head = self.new_head().to(like.device, like.dtype)
        self.head2 = self.new_head().to(like.device, like.dtype) if self.config.use_aux_loss else None

    def new_head(self) -> nn.Module:
        width = self.num_features
        if self.num_classes == 0:
            return nn.Identity()
        if "IN1k" in self.config.head_type:
            return nn.Linear(width, self.num_classes)
        return nn.Sequential(nn.Linear(width, 3 * width), nn.Tanh(), nn.Linear(3 * width, self.num_classes))

    def forward_features(self, images: Tensor) -> Tensor:
        """All tokens after the last norm, (b, l, c); the class token, if the model has one, is the last."""
        return self.final_norm(run_blocks(self.blocks, self.embed(images), self.grad_checkpointing))

    def embed(self, images: Tensor) -> Tensor:
        x = self.patch_embed(self._checked(images))
        if self.pos_embed is not None:
            x = x + self.pos_embed
        if self.cls_token is not None:
            x = torch.cat((x, self.cls_token.expand(x.shape[0], -1, -1).to(x.dtype)), dim=1)
        return x

    def run_depth(self, index: int, x: Tensor) -> Tensor:
        return run_blocks([self.blocks[index]], x, self.grad_checkpointing)

    def class_index(self, length: int) -> int | None:
        return None if self.cls_token is None else length - 1

    def final_norm(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def prefix_and_map(self, x: Tensor, images: Tensor) -> tuple[Tensor | None, Tensor]:
        patches, prefix = (x, None) if self.cls_token is None else (x[:, :-1], x[:, -1:])
        height, width = (side // self.config.patch_size for side in images.shape[2:])
        return prefix, self.patch_embed.in_rows(patches, height, width)

    def forward_head(self, tokens: Tensor, pre_logits: bool = False) -> Tensor:
        pooled = tokens.mean(1) if self.cls_token is None else tokens[:, -1]
        if pre_logits or self.num_classes == 0:
            return pooled
        if self.head2 is None:
            return self.head(pooled)
        return torch.cat((self.head2(tokens[:, :-1]), self.head(tokens[:, -1:])), dim=1)

    def _checked(self, images: Tensor) -> Tensor:
        if images.dim() != 4 or images.shape[1] != 3 or 0 in images.shape[2:]:
            raise UserError(
                f"De-focus Mamba needs images (b, 3, height, width), got a tensor of shape {tuple(images.shape)}."
            )
        check_floating(images)
        height, width = images.shape[-2:]
        patch = self.config.patch_size * self.patch_embed.regions
        if height % patch or width % patch:
            raise UserError(f"Images of {height} x {width} pixels do not divide into patches of {patch}; resize them.")
        if self.pos_embed is not None and (height, width) != (self.config.img_size, self.config.img_size):
            raise UserError(
                f"This model has a position embedding for {self.config.img_size} pixels, but the images have "
                f"{height} x {width}: build it with img_size={height} to interpolate its weights."
            )
        return images


def _size(
    img_size: int, patch: int, width: int, depth: int, rank: int = 48, mamba: dict[str, Any] | None = None, **rest: Any
) -> dict[str, Any]:
    mixer = {"intermediate_size": 2 * width, "time_step_rank": rank, **(mamba or {})}
    return {"img_size": img_size, "patch_size": patch, "embed_dim": width, "depth": depth, "mamba": mixer, **rest}


PUBLIC = "https://github.com/OpenGVLab/De-focus-Attention-Networks/releases/download/v1.0/"


def _register(name: str, config: dict[str, Any], weights: Mapping[str, PublicWeights] | None = None) -> None:
    MODELS.add(name, ModelEntry(name, DefocusMamba, DefocusConfig, config, weights or {}))


_register("defocus_mamba", {})
_register(
    "defocus_mamba_nano",
    _size(32, 4, 192, 12, rank=12, num_classes=200, use_aux_loss=False),
    {  # the first is the default
        "tin32-148ep": packaged("defocus_mamba_nano_tin32_148ep.safetensors", 47.2),
        "tin32-39ep": packaged("defocus_mamba_nano_tin32.safetensors", 38.9),
    },
)
_register("defocus_mamba_tiny", _size(192, 16, 192, 24))
_register("defocus_mamba_small", _size(224, 16, 384, 24))
_register(
    "defocus_mamba_base",
    _size(224, 16, 768, 24),
    {"in1k": PublicWeights(url=PUBLIC + "defocus_mamba_base_cls.pth", licence="MIT", top1=82.0)},
)
_register(
    "defocus_mamba_large",
    _size(384, 16, 1024, 48, head_type="IN22kto1k_cls", mamba={"delta_scale_factor": 2.0, "rope_scale_factor": 4.0}),
    {"in1k": PublicWeights(url=PUBLIC + "defocus_mamba_large_cls_1k.pth", licence="MIT", top1=85.9)},
)
_register(
    "defocus_mamba_large_22k",
    _size(192, 16, 1024, 48, head_type="IN22k_cls", num_classes=21841),
    {"in22k": PublicWeights(url=PUBLIC + "defocus_mamba_large_cls_21k.pth", licence="MIT", data="ImageNet-22k")},
)
