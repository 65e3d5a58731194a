"""VMamba: a hierarchical vision Mamba whose SSM scans the image in four directions (SS2D).

Two generations: the current one ("v05_noz": an MLP in every block, no gate, one state per channel) and the first ("v0":
a gate, 16 states, no MLP). Parameter names and shapes are those of the public checkpoints. Feature maps between modules
are (b, h, w, c), channels last.
"""

import math
import re
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
from mambacl.ops.cross import DIRECTIONS, cross_merge, cross_scan, scan_map
from mambacl.ops.precision import at_least_float32, full_precision

ALLOWED: dict[str, tuple[object, ...]] = {  # values that the public models use
    "forward_type": ("v05_noz", "v0"),
    "norm_layer": ("ln2d", "ln"),  # both norm over the channels; only the public code's layout differs
    "patchembed_version": ("v2", "v1"),
    "downsample_version": ("v3", "v1"),
    "ssm_init": ("v0",),
    "ssm_act_layer": ("silu",),
    "mlp_act_layer": ("gelu",),
    "gmlp": (False,),
    "patch_norm": (True,),
    "ssm_drop_rate": (0.0,),
    "mlp_drop_rate": (0.0,),
    "posembed": (False,),
}


@dataclass(frozen=True)
class VMambaConfig:
    """A VMamba model, with the names of the public configuration files.

    `dims`: the width of the first stage, which doubles with each stage, or a list of all widths.
    """

    depths: tuple[int, ...] | list[int] = (2, 2, 5, 2)
    dims: int | tuple[int, ...] | list[int] = 96
    drop_path_rate: float = 0.0
    patch_size: int = 4
    in_chans: int = 3
    num_classes: int = 1000
    ssm_d_state: int = 1
    ssm_ratio: float = 2.0
    ssm_dt_rank: int | str = "auto"  # "auto": a sixteenth of the stage's width
    ssm_act_layer: str = "silu"
    ssm_conv: int = 3
    ssm_conv_bias: bool = False
    ssm_drop_rate: float = 0.0
    ssm_init: str = "v0"
    forward_type: str = "v05_noz"
    mlp_ratio: float = 4.0  # 0: no MLP
    mlp_act_layer: str = "gelu"
    mlp_drop_rate: float = 0.0
    gmlp: bool = False
    patch_norm: bool = True
    norm_layer: str = "ln2d"
    downsample_version: str = "v3"
    patchembed_version: str = "v2"
    use_checkpoint: bool = False
    posembed: bool = False
    imgsize: int = 224

    def __post_init__(self) -> None:
        for name, allowed in ALLOWED.items():
            if getattr(self, name) not in allowed:
                values = " or ".join(repr(value) for value in allowed)
                raise UserError(f"VMamba supports only {name} {values}, got {getattr(self, name)!r}.")
        check_positive(self, "patch_size", "in_chans", "ssm_d_state", "imgsize")
        if not _positive(self.depths) or not _positive(self.widths) or len(self.widths) != len(self.depths):
            raise UserError(
                "depths must list the blocks per stage, and dims must be the first stage's width or list all widths, "
                f"got {self.depths!r} and {self.dims!r}."
            )
        if self.ssm_dt_rank != "auto" and not _positive([self.ssm_dt_rank]):
            raise UserError(f"ssm_dt_rank must be a positive number or 'auto', got {self.ssm_dt_rank!r}.")
        if self.ssm_conv < 3 or self.ssm_conv % 2 == 0:
            raise UserError(f"ssm_conv must be an odd kernel size of at least 3, got {self.ssm_conv}.")
        if self.ssm_ratio * min(self.widths) < 1:
            raise UserError(f"ssm_ratio leaves no channel for the SSM: make it larger than {self.ssm_ratio}.")
        if self.num_classes < 0 or self.mlp_ratio < 0 or not 0 <= self.drop_path_rate < 1:
            raise UserError(
                "num_classes and mlp_ratio must not be negative, and drop_path_rate must be at least 0 and below 1."
            )
        if self.patchembed_version == "v2" and (self.patch_size != 4 or self.widths[0] % 2):
            raise UserError(
                f"The patch embedding 'v2' needs patch_size 4 and an even first width, got {self.patch_size} and "
                f"{self.widths[0]}; change them, or use patchembed_version 'v1'."
            )

    @property
    def widths(self) -> tuple[int, ...] | list[int]:
        """The number of channels of each stage."""
        return [self.dims << stage for stage in range(len(self.depths))] if isinstance(self.dims, int) else self.dims


