"""The random parameters of an augmentation, sampled for all images of an epoch at once.

Ranges, probabilities and policies are read from torchvision's own transforms; samples follow their distributions. Crops
and flips need no torchvision, which takes seconds to load.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mambacl.data.autoaugment import NONE


@dataclass(frozen=True)
class Crop:
    """A RandomResizedCrop without torchvision: limits of the area, as shares of the image, and of width by height."""

    scale: tuple[float, float]
    ratio: tuple[float, float] = (3 / 4, 4 / 3)


BINS = 10  # AutoAugment's magnitudes per operation


@dataclass(frozen=True)
class AugmentParams:
    """One row per image; an augmentation uses what it needs."""

    ops: NDArray[np.int64]
    """(n, 2): positions in `operations()`, or NONE"""
    magnitudes: NDArray[np.float64]
    """(n, 2): the magnitudes of these operations, with their signs"""
    boxes: NDArray[np.int64]
    """(n, 4): top, left, height and width of the resized crop"""
    corners: NDArray[np.int64]
    """(n, 2): top and left of the crop in the padded image"""
    flips: NDArray[np.bool_]
    """(n,): whether the image is mirrored"""

    def rows(self, rows: NDArray[np.int64] | slice) -> "AugmentParams":
        return AugmentParams(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


def _identity(sizes: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """The parameters that leave images of these sizes (n, 2) unchanged."""
    n = len(sizes)
    return {
        "ops": np.full((n, 2), NONE),
        "magnitudes": np.zeros((n, 2)),
        "boxes": np.concatenate([np.zeros_like(sizes), sizes], axis=1),
        "corners": np.zeros((n, 2), dtype=np.int64),
        "flips": np.zeros(n, dtype=bool),
    }


def sample_crops_and_flips(rng: np.random.Generator, padding: int, sizes: NDArray[np.int64]) -> AugmentParams:
    """Samples for the augmentations flip and crop-flip: where to crop the padded image, and whether to mirror it."""
    params, n = _identity(sizes), len(sizes)
    if padding:
        params["corners"] = rng.integers(0, 2 * padding + 1, (n, 2))
    params["flips"] = rng.random(n) < 0.5
    return AugmentParams(**params)


def sample_resized_crops(
    rng: np.random.Generator, area: tuple[float, float], sizes: NDArray[np.int64]
) -> AugmentParams:
    """Samples for the augmentation resized-crop-flip: the box to resize, and whether to mirror it."""
    params = _identity(sizes)
    params["boxes"] = sample_boxes(rng, Crop(area), sizes)
    params["flips"] = rng.random(len(sizes)) < 0.5
    return AugmentParams(**params)


def sample_autoaugment(rng: np.random.Generator, augment: Any, sizes: NDArray[np.int64]) -> AugmentParams:
    """Samples for torchvision's composition of an AutoAugment and a RandomResizedCrop."""
    policy, crop = augment.transforms
    params = _identity(sizes)
    params["ops"], params["magnitudes"] = sample_operations(rng, policy, sizes)
    params["boxes"] = sample_boxes(rng, crop, sizes)
    return AugmentParams(**params)


def operations() -> tuple[str, ...]:
    """The names of AutoAugment's operations."""
    return tuple(_augmentation_space())


def signed() -> NDArray[np.bool_]:
    """Which operations take a magnitude of either sign."""
    return np.array([either for _, either in _augmentation_space().values()])


def _augmentation_space() -> dict[str, tuple[Any, bool]]:
    from torchvision.transforms import v2

    return v2.AutoAugment._AUGMENTATION_SPACE


def sample_operations(
    rng: np.random.Generator, augment: Any, sizes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    names, policies = operations(), augment._policies
    ops = np.array([[names.index(op) for op, _, _ in pair] for pair in policies])
    probabilities = np.array([[probability for _, probability, _ in pair] for pair in policies])
    bins = np.array([[number or 0 for _, _, number in pair] for pair in policies])
    chosen = rng.integers(0, len(policies), len(sizes))
    applied = rng.random((len(sizes), 2)) <= probabilities[chosen]
    negative = (rng.random((len(sizes), 2)) <= 0.5) & signed()[ops[chosen]]
    different, which = np.unique(sizes, axis=0, return_inverse=True)
    tables = np.stack([magnitude_table(int(height), int(width)) for height, width in different])
    magnitudes = tables[which.reshape(-1, 1), ops[chosen], bins[chosen]] * np.where(negative, -1.0, 1.0)
    return np.where(applied, ops[chosen], NONE), np.where(applied, magnitudes, 0.0)


@lru_cache(maxsize=1 << 14)
def magnitude_table(height: int, width: int) -> NDArray[np.float64]:
    """(operations, bins): magnitudes without sign; zeros for an operation that has none."""
    space = _augmentation_space()
    table = np.zeros((len(space), BINS))
    for row, (magnitudes, _) in zip(table, space.values(), strict=True):
        values = magnitudes(BINS, height, width)
        if values is not None:
            row[:] = values.double().numpy()
    return table


def sample_boxes(rng: np.random.Generator, crop: Any, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Samples for a RandomResizedCrop: tries ten times to fit a random area and aspect ratio into the image, then takes
    the central crop."""
    boxes = _central_boxes(crop, sizes)
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


def _central_boxes(crop: Any, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The largest central box whose aspect ratio is allowed."""
    height, width = sizes.T
    ratio = width / height
    tall = np.where(ratio < min(crop.ratio), np.rint(width / min(crop.ratio)).astype(np.int64), height)
    wide = np.where(ratio > max(crop.ratio), np.rint(height * max(crop.ratio)).astype(np.int64), width)
    return np.stack([(height - tall) // 2, (width - wide) // 2, tall, wide], axis=1)
