"""Colour jitter and random erasing of a batch of normalised images, on any device.

All random choices are made on the host, so that nothing waits for the device.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GREY = (0.299, 0.587, 0.114)  # weights of red, green and blue in brightness (ITU-R BT.601)
AREA = (0.02, 1 / 3)  # of an erased box, as a share of the image
RATIO = (0.3, 1 / 0.3)  # its height / width


def sample_jitter(rng: np.random.Generator, count: int, strength: float) -> NDArray[np.float32]:
    """(count, 3): each image's factors of brightness, contrast and saturation, within 1 - strength and 1 + strength."""
    return rng.uniform(1 - strength, 1 + strength, (count, 3)).astype(np.float32)


def jitter_colours(images: Tensor, factors: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Images (n, 3, h, w), normalised with this mean and deviation (1, 3, 1, 1), with other colours; factors (n, 3)."""
    brightness, contrast, saturation = (factor.view(-1, 1, 1, 1) for factor in factors.unbind(1))
    x = (images * std + mean).clamp_(0, 1).mul_(brightness)
    x = torch.lerp(_grey(x).mean((2, 3), keepdim=True).expand_as(x), x, contrast)
    x = torch.lerp(_grey(x).expand_as(x), x, saturation)
    return x.clamp_(0, 1).sub_(mean).div_(std)


def _grey(x: Tensor) -> Tensor:
    """(n, 1, h, w)"""
    red, green, blue = (share * channel for share, channel in zip(GREY, x.split(1, dim=1), strict=True))
    return red + green + blue


def sample_boxes(rng: np.random.Generator, count: int, share: float, size: int) -> NDArray[np.int64]:
    """(count, 4): the box (top, left, bottom, right) to erase in each image; empty for all but about `share`."""
    area, ratio = rng.uniform(*AREA, count), np.exp(rng.uniform(np.log(RATIO[0]), np.log(RATIO[1]), count))
    tall, wide = (np.clip(np.rint(size * side), 1, size) for side in (np.sqrt(area * ratio), np.sqrt(area / ratio)))
    top, left = np.floor(rng.random((2, count)) * (size + 1 - np.stack([tall, wide])))
    boxes = np.stack([top, left, top + tall, left + wide], axis=1).astype(np.int64)
    return np.where(rng.random((count, 1)) < share, boxes, 0)


def erase(images: Tensor, boxes: Tensor) -> Tensor:
    """The images (n, c, h, w) with 0, the mean colour, in each box (n, 4)."""
    top, left, bottom, right = (edge.view(-1, 1) for edge in boxes.unbind(1))
    rows, columns = (torch.arange(extent, device=images.device) for extent in images.shape[2:])
    inside = ((rows >= top) & (rows < bottom)).unsqueeze(2) & ((columns >= left) & (columns < right)).unsqueeze(1)
    return images.masked_fill(inside.unsqueeze(1), 0)
