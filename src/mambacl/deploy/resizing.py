"""Resizing inside an exported graph: the grey levels that torchvision's `resize` makes of uint8 images, from plain
operators.

Along each side, first the width, an output pixel is a weighted mean of input pixels. As in PyTorch's kernel, weights
are whole multiples of 1 / unit, and the mean is rounded to a grey level. In float64 the sums are exact, so the result
is that of the kernel, bit for bit. A runtime that computes in float32 can be one level off.
"""

from __future__ import annotations

import torch
from torch import Tensor

CUBIC = -0.5  # the parameter of the cubic filter
LARGEST_POWER, LARGEST_WEIGHT = 22, 1 << 15  # of two, for the unit; of the weights in units


def resized(images: Tensor, size: int, mode: str) -> Tensor:
    """Whole grey levels (n, c, size, size), float64, of grey levels (n, c, h, w). `mode`: bilinear or bicubic, both
    with antialiasing."""
    images = images.double()
    weights, unit = _weights(images.shape[3], size, mode)
    images = _levels(images @ weights.mT / unit)
    weights, unit = _weights(images.shape[2], size, mode)
    return _levels(weights @ images / unit)


def _levels(means: Tensor) -> Tensor:
    return (means + 0.5).floor().clamp(0, 255)


def _weights(given: int, wanted: int, mode: str) -> tuple[Tensor, Tensor]:
    """Weights (wanted, given) times `unit`, and `unit`."""
    places = torch.arange(given, dtype=torch.float64)
    scale = (places[-1] + 1) / wanted
    centres = (torch.arange(wanted, dtype=torch.float64) + 0.5) * scale
    distances = ((places - centres.unsqueeze(1) + 0.5) * (1 / scale.clamp(min=1))).abs()
    weights = _triangle(distances) if mode == "bilinear" else _cubic(distances)
    weights = weights / weights.sum(1, keepdim=True)
    units = 2.0 ** torch.arange(LARGEST_POWER + 1, dtype=torch.float64)
    unit = (units * (weights.amax((0, 1)) * units + 0.5 < LARGEST_WEIGHT)).amax(0)
    return weights.sign() * (weights.abs() * unit + 0.5).floor(), unit


def _triangle(x: Tensor) -> Tensor:
    return (1 - x).clamp(min=0)


def _cubic(x: Tensor) -> Tensor:
    near = ((CUBIC + 2) * x - (CUBIC + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * CUBIC
    return near * (x < 1) + far * ((x >= 1) & (x < 2))
