"""A classifier by angle: the cosine between a feature and each class's weight, times a learned scale."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def cosines(features: Tensor, weights: Tensor) -> Tensor:
    """(b, classes) from features (b, d) and weights (classes, d). A row of zeros has the cosine 0 with everything."""
    return F.linear(F.normalize(features, dim=1), F.normalize(weights, dim=1))


class CosineHead(nn.Module):
    def __init__(self, num_features: int, classes: int, seed: int, scale: float = 1.0) -> None:
        super().__init__()
        bound = num_features**-0.5
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.empty(classes, num_features).uniform_(-bound, bound, generator=generator))
        self.scale = nn.Parameter(torch.tensor(float(scale)))

    def forward(self, features: Tensor) -> Tensor:
        return self.scale * cosines(features, self.weight)
