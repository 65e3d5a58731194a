"""The lift: a fixed random map from features to many more units, h = act(((f - m) / s) W).

A linear classifier on h separates what no linear classifier on f does. W is drawn on the CPU from a seed, so every
device and process has the same W, and no state contains it. The input map, (f - m) / s, is fitted once, to features of
the first task.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["relu", "tanh", "gelu", "none"]
Distribution = Literal["normal", "unit-normal", "uniform"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "none": lambda x: x,
}


def standard_normal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Normal values in float64 from uniform ones by Box and Muller. `torch.randn` calls a different logarithm on each
    kind of CPU; in float64 the difference vanishes when the values are rounded to float32."""
    half = -(-rows * columns // 2)
    radius, angle = torch.rand(2, half, dtype=torch.float64, generator=generator)
    radius.neg_().log1p_().mul_(-2).sqrt_()  # 1 - u is never 0
    angle.mul_(2 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[: rows * columns].view(rows, columns)


def draw(features: int, units: int, seed: int, distribution: str = "normal") -> Tensor:
    """W (features, units) in float32, on the CPU. `normal` has variance 1 / features, `unit-normal` 1 (RanPAC's),
    `uniform` is a linear layer's initial weight (ACIL's)."""
    generator = torch.Generator().manual_seed(seed)
    if distribution == "uniform":
        values = torch.rand(features, units, dtype=torch.float64, generator=generator)
        return ((2 * values - 1) / math.sqrt(features)).float()
    values = standard_normal(features, units, generator)
    return (values if distribution == "unit-normal" else values / math.sqrt(features)).float()


def fit_scale(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean m and standard deviation s of each feature (n, d), in float64.

    A feature that does not vary here may vary later, so it gets the mean deviation of those that do; 1 if none does.
    """
    features = features.double()
    center = features.mean(0)
    scale = (features - center).square().mean(0).sqrt()
    # Features are float32 numbers: what is below their rounding error is no variation.
    varies = scale > 4 * torch.finfo(torch.float32).eps * features.abs().amax(0)
    fallback = scale[varies].mean() if varies.any() else scale.new_ones(())
    return center, torch.where(varies, scale, fallback)


def lift(features: Tensor, center: Tensor, scale: Tensor, projection: Tensor | None, activation: str) -> Tensor:
    """h (b, units) of features (b, d). Without a projection there is no lift: the units are the features."""
    x = (features - center) / scale
    return ACTIVATIONS[activation](x if projection is None else x @ projection)
