"""Vim: a vision Mamba that scans the tokens in both directions, with the class token in the middle.

Tensor names and shapes are those of the public checkpoints. One block is x + mixer(norm(x)); the mixer's equations are
numbered in `Mixer.forward`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
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
from mambacl.ops.linear import is_plain
from mambacl.ops.precision import at_least_float32, full_precision

FIXED = {  # options of the public code with the same value in all public models
    "rms_norm": True,
    "final_pool_type": "mean",  # never read: with a class token, that token is the feature
    "if_abs_pos_embed": True,
    "if_rope": False,
    "if_rope_residual": False,
    "bimamba_type": "v2",
    "if_cls_token": True,
    "if_divide_out": True,
    "use_middle_cls_token": True,
}


@dataclass(frozen=True)
class VimConfig:
    """A Vim model, with the public code's names. `img_size` sets the grid of the position embedding."""

    img_size: int = 224
    patch_size: int = 16
    stride: int = 16  # below patch_size, patches overlap
    embed_dim: int = 192
    depth: int = 24
    num_classes: int = 1000
    d_state: int = 16
    d_conv: int = 4
    expand: int = 2
    dt_rank: int = 0  # 0 for ceil(embed_dim / 16)
    norm_epsilon: float = 1e-5
    drop_path_rate: float = 0.0
    residual_in_fp32: bool = True
    fused_add_norm: bool = True  # no effect here: a faster path of the public code
    rms_norm: bool = True
    final_pool_type: str = "mean"
    if_abs_pos_embed: bool = True
    if_rope: bool = False
    if_rope_residual: bool = False
    bimamba_type: str = "v2"
    if_cls_token: bool = True
    if_divide_out: bool = True
    use_middle_cls_token: bool = True

    def __post_init__(self) -> None:
        check_positive(self, "img_size", "patch_size", "stride", "embed_dim", "depth", "d_state", "d_conv", "expand")
        for name in ("num_classes", "dt_rank"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} must not be negative, got {getattr(self, name)}.")
        if not 0.0 <= self.drop_path_rate < 1.0:
            raise UserError(f"drop_path_rate must be in [0, 1), got {self.drop_path_rate}.")
        for name, value in FIXED.items():
            if getattr(self, name) != value:
                raise UserError(
                    f"Vim supports only {name} {value!r}, as in every public model, got {getattr(self, name)!r}."
                )
        self.grid(self.img_size, self.img_size)

    @property
    def width(self) -> int:
        """Channels of the SSM."""
        return self.expand * self.embed_dim

    @property
    def rank(self) -> int:
        return self.dt_rank or math.ceil(self.embed_dim / 16)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches in an image. Raises `UserError` if patches do not cover it exactly."""
        for side in (height, width):
            if side < self.patch_size or (side - self.patch_size) % self.stride:
                raise UserError(
                    f"Images of {height} x {width} pixels do not divide into patches of {self.patch_size} with stride "
                    f"{self.stride}; resize them."
                )
        return (height - self.patch_size) // self.stride + 1, (width - self.patch_size) // self.stride + 1


class Mixer(nn.Module):
    """The two selective SSMs of one block; parameter names of the backward one contain "_b"."""

    def __init__(self, config: VimConfig) -> None:
        super().__init__()
        width, states, rank = config.width, config.d_state, config.rank
        self.config = config
        log_decay = torch.arange(1, states + 1).float().log().repeat(width, 1)  # (d, n)
        self.A_log, self.A_b_log = nn.Parameter(log_decay), nn.Parameter(log_decay.clone())
        self.D, self.D_b = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.in_proj = nn.Linear(config.embed_dim, 2 * width, bias=False)
        self.conv1d = nn.Conv1d(width, width, config.d_conv, groups=width)
        self.x_proj = nn.Linear(width, rank + 2 * states, bias=False)  # rows: delta (rank), B (n), C (n)
        self.dt_proj = nn.Linear(rank, width)
        self.conv1d_b = nn.Conv1d(width, width, config.d_conv, groups=width)
        self.x_proj_b = nn.Linear(width, rank + 2 * states, bias=False)
        self.dt_proj_b = nn.Linear(rank, width)
        self.out_proj = nn.Linear(width, config.embed_dim, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As in the public code: the forward delta starts between 0.001 and 0.1, as in Mamba; dt_proj_b starts like any
        linear layer."""
        scale = self.config.rank**-0.5
        nn.init.uniform_(self.dt_proj.weight, -scale, scale)
        low, high = math.log(0.001), math.log(0.1)
        dt = torch.empty_like(self.dt_proj.bias).uniform_(low, high).exp()
        self.dt_proj.bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus
        nn.init.zeros_(self.dt_proj_b.bias)
        self.out_proj.weight /= math.sqrt(self.config.depth)

    def forward(self, tokens: Tensor) -> Tensor:
        x, z = ops.split_linear(self.in_proj, tokens)  # 1. (b, l, d) each
        y = self.in_place(x, z) if self.unobserved() and ops.scans_by_kernel(x, self.A_log) else self.joined(x, z)
        return self.out_proj(y.to(tokens.dtype))  # 8.

    def joined(self, x: Tensor, z: Tensor) -> Tensor:
        """Flips the backward direction and scans both as two groups of channels, in one pass through time."""
        ahead = self.select(x, self.conv1d, self.x_proj, self.dt_proj)
        back = self.select(x.flip(1), self.conv1d_b, self.x_proj_b, self.dt_proj_b)
        with full_precision(x):
            x, delta, B, C = (torch.cat(pair, dim=-1) for pair in zip(ahead, back, strict=True))  # (b, l, 2 d or 2 n)
            A = torch.cat((self.A_log, self.A_b_log))
            B, C = B.unflatten(-1, (2, -1)), C.unflatten(-1, (2, -1))
            y, _ = ops.scan_tokens(x, delta, A, B, C, log_A=True, softplus=True)  # 5.
            y = torch.addcmul(y, at_least_float32(torch.cat((self.D, self.D_b))), at_least_float32(x))  # 6.
            y_ahead, y_back = y.chunk(2, dim=-1)
            # Both directions have the same gate, so it is applied once, to their sum.
            return (y_ahead + y_back.flip(1)) / 2 * F.silu(at_least_float32(z))  # 7.

    def in_place(self, x: Tensor, z: Tensor, backend: str = "auto") -> Tensor:
        """Does the same with kernels that scan in either direction, without flips or copies."""
        gated = []
        for reverse, conv, x_proj, dt_proj, A_log, D in (
            (False, self.conv1d, self.x_proj, self.dt_proj, self.A_log, self.D),
            (True, self.conv1d_b, self.x_proj_b, self.dt_proj_b, self.A_b_log, self.D_b),
        ):
            u = ops.causal_conv_silu(x, conv.weight.squeeze(1), conv.bias, reverse=reverse, backend=backend)  # 2.
            dt, B, C = x_proj(u).split([self.config.rank, self.config.d_state, self.config.d_state], dim=-1)  # 3.
            with full_precision(x):
                B, C = B.unsqueeze(2), C.unsqueeze(2)
                y, _ = ops.scan_low_rank(u, dt, dt_proj, A_log, B, C, backend, reverse=reverse)  # 4. and 5.
                gated.append(ops.skip_gate(y, u, D, z, backend=backend))  # 6. and 7.
        with full_precision(x):
            return torch.lerp(gated[0], gated[1], 0.5)

    def unobserved(self) -> bool:
        """Whether no hook or compiler sees the order in which the backward direction's layers get their tokens."""
        return not torch.compiler.is_compiling() and is_plain(self.x_proj_b) and is_plain(self.dt_proj_b)

    def select(self, u: Tensor, conv: nn.Conv1d, x_proj: nn.Module, dt_proj: nn.Linear) -> tuple[Tensor, ...]:
        """The inputs of one direction's scan: x and delta before the softplus (b, l, d), B and C (b, l, n)."""
        x = ops.causal_conv_silu(u, conv.weight.squeeze(1), conv.bias)  # 2.
        dt, B, C = x_proj(x).split([self.config.rank, self.config.d_state, self.config.d_state], dim=-1)  # 3.
        with full_precision(x):
            delta = at_least_float32(dt_proj(dt.to(dt_proj.weight.dtype)))  # 4.
        return x, delta, B, C


