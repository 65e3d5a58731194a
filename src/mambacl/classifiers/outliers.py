"""Virtual outliers: points in feature space that are far from all features of a task (NPOS, as OVOR uses it)."""

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 4096  # points at a time: the distances of all outliers together would not fit


def neighbour_distances(points: Tensor, features: Tensor, neighbour: int) -> Tensor:
    """The squared distance of each point (n, d) to its `neighbour`-th nearest feature (m, d); to the farthest if there
    are fewer."""
    k = min(neighbour, len(features))
    parts = [torch.cdist(part, features).square().topk(k, dim=1, largest=False).values[:, -1]
             for part in points.split(ROWS)]  # fmt: skip
    return torch.cat(parts)


def around_the_boundary(features: Tensor, offsets: Tensor, neighbour: int, boundary: int, count: int) -> Tensor:
    """`count` outliers. The `boundary` features with the most distant neighbours get every offset (n, d) added; of
    these points those are kept that are farthest from their nearest features. Distances are between directions."""
    directions = F.normalize(features, dim=1)
    outer = neighbour_distances(directions, directions, neighbour).topk(min(boundary, len(features))).indices
    points = (features[outer, None] + offsets).flatten(0, 1)
    distances = neighbour_distances(F.normalize(points, dim=1), directions, neighbour)
    return points[distances.topk(min(count, len(points))).indices]


def around_the_origin(features: Tensor, offsets: Tensor, neighbour: int, boundary: int, count: int) -> Tensor:
    """The same as OVOR's released code has it: offsets are not added to anything, each stands `boundary` times in the
    list, and the distances are those of the offsets themselves to directions."""
    distances = neighbour_distances(offsets, F.normalize(features, dim=1), neighbour)
    order = distances.sort(descending=True).indices.repeat_interleave(min(boundary, len(features)))
    return offsets[order[:count]]


def energies(logits: Tensor) -> Tensor:
    """-log sum exp, (b,): low for images of known classes."""
    return -logits.logsumexp(dim=1)


def energy_loss(inside: Tensor, outside: Tensor, most: float, least: float) -> Tensor:
    """From energies: those of features should be at most `most`, those of outliers at least `least`. Huber loss of
    what is too much."""
    above, below = F.relu(inside - most), F.relu(least - outside)
    return F.huber_loss(above, torch.zeros_like(above)) + F.huber_loss(below, torch.zeros_like(below))
