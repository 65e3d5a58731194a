"""What is left to chance in an epoch's images, and the draws of crops and flips, which need no torchvision."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mambacl.streams.batched_ops import NONE


@dataclass(frozen=True)
class Draws:
    """One row an image; an augmentation uses what it needs."""

    ops: NDArray[np.int64]
    """(n, 2): numbers into OPS, or NONE"""
    magnitudes: NDArray[np.float64]
    """(n, 2): theirs, with sign"""
    boxes: NDArray[np.int64]
    """(n, 4): top, left, height and width of the resized crop"""
    corners: NDArray[np.int64]
    """(n, 2): top and left of the crop in the padded image"""
    flips: NDArray[np.bool_]
    """(n,): mirrored"""

    def at(self, rows: NDArray[np.int64] | slice) -> "Draws":
        return Draws(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


def nothing(sizes: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """For images of these sizes (n, 2): what leaves them as they are."""
    n = len(sizes)
    return {
        "ops": np.full((n, 2), NONE),
        "magnitudes": np.zeros((n, 2)),
        "boxes": np.concatenate([np.zeros_like(sizes), sizes], axis=1),
        "corners": np.zeros((n, 2), dtype=np.int64),
        "flips": np.zeros(n, dtype=bool),
    }


def draw_flips(rng: np.random.Generator, padding: int, sizes: NDArray[np.int64]) -> Draws:
    """Of the augmentations flip and crop-flip: a place in the padded image, and whether it is mirrored. The same draws
    as `batched_draws.draw` makes for torchvision's transforms."""
    drawn, n = nothing(sizes), len(sizes)
    if padding:
        drawn["corners"] = rng.integers(0, 2 * padding + 1, (n, 2))
    drawn["flips"] = rng.random(n) < 0.5
    return Draws(**drawn)