def _positive(values: object) -> bool:
    """Whether this is a non-empty list of positive integers."""
    return isinstance(values, (tuple, list)) and bool(values) and all(type(v) is int and v > 0 for v in values)


class ChannelsFirst(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 3, 1, 2)


class ChannelsLast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1)


class SS2D(nn.Module):
    """The selective SSM of one block. It scans the image in four directions, each with its own parameters.

    The input x of the SSM is the output of `act`. It and the input of `out_proj` are (b, h, w, d).
    """

    channels_last = True  # the layout of `act`'s output and of `out_proj`'s input

    def __init__(self, config: VMambaConfig, width: int) -> None:
        super().__init__()
        inner, self.states = int(config.ssm_ratio * width), config.ssm_d_state
        self.rank = math.ceil(width / 16) if isinstance(config.ssm_dt_rank, str) else config.ssm_dt_rank
        self.gated = config.forward_type == "v0"
        self.in_proj = nn.Linear(width, 2 * inner if self.gated else inner, bias=False)
        self.conv2d = nn.Conv2d(
            inner, inner, config.ssm_conv, padding=config.ssm_conv // 2, groups=inner, bias=config.ssm_conv_bias
        )
        self.act = nn.SiLU()
        rows = self.rank + 2 * self.states  # delta (rank), B (n), C (n)
        self.x_proj_weight = nn.Parameter(torch.empty(DIRECTIONS, rows, inner))
        self.dt_projs_weight = nn.Parameter(torch.empty(DIRECTIONS, inner, self.rank))
        self.dt_projs_bias = nn.Parameter(torch.empty(DIRECTIONS, inner))
        self.A_logs = nn.Parameter(torch.arange(1, self.states + 1).float().log().repeat(DIRECTIONS * inner, 1))
        self.Ds = nn.Parameter(torch.ones(DIRECTIONS * inner))
        self.out_norm = nn.LayerNorm(inner)
        self.out_proj = nn.Linear(inner, width, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As in Mamba: the initial delta is log-uniform between 0.001 and 0.1."""
        inner = self.x_proj_weight.shape[-1]
        nn.init.uniform_(self.x_proj_weight, -(inner**-0.5), inner**-0.5)
        nn.init.uniform_(self.dt_projs_weight, -(self.rank**-0.5), self.rank**-0.5)
        with torch.no_grad():
            dt = self.dt_projs_bias.uniform_(math.log(0.001), math.log(0.1)).exp()
            self.dt_projs_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus

    def forward(self, image: Tensor) -> Tensor:
        x = self.in_proj(image)  # (b, h, w, d) like everything below, or 2 d with a gate
        if self.gated:
            x, z = x.chunk(2, dim=-1)
        x = self.act(self.conv2d(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
        y = self.in_place(x) if ops.scans_by_kernel(x, self.A_logs) else self.in_order(x)
        with full_precision(x):
            y = self.out_norm(y.to(self.out_norm.weight.dtype)).to(image.dtype)
        if self.gated:
            y = y * F.silu(z)
        return self.out_proj(y)

    def in_order(self, x: Tensor) -> Tensor:
        """The sum of the four scans of x, with the tokens copied into the order of each."""
        u, delta, B, C = self.scan_inputs(x)
        with full_precision(x):
            y, _ = ops.scan_tokens(u, delta, self.A_logs, B, C, log_A=True, softplus=True)  # (b, l, 4 d)
            y = cross_merge(y.unflatten(2, (DIRECTIONS, -1)), *x.shape[1:3])
            # Every direction adds its own D * x; with the tokens back in place, x is the same for all of them.
            D = at_least_float32(self.Ds).unflatten(0, (DIRECTIONS, -1)).sum(0)
            return torch.addcmul(y, D, at_least_float32(x))

    def in_place(self, x: Tensor, backend: str = "auto") -> Tensor:
        """Does the same with a kernel that reads the tokens of each direction in place."""
        projected = F.linear(x, self.x_proj_weight.flatten(0, 1)).unflatten(3, (DIRECTIONS, -1))
        with full_precision(x):
            dt, B, C = projected.split([self.rank, self.states, self.states], dim=-1)
            weight = self.dt_projs_weight.to(torch.promote_types(dt.dtype, self.dt_projs_weight.dtype))
            delta = torch.einsum("bhwkr,kdr->bhwkd", dt.to(weight.dtype), weight)
            return scan_map(x, delta, self.A_logs, B, C, self.Ds, self.dt_projs_bias.flatten(), backend)

    def scan_inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """From x (b, h, w, d): u and delta before the softplus (b, l, 4 d), B and C (b, l, 4, n), each direction in its
        own order."""
        projected = F.linear(x, self.x_proj_weight.flatten(0, 1))  # (b, h, w, 4 (rank + 2 n))
        with full_precision(x):
            tokens = cross_scan(at_least_float32(projected).unflatten(3, (DIRECTIONS, -1)))
            dt, B, C = tokens.split([self.rank, self.states, self.states], dim=-1)
            delta = torch.einsum("blkr,kdr->blkd", dt, at_least_float32(self.dt_projs_weight))
            delta = delta + at_least_float32(self.dt_projs_bias)
            u = cross_scan(at_least_float32(x).unsqueeze(3).expand(-1, -1, -1, DIRECTIONS, -1))
        return u.flatten(2), delta.flatten(2), B, C


class Block(nn.Module):
    def __init__(self, config: VMambaConfig, width: int, drop_path_rate: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.op = SS2D(config, width)
        hidden = int(config.mlp_ratio * width)
        self.has_mlp = hidden > 0
        if self.has_mlp:
            self.norm2 = nn.LayerNorm(width)
            self.mlp = mlp(width, hidden)
        self.drop_path_rate = drop_path_rate

    def forward(self, x: Tensor) -> Tensor:
        x = x + drop_path(self.op(self.norm(x)), self.drop_path_rate, self.training)
        if self.has_mlp:
            x = x + drop_path(self.mlp(self.norm2(x)), self.drop_path_rate, self.training)
        return x


class PatchMerging(nn.Module):
    """The first version's downsampling: concatenates the four pixels of a square, normalises and projects them."""

    def __init__(self, width: int, wider: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width)
        self.reduction = nn.Linear(4 * width, wider, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))  # at the right and the bottom
        squares = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))  # (b, h / 2, 2, w / 2, 2, c)
        # Of a square's pixels, the one below comes before the one to the right.
        return self.reduction(self.norm(squares.permute(0, 1, 3, 4, 2, 5).flatten(3)))


