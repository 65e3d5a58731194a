"""What an augmentation leaves to chance, drawn for all images of an epoch at once.

Ranges, probabilities and policies are read from torchvision's own transforms; the draws follow their distributions.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchvision.transforms import v2

from mambacl.streams.batched_ops import NONE
from mambacl.streams.draws import Draws, nothing

BINS = 10  # magnitudes of an operation in AutoAugment
OPS: tuple[str, ...] = tuple(v2.AutoAugment._AUGMENTATION_SPACE)
SIGNED = np.array([signed for _, signed in v2.AutoAugment._AUGMENTATION_SPACE.values()])


def draw(rng: np.random.Generator, augment: Any, sizes: NDArray[np.int64]) -> Draws:
    """For images of these sizes (n, 2), what a composition of torchvision's transforms would draw for each."""
    n, drawn = len(sizes), nothing(sizes)
    for part in augment.transforms if isinstance(augment, v2.Compose) else [augment]:
        if isinstance(part, v2.AutoAugment):
            drawn["ops"], drawn["magnitudes"] = draw_operations(rng, part, sizes)
        elif isinstance(part, v2.RandomResizedCrop):
            drawn["boxes"] = draw_boxes(rng, part, sizes)
        elif isinstance(part, v2.RandomCrop):
            drawn["corners"] = rng.integers(0, 2 * padding_of(part) + 1, (n, 2))
        else:
            drawn["flips"] = rng.random(n) < part.p
    return Draws(**drawn)


def padding_of(crop: v2.RandomCrop) -> int:
    """The same on all four sides."""
    return crop.padding[0] if crop.padding else 0


def draw_operations(
    rng: np.random.Generator, augment: v2.AutoAugment, sizes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    policies = augment._policies
    ops = np.array([[OPS.index(op) for op, _, _ in pair] for pair in policies])
    probabilities = np.array([[probability for _, probability, _ in pair] for pair in policies])
    bins = np.array([[number or 0 for _, _, number in pair] for pair in policies])
    chosen = rng.integers(0, len(policies), len(sizes))
    applied = rng.random((len(sizes), 2)) <= probabilities[chosen]
    negative = (rng.random((len(sizes), 2)) <= 0.5) & SIGNED[ops[chosen]]
    different, which = np.unique(sizes, axis=0, return_inverse=True)
    tables = np.stack([magnitude_table(int(height), int(width)) for height, width in different])
    magnitudes = tables[which.reshape(-1, 1), ops[chosen], bins[chosen]] * np.where(negative, -1.0, 1.0)
    return np.where(applied, ops[chosen], NONE), np.where(applied, magnitudes, 0.0)


@lru_cache(maxsize=1 << 14)
def magnitude_table(height: int, width: int) -> NDArray[np.float64]:
    """(operations, bins): without sign; zeros for an operation that has none."""
    table = np.zeros((len(OPS), BINS))
    for row, (magnitudes, _) in zip(table, v2.AutoAugment._AUGMENTATION_SPACE.values(), strict=True):
        values = magnitudes(BINS, height, width)
        if values is not None:
            row[:] = values.double().numpy()
    return table


def draw_boxes(rng: np.random.Generator, crop: v2.RandomResizedCrop, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ten attempts at a random area and aspect ratio that fit the image, then the central crop."""
    boxes = _central(crop, sizes)
    (least, most), (narrow, broad) = crop.scale, np.log(crop.ratio)
    left = np.arange(len(sizes))
    for _ in range(10):
        height, width = sizes[left].T
        area = height * width * rng.uniform(least, most, len(left))
        ratio = np.exp(rng.uniform(narrow, broad, len(left)))
        wide = np.rint(np.sqrt(area * ratio)).astype(np.int64)
        tall = np.rint(np.sqrt(area / ratio)).astype(np.int64)
        fits = (wide > 0) & (wide <= width) & (tall > 0) & (tall <= height)
        top = rng.integers(0, np.where(fits, height - tall, 0) + 1)
        start = rng.integers(0, np.where(fits, width - wide, 0) + 1)
        boxes[left[fits]] = np.stack([top, start, tall, wide], axis=1)[fits]
        left = left[~fits]
        if not len(left):
            break
    return boxes


def _central(crop: v2.RandomResizedCrop, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The largest central box whose aspect ratio is allowed."""
    height, width = sizes.T
    ratio = width / height
    tall = np.where(ratio < min(crop.ratio), np.rint(width / min(crop.ratio)).astype(np.int64), height)
    wide = np.where(ratio > max(crop.ratio), np.rint(height * max(crop.ratio)).astype(np.int64), width)
    return np.stack([(height - tall) // 2, (width - wide) // 2, tall, wide], axis=1)
