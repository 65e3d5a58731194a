"""The lift: a fixed random map from features to many more units, h = act(g ((f - m) / s) W).

A linear classifier on h separates what no linear classifier on f does. W follows from a seed, the same on every device
and in every process, and no state contains it. The input map, (f - m) / s, is fitted once, to features of
the first task.

`fourier` gives the cosine and the sine of each projection, as two units: random Fourier features (Rahimi and Recht,
2007). Products of h approximate a Gaussian kernel of the features, whose width is 1 / g. Cosines alone, with random
phases, were as accurate in our tests but need twice as many projections.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["fourier", "relu", "tanh", "gelu", "none"]
Distribution = Literal["normal", "unit-normal", "uniform"]

GOLDEN = -0x61C8864680B583EB  # 2^64 divided by the golden ratio
DRAWN = 1 << 22  # values drawn at a time


def fourier(x: Tensor) -> Tensor:
    """(b, n) -> (b, 2 n): cosine and sine side by side, so that blocks of units hold pairs."""
    pairs = x.new_empty(*x.shape, 2)
    torch.cos(x, out=pairs[..., 0])
    torch.sin(x, out=pairs[..., 1])
    return pairs.flatten(1)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "fourier": fourier,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "none": lambda x: x,
}


def uniform(first: int, count: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """`count` numbers from 0 to 1, in float64: a hash (splitmix64) of their positions from `first` on and the seed.
    Integer arithmetic is the same on every device, unlike PyTorch's generators."""
    return uniform_at(torch.arange(first, first + count, device=device), seed)


def uniform_at(positions: Tensor, seed: int) -> Tensor:
    """The same at any positions."""
    key = _mixed(positions * GOLDEN + int(_mixed(torch.tensor(seed))))
    return ((key >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def _mixed(x: Tensor) -> Tensor:
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def standard_normal(first: int, count: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Normal values in float64, by Box and Muller: the cosines of the pairs at these positions."""
    radius, angle = uniform(2 * first, 2 * count, seed, device).view(-1, 2).T
    return (-2 * torch.log1p(-radius)).sqrt() * torch.cos(2 * math.pi * angle)  # 1 - u is never 0


def draw(
    features: int, units: int, seed: int, distribution: str = "normal", device: torch.device | str = "cpu"
) -> Tensor:
    """W (features, units) in float32. `normal` has variance 1 / features, `unit-normal` 1 (RanPAC's), `uniform` is a
    linear layer's initial weight (ACIL's). The values are those of any other device, but for the last digit of one in
    millions: in float64, devices' logarithms and cosines differ only in the last digit."""
    drawn = torch.empty(features * units, device=device)
    for first in range(0, len(drawn), DRAWN):
        count = min(DRAWN, len(drawn) - first)
        if distribution == "uniform":
            values = (2 * uniform(first, count, seed, device) - 1) / math.sqrt(features)
        else:
            values = standard_normal(first, count, seed, device)
            values = values if distribution == "unit-normal" else values / math.sqrt(features)
        drawn[first : first + count] = values
    return drawn.view(features, units)


def projections(units: int, activation: str) -> int:
    """How many columns of W these units need."""
    return (units + 1) // 2 if activation == "fourier" else units


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
    return x if projection is None else ACTIVATIONS[activation](x @ projection)
