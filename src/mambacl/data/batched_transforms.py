"""The fast twin of `transforms`: transforms many images at once, on a device.

On any device, resizing returns the values of torchvision's antialiased resize of uint8 tensors on the CPU. Weights are
computed in float64 and rounded to 16-bit integers. Columns are resized before rows, and grey levels are rounded after
each pass. Here each pass is one matrix product for all images. Its sums are integers that float32 represents exactly,
so neither the order of summation nor TF32 changes them.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mambacl.data.augment_params import (
    AugmentParams,
    operations,
    sample_autoaugment,
    sample_crops_and_flips,
    sample_resized_crops,
)
from mambacl.data.autoaugment import autoaugment, gather_pixels
from mambacl.data.image_cache import on_device
from mambacl.data.transforms import CROP_AREA, Transforms
from mambacl.ops.precision import full_precision

MOST_TAPS = 256  # source pixels per result; up to here 255 * 255 * pixels is exact in float32


class BatchedTransforms:
    """Does to many images on a device what `Transforms` does to one."""

    def __init__(self, transforms: Transforms, device: torch.device) -> None:
        self.size, self.resize, self.padding = transforms.size, transforms.resize, transforms.padding
        self.transforms, self.device = transforms, device
        self.cubic = transforms.config.interpolation == "bicubic"
        self.bilinear = transforms.config.augment_interpolation == "bilinear"
        self.mean, self.std = on_device(transforms.mean, device), on_device(transforms.std, device)
        self.full = torch.full((), 255.0, device=device)  # a tensor: a GPU divides by it as a CPU does

    def sample(self, rng: np.random.Generator, sizes: NDArray[np.int64]) -> AugmentParams | None:
        """Samples parameters for training on images of these sizes; None if nothing is random."""
        if not self.transforms.augments:
            return None
        if self.transforms.resizes_crops:
            return sample_resized_crops(rng, CROP_AREA, sizes)
        if not self.transforms.uses_autoaugment:
            return sample_crops_and_flips(rng, self.padding, sizes)
        return sample_autoaugment(rng, self.transforms.augment, sizes)

    def evaluate(self, images: Tensor) -> Tensor:
        """Turns images of one size into (n, 3, size, size), still uint8."""
        if images.shape[-2:] != (self.resize, self.resize):
            images = resize(images, self.resize, self.cubic)
        first = round((self.resize - self.size) / 2)  # torchvision's central crop
        return images[..., first : first + self.size, first : first + self.size]

    def train(self, images: Tensor, params: AugmentParams | None) -> Tensor:
        """Like `evaluate`, with this augmentation; without one if None."""
        if params is None:
            return self.evaluate(images)
        if self.transforms.uses_autoaugment:
            images = autoaugment(images, operations(), params.ops, params.magnitudes, self.bilinear)
            return resize_boxes(images, params.boxes, self.size, self.cubic)
        if self.transforms.resizes_crops:
            images = resize_boxes(images, params.boxes, self.size, self.cubic)
            return crop(images, params.corners, params.flips, self.size)
        return crop(self.evaluate(images), params.corners, params.flips, self.size, self.padding)

    def normalize(self, images: Tensor) -> Tensor:
        return images.float().div_(self.full).sub_(self.mean).div_(self.std)


def resize(images: Tensor, size: int, cubic: bool) -> Tensor:
    """Resizes images to (size, size)."""
    height, width = images.shape[-2:]
    return resize_boxes(images, np.tile([[0, 0, height, width]], (len(images), 1)), size, cubic)


def resize_boxes(images: Tensor, boxes: NDArray[np.int64], size: int, cubic: bool) -> Tensor:
    """Cuts the box (top, left, height, width) out of each image and resizes it to (size, size)."""
    n, channels, height, width = images.shape
    top, left, tall, wide = boxes.T
    across, bits = _matrices(left, wide, width, size, cubic, images.device)
    columns = _product(images.reshape(n, channels * height, width), across.transpose(1, 2), bits, wide, size, cubic)
    columns = columns.view(n, channels, height, size).transpose(1, 2).reshape(n, height, channels * size)
    down, bits = _matrices(top, tall, height, size, cubic, images.device)
    rows = _product(down, columns, bits, tall, size, cubic)
    return rows.view(n, size, channels, size).transpose(1, 2).contiguous()


def crop(images: Tensor, corners: NDArray[np.int64], flips: NDArray[np.bool_], size: int, padding: int = 0) -> Tensor:
    """Pads each image with black and cuts out (size, size) at its corner (top, left), mirrored if `flips` says so."""
    height, width = images.shape[-2:]
    top, left = (on_device(corner - padding, images.device).view(-1, 1) for corner in corners.T)
    offsets = torch.arange(size, device=images.device)
    line = top + offsets
    column = left + torch.where(on_device(flips, images.device).view(-1, 1), size - 1 - offsets, offsets)
    inside = ((line >= 0) & (line < height)).unsqueeze(2) & ((column >= 0) & (column < width)).unsqueeze(1)
    index = torch.where(inside, (line * width).unsqueeze(2) + column.unsqueeze(1), -1)
    return gather_pixels(images, index.flatten(1), size, size)


def taps(lengths: NDArray[np.int64], size: int, cubic: bool) -> int:
    """The largest number of source pixels per result."""
    scale = max(1.0, float(lengths.max()) / size)
    return 2 * math.ceil(scale * (2 if cubic else 1)) + 1


def integer_weights(lengths: Tensor, longest: int, size: int, cubic: bool) -> tuple[Tensor, Tensor]:
    """For each length, the weights (size, longest) of its pixels in each result, times 2^bits and rounded; and bits."""
    length = lengths.double().view(-1, 1, 1)
    scale = length / size
    stretch = scale.clamp(min=1.0)
    support = stretch * (2.0 if cubic else 1.0)
    centre = scale * (torch.arange(size, dtype=torch.float64, device=lengths.device).view(-1, 1) + 0.5)
    place = torch.arange(longest, dtype=torch.float64, device=lengths.device)
    first = (centre - support + 0.5).trunc().clamp(min=0)
    last = torch.minimum((centre + support + 0.5).trunc(), length)
    x = ((place - centre + 0.5) * (1.0 / stretch)).abs()
    weights = (_cubic(x) if cubic else 1.0 - x).where((place >= first) & (place < last) & (x < (2 if cubic else 1)), 0)
    weights = weights / weights.sum(2, keepdim=True)
    most = weights.amax((1, 2))
    powers = torch.arange(1, 23, device=lengths.device)
    fits = (most.view(-1, 1) * (1 << powers) + 0.5).trunc() < 1 << 15  # a signed 16-bit integer
    bits = fits.sum(1)
    scaled = weights * (1 << bits).view(-1, 1, 1)
    return (scaled + torch.where(scaled < 0, -0.5, 0.5)).trunc().to(torch.int16), bits.int()


def _cubic(x: Tensor) -> Tensor:
    """Keys' kernel with a = -1/2, for x from 0 to 2."""
    return torch.where(x < 1, (1.5 * x - 2.5) * x * x + 1.0, -0.5 * (((x - 5.0) * x + 8.0) * x - 4.0))