def _downsample(config: VMambaConfig, width: int, wider: int) -> nn.Module:
    if config.downsample_version == "v1":
        return PatchMerging(width, wider)
    convolution = nn.Conv2d(width, wider, kernel_size=3, stride=2, padding=1)
    return nn.Sequential(ChannelsFirst(), convolution, ChannelsLast(), nn.LayerNorm(wider))


def _patch_embed(config: VMambaConfig) -> nn.Sequential:
    channels, width, patch = config.in_chans, config.widths[0], config.patch_size
    if config.patchembed_version == "v1":
        return nn.Sequential(nn.Conv2d(channels, width, patch, stride=patch), ChannelsLast(), nn.LayerNorm(width))
    first = nn.Conv2d(channels, width // 2, kernel_size=3, stride=2, padding=1)
    second = nn.Conv2d(width // 2, width, kernel_size=3, stride=2, padding=1)
    between = (ChannelsLast(), nn.LayerNorm(width // 2), ChannelsFirst(), nn.GELU())
    return nn.Sequential(first, *between, second, ChannelsLast(), nn.LayerNorm(width))


class Stage(nn.Module):
    def __init__(self, blocks: list[Block], downsample: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.downsample = downsample
        self.grad_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        return self.downsample(self.run(x))

    def run(self, x: Tensor) -> Tensor:
        """The stage without its downsampling."""
        return run_blocks(self.blocks, x, self.grad_checkpointing)


class VMamba(Backbone):
    """VMamba with a head, or without one (`num_classes` = 0). It takes images of any size and shape."""

    hierarchical = True

    def __init__(self, config: VMambaConfig) -> None:
        super().__init__(config.widths[-1], config.imgsize, 224 / 256, "classifier.head", config.in_chans)
        self.config = config
        self.patch_embed = _patch_embed(config)
        rates = iter(drop_path_rates(config.drop_path_rate, sum(config.depths)))
        self.layers = nn.ModuleList()
        for depth, width, wider in zip(config.depths, config.widths, (*config.widths[1:], None), strict=True):
            blocks = [Block(config, width, next(rates)) for _ in range(depth)]
            downsample = nn.Identity() if wider is None else _downsample(config, width, wider)
            self.layers.append(Stage(blocks, downsample))
        names = [f"layers.{i}.blocks.{depth - 1}" for i, depth in enumerate(config.depths)]
        self.feature_info = feature_info(names, config.widths, [config.patch_size << i for i in range(len(names))])
        self.classifier = nn.ModuleDict({"norm": nn.LayerNorm(self.num_features)})
        self.reset_classifier(config.num_classes)
        self.set_grad_checkpointing(config.use_checkpoint)
        self.apply(initialize_linear)

    def get_classifier(self) -> nn.Module:
        return self.classifier["head"]

    def replace_head(self) -> None:
        self.classifier["head"] = self.new_head()

    def forward_features(self, images: Tensor) -> Tensor:
        """The last stage's map after the norm, (b, h, w, c)."""
        x = self.embed(images)
        for stage in self.layers:
            x = stage(x)
        return self.final_norm(x)

    def embed(self, images: Tensor) -> Tensor:
        return self.patch_embed(self._checked(images))

    def run_depth(self, index: int, x: Tensor) -> Tensor:
        """A stage ends before its downsampling, as in timm; the next one starts with it."""
        stages: Any = self.layers
        return stages[index].run(stages[index - 1].downsample(x) if index else x)

    def final_norm(self, x: Tensor) -> Tensor:
        return self.classifier["norm"](x)

    def prefix_and_map(self, x: Tensor, images: Tensor) -> tuple[None, Tensor]:
        return None, x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        pooled = x.mean((1, 2))
        return pooled if pre_logits else self.classifier["head"](pooled)

    def adapt_state(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Translates a public file's tensors to this model's names and shapes; tensors it lacks are not changed."""
        own = self.state_dict()
        adapted = {}
        for name, tensor in tensors.items():
            if name not in own:
                for pattern, replacement in RENAMED:
                    name = re.sub(pattern, replacement, name)
            adapted[name] = _laid_out(tensor, own[name]) if name in own else tensor
        return adapted

    def _checked(self, images: Tensor) -> Tensor:
        channels, least = self.config.in_chans, 1 if self.config.patchembed_version == "v2" else self.config.patch_size
        if images.dim() != 4 or images.shape[1] != channels or min(images.shape[2:]) < least:
            raise UserError(
                f"This model needs images (batch, {channels}, height, width) of at least {least} x {least} pixels, "
                f"got {tuple(images.shape)}."
            )
        check_floating(images)
        return images


# Names in the public code's second model file and in older checkpoints.
RENAMED = (
    (r"\.(x_proj|dt_projs)\.weight$", r".\1_weight"),
    (r"\.downsample\.1\.", ".downsample.norm."),
    (r"\.downsample\.2\.", ".downsample.reduction."),
    (r"^patch_embed\.proj\.", "patch_embed.0."),
    (r"^patch_embed\.norm\.", "patch_embed.2."),
    (r"^(layers\.\d+\.blocks\.\d+)\.ln_1\.", r"\1.norm."),
    (r"^(layers\.\d+\.blocks\.\d+)\.self_attention\.", r"\1.op."),
    (r"^(norm|head)\.", r"classifier.\1."),
)


def _laid_out(tensor: Tensor, wanted: Tensor) -> Tensor:
    """The same weights in the shape of `wanted`: a 1 x 1 convolution as a matrix, the directions on a separate axis."""
    if tensor.dim() == 4 and wanted.dim() < 4 and tensor.shape[2:] == (1, 1):
        tensor = tensor.flatten(1)
    if wanted.dim() == 3 and tensor.shape == wanted.flatten(0, 1).shape:
        tensor = tensor.unflatten(0, wanted.shape[:2])
    return tensor


FIRST_VERSION = {"forward_type": "v0", "ssm_d_state": 16, "ssm_conv_bias": True, "mlp_ratio": 0.0, "norm_layer": "ln"}
FIRST_VERSION |= {"downsample_version": "v1", "patchembed_version": "v1"}
MINI: dict[str, Any] = {"depths": (2, 6, 3), "dims": 64, "ssm_ratio": 1.0, "num_classes": 200, "imgsize": 32}
MINI |= {"patch_size": 2, "patchembed_version": "v1"}
NANO = {"depths": (1, 2, 1), "dims": 32, "num_classes": 200, "imgsize": 32}
PUBLIC = "https://github.com/MzeroMiko/VMamba/releases/download/%23"
SIZES = {  # depth of the third stage, width of the first, ssm_ratio, file, top-1
    "vmamba_tiny_s2l5": (5, 96, 2.0, "v2cls/vssm_tiny_0230_ckpt_epoch_262.pth", 82.5),
    "vmamba_small_s2l15": (15, 96, 2.0, "v2cls/vssm_small_0229_ckpt_epoch_222.pth", 83.6),
    "vmamba_base_s2l15": (15, 128, 2.0, "v2cls/vssm_base_0229_ckpt_epoch_237.pth", 83.9),
    "vmamba_tiny_s1l8": (8, 96, 1.0, "v2cls/vssm1_tiny_0230s_ckpt_epoch_264.pth", 82.6),
    "vmamba_small_s1l20": (20, 96, 1.0, "v2cls/vssm1_small_0229s_ckpt_epoch_240.pth", 83.3),
    "vmamba_base_s1l20": (20, 128, 1.0, "v2cls/vssm1_base_0229s_ckpt_epoch_225.pth", 83.8),
    "vanilla_vmamba_tiny": (9, 96, 2.0, "v0cls/vssmtiny_dp01_ckpt_epoch_292.pth", 82.2),
    "vanilla_vmamba_small": (27, 96, 2.0, "v0cls/vssmsmall_dp03_ckpt_epoch_238.pth", 83.5),
    "vanilla_vmamba_base": (27, 128, 2.0, "v0cls/vssmbase_dp06_ckpt_epoch_241.pth", 83.7),
}


def _register(name: str, config: dict[str, Any], weights: Mapping[str, PublicWeights] | None = None) -> None:
    version = FIRST_VERSION if name.startswith("vanilla_") else {}
    MODELS.add(name, ModelEntry(name, VMamba, VMambaConfig, {**config, **version}, weights or {}))


_register("vmamba", {})
_register("vmamba_nano", NANO)
_register("vmamba_mini", MINI, {"tin32-31ep": packaged("vmamba_mini_tin32_31ep.safetensors", 39.9)})
_register("vanilla_vmamba_nano", NANO)
for _name, (_depth, _width, _ratio, _file, _top1) in SIZES.items():
    _config = {"depths": (2, 2, _depth, 2), "dims": _width, "ssm_ratio": _ratio}
    _register(_name, _config, {"in1k": PublicWeights(url=PUBLIC + _file, licence="MIT", top1=_top1)})
