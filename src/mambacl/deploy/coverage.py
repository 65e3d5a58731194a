"""How much of what a model sees a few images cover, judged by the images themselves. Pure functions of features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ENERGY = 0.99  # share of a half's own energy that its directions hold
FEWEST = 4  # images: two halves of two
DRAWS = 5


@dataclass(frozen=True)
class Coverage:
    shares: dict[int, float]
    """by number of images, the share of the feature energy of other images in the directions of these"""

    @property
    def share(self) -> float:
        """With half of the images."""
        return self.shares[max(self.shares)]

    def describe(self, images: int) -> str:
        """One sentence about a folder with that many images."""
        most, fewer = max(self.shares), min(self.shares)
        more = "" if fewer == most else f"; {self.shares[fewer]:.1%} with {fewer} images"
        return (
            f"The {images} images to protect cover at least about {self.share:.1%} of the feature energy of other "
            f"images of their kind (the share of one half that lies in the directions of the other half, {most} images"
            f"{more})."
        )


def coverage(features: Tensor, draws: int = DRAWS) -> Coverage:
    """Of features (n, d) with n >= FEWEST. Halves and smaller parts are drawn with a fixed seed, and the shares are
    means over the draws. About zero, as the null space sees them."""
    features = features.double().cpu()
    half = len(features) // 2
    sizes = sorted({half, max(2, half // 2), max(2, half // 4)})
    generator = torch.Generator().manual_seed(0)
    sums = dict.fromkeys(sizes, 0.0)
    for _ in range(draws):
        order = torch.randperm(len(features), generator=generator)
        others = features[order[half:]]
        for size in sizes:
            sums[size] += share_inside(others, directions(features[order[:size]]))
    return Coverage({size: total / draws for size, total in sums.items()})


def directions(features: Tensor, energy: float = ENERGY) -> Tensor:
    """Orthonormal columns (d, r): the leading directions of features (n, d) that hold this share of their energy."""
    _, values, vectors = torch.linalg.svd(features, full_matrices=False)
    held = values.square().cumsum(0)
    kept = int(torch.searchsorted(held, energy * held[-1])) + 1 if float(held[-1]) else 0
    return vectors[:kept].mT


def share_inside(features: Tensor, basis: Tensor) -> float:
    """The share of the energy of features (n, d) in the span of orthonormal columns (d, r); 1 if there is none."""
    total = float(features.square().sum())
    return float((features @ basis).square().sum()) / total if total else 1.0