def _matrices(
    starts: NDArray[np.int64], lengths: NDArray[np.int64], extent: int, size: int, cubic: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """For each image, (size, extent): the weights of its pixels, zero outside; and their bits."""
    different, which = np.unique(lengths, return_inverse=True)
    longest = int(different[-1])
    weights, bits = integer_weights(on_device(different, device), longest, size, cubic)
    if len(different) == 1 and longest == extent:
        return weights.expand(len(starts), -1, -1), bits.expand(len(starts))
    chosen = on_device(which.reshape(-1), device)
    place = torch.arange(extent, device=device) - on_device(starts, device).view(-1, 1)
    found = weights[chosen].gather(2, place.clamp(0, longest - 1).unsqueeze(1).expand(-1, size, -1))
    return found.masked_fill_(((place < 0) | (place >= longest)).unsqueeze(1), 0), bits[chosen]


def _product(one: Tensor, other: Tensor, bits: Tensor, lengths: NDArray[np.int64], size: int, cubic: bool) -> Tensor:
    """The product of weights and grey levels, in either order, divided by 2^bits and rounded to a grey level.

    Weights are split into their upper and lower eight bits, so that every factor has eight bits and every sum fits
    float32.
    """
    precise = torch.float32 if taps(lengths, size, cubic) <= MOST_TAPS else torch.float64
    with full_precision(one):
        halves = [(x >> 8, x & 255) if x.dtype == torch.int16 else (x, x) for x in (one, other)]
        upper, lower = (torch.bmm(a.to(precise), b.to(precise)).int() for a, b in zip(*halves, strict=True))
    bits = bits.view(-1, 1, 1)
    return ((upper * 256 + lower + (1 << (bits - 1))) >> bits).clamp_(0, 255).to(torch.uint8)