class Block(nn.Module):
    def __init__(self, config: VimConfig, drop_path_rate: float) -> None:
        super().__init__()
        self.mixer = Mixer(config)
        self.norm = RMSNorm(config.embed_dim, config.norm_epsilon, before_linear=True)
        self.residual_in_fp32 = config.residual_in_fp32
        self.drop_path_rate = drop_path_rate

    def forward(self, x: Tensor) -> Tensor:
        residual = at_least_float32(x) if self.residual_in_fp32 else x
        return residual + drop_path(self.mixer(self.norm(x)), self.drop_path_rate, self.training)


class Vim(Backbone):
    """Vim with a head, or without one (`num_classes` = 0).

    Images can have any size that divides into patches, also rectangles. For a size other than `img_size`, each forward
    interpolates the position embedding to the images' grid. Loading a file for another size interpolates it once.
    """

    def __init__(self, config: VimConfig) -> None:
        super().__init__(config.embed_dim, config.img_size, 0.875)
        self.config = config
        self.grid_size = config.grid(config.img_size, config.img_size)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.embed_dim))
        # One row per token, so the class token's row is also in the middle.
        self.pos_embed = nn.Parameter(torch.zeros(1, math.prod(self.grid_size) + 1, config.embed_dim))
        self.patch_embed = PatchEmbed(config.patch_size, config.embed_dim, stride=config.stride)
        nn.init.trunc_normal_(self.patch_embed.proj.weight, std=(3 * config.patch_size**2) ** -0.5)
        if self.patch_embed.proj.bias is not None:
            nn.init.zeros_(self.patch_embed.proj.bias)
        # In the public code layer i drops the output of layer i - 1; here each drops its own, at the same rate.
        rates = drop_path_rates(config.drop_path_rate, config.depth)
        self.layers = nn.ModuleList([Block(config, rate) for rate in rates])
        names = [f"layers.{i}" for i in range(config.depth)]
        self.feature_info = feature_info(names, [config.embed_dim] * len(names), [config.stride] * len(names))
        self.num_prefix_tokens = 1
        self.norm_f = RMSNorm(config.embed_dim, config.norm_epsilon)
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        self.reset_classifier(config.num_classes)

    def replace_head(self) -> None:
        self.head: nn.Module = nn.Identity()
        if self.num_classes:
            like = self.pos_embed
            self.head = nn.Linear(self.num_features, self.num_classes, device=like.device, dtype=like.dtype)
            initialize_linear(self.head)

    def forward_features(self, images: Tensor) -> Tensor:
        """All tokens after the last norm, (b, l + 1, c) for l patches; the class token is at index l // 2."""
        return self.final_norm(run_blocks(self.layers, self.embed(images), self.grad_checkpointing))

    def embed(self, images: Tensor) -> Tensor:
        grid = self._checked(images)
        x = with_middle(self.patch_embed(images), self.cls_token)
        return x + resized_positions(self.pos_embed, self.grid_size, grid)

    def run_depth(self, index: int, x: Tensor) -> Tensor:
        return run_blocks([self.layers[index]], x, self.grad_checkpointing)

    def class_index(self, length: int) -> int:
        return (length - 1) // 2

    def final_norm(self, x: Tensor) -> Tensor:
        return self.norm_f(x)

    def prefix_and_map(self, x: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        half = (x.shape[1] - 1) // 2
        patches = torch.cat((x[:, :half], x[:, half + 1 :]), dim=1)
        return x[:, half : half + 1], patches.unflatten(1, self.config.grid(*images.shape[2:]))

    def forward_head(self, tokens: Tensor, pre_logits: bool = False) -> Tensor:
        pooled = tokens[:, (tokens.shape[1] - 1) // 2]
        return pooled if pre_logits else self.head(pooled)

    def adapt_state(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """A public file's tensors for this model, with positions interpolated if the file has another grid."""
        stored = tensors.get("pos_embed")
        if stored is None or stored.dim() != 3 or stored.shape[1] == self.pos_embed.shape[1]:
            return tensors
        side = math.isqrt(stored.shape[1] - 1)
        if side < 1 or side * side != stored.shape[1] - 1:
            return tensors  # not a square: the loader reports that it does not fit
        return {**tensors, "pos_embed": resized_positions(stored, (side, side), self.grid_size)}

    def _checked(self, images: Tensor) -> tuple[int, int]:
        """The grid of patches of the images."""
        if images.dim() != 4 or images.shape[1] != 3:
            raise UserError(f"Vim needs images (b, 3, height, width), got a tensor of shape {tuple(images.shape)}.")
        check_floating(images)
        return self.config.grid(images.shape[2], images.shape[3])


def with_middle(rows: Tensor, middle: Tensor) -> Tensor:
    """Inserts a row (1, 1, c) into rows (b, l, c), before index l // 2."""
    half = rows.shape[1] // 2
    return torch.cat((rows[:, :half], middle.expand(rows.shape[0], -1, -1), rows[:, half:]), dim=1)


def resized_positions(positions: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Interpolates position embeddings (1, l + 1, c) of a grid of l patches to another grid; keeps the class row."""
    if old == new:
        return positions
    half = old[0] * old[1] // 2
    patches = torch.cat((positions[:, :half], positions[:, half + 1 :]), dim=1)
    grid = at_least_float32(patches).unflatten(1, old).permute(0, 3, 1, 2)  # (1, c, rows, columns)
    grid = F.interpolate(grid, size=new, mode="bicubic", align_corners=False)
    return with_middle(grid.flatten(2).mT.to(positions.dtype), positions[:, half : half + 1])


NANO = {"img_size": 32, "patch_size": 4, "stride": 4, "embed_dim": 64, "depth": 6, "num_classes": 200}


def _register(name: str, config: dict[str, Any], weights: Mapping[str, PublicWeights] | None = None) -> None:
    MODELS.add(name, ModelEntry(name, Vim, VimConfig, config, weights or {}))


def _public(size: str, file: str, top1: float) -> dict[str, PublicWeights]:
    url = f"https://huggingface.co/hustvl/Vim-{size}-midclstok/resolve/main/vim_{file}.pth"
    return {"in1k": PublicWeights(url=url, licence="Apache-2.0", top1=top1)}


_register("vim", {})
_register("vim_nano", NANO)
_register(
    "vim_mini",
    {**NANO, "embed_dim": 192, "depth": 12},
    {"tin32-22ep": packaged("vim_mini_tin32_22ep.safetensors", 33.6)},
)
_register("vim_tiny", {}, _public("tiny", "t_midclstok_76p1acc", 76.1))
_register("vim_tiny_stride8", {"stride": 8}, _public("tiny", "t_midclstok_ft_78p3acc", 78.3))
_register("vim_small", {"embed_dim": 384}, _public("small", "s_midclstok_80p5acc", 80.5))
_register("vim_small_stride8", {"embed_dim": 384, "stride": 8}, _public("small", "s_midclstok_ft_81p6acc", 81.6))
_register("vim_base", {"embed_dim": 768}, _public("base", "b_midclstok_81p9acc", 81.9))
