"""A triplet loss between the images of a batch, in which old classes take part with their means."""

import torch
import torch.nn.functional as F
from torch import Tensor

SMALLEST = 1e-12  # squared distance; the root of 0 has no gradient


def augmented_triplet(features: Tensor, labels: Tensor, means: Tensor, known: Tensor, margin: float) -> Tensor:
    """The mean over images of max(0, farthest of its class - nearest of another + margin), by features (b, d) of length
    1. Old classes have means (old, d), which count if they are `known`."""
    f = F.normalize(features, dim=1)
    length = f.square().sum(1)
    distances = (length[:, None] + length - 2 * f @ f.T).clamp(min=SMALLEST).sqrt()
    same = labels[:, None] == labels
    farthest = distances.masked_fill(~same, -torch.inf).amax(1)
    nearest = distances.masked_fill(same, torch.inf).amin(1)
    nearest = torch.where(nearest.isinf(), farthest + margin, nearest)
    if len(means):
        to_means = torch.cdist(f, F.normalize(means, dim=1).to(f.dtype)).masked_fill(~known, torch.inf)
        nearest = torch.minimum(nearest, to_means.amin(1))
    return (farthest - nearest + margin).clamp(min=0).mean()
