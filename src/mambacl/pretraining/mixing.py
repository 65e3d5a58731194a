"""Mixup and cutmix: each image is mixed with another of its batch, and so is its target.

The partner is the image at the same place in the reversed batch, which is random because batches are shuffled. All
random choices are made on the host, so that nothing waits for the device.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Box = tuple[int, int, int, int]  # top, left, bottom, right


@dataclass(frozen=True)
class Mix:
    own: float
    """share of an image's own label"""
    box: Box | None = None
    """cutmix: the pixels that come from the partner; mixup without one"""


def sample_mix(rng: np.random.Generator, mixup: float, cutmix: float, share: float, size: int) -> Mix | None:
    """How one batch of images (size, size) is mixed; None if it is not. Draws as many numbers whatever happens."""
    mixed, cut = rng.random(2)
    kinds = [kind for kind, parameter in (("mixup", mixup), ("cutmix", cutmix)) if parameter > 0]
    if not kinds or mixed >= share:
        return None
    kind = kinds[int(cut * len(kinds))]
    if kind == "mixup":
        return Mix(float(rng.beta(mixup, mixup)))
    box = _box(rng, float(rng.beta(cutmix, cutmix)), size)
    top, left, bottom, right = box
    return Mix(1 - (bottom - top) * (right - left) / size**2, box)  # the border may have cut the box


def _box(rng: np.random.Generator, own: float, size: int) -> Box:
    """A square that leaves this share of the image, around a random point; parts outside the image are cut off."""
    half = size * (1 - own) ** 0.5 / 2
    centre = rng.integers(0, size, 2)
    top, left = np.clip(np.rint(centre - half).astype(int), 0, size)
    bottom, right = np.clip(np.rint(centre + half).astype(int), 0, size)
    return int(top), int(left), int(bottom), int(right)


def mix_images(images: Tensor, mix: Mix | None) -> Tensor:
    """A new tensor, or the same one if nothing is mixed."""
    if mix is None:
        return images
    partners = images.flip(0)
    if mix.box is None:
        return torch.lerp(partners, images, mix.own)
    top, left, bottom, right = mix.box
    mixed = images.clone()
    mixed[:, :, top:bottom, left:right] = partners[:, :, top:bottom, left:right]
    return mixed


def soft_targets(labels: Tensor, classes: int, mix: Mix | None, smoothing: float) -> Tensor:
    """The share of each class, (n, classes) in float32. Each row sums to 1."""
    targets = torch.zeros(len(labels), classes, device=labels.device).scatter_(1, labels.unsqueeze(1), 1.0)
    if mix is not None:
        targets = torch.lerp(targets.flip(0), targets, mix.own)
    return targets.mul_(1 - smoothing).add_(smoothing / classes)
