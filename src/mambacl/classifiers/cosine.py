"""One cosine head per task: the cosines between a feature and the classes' weights, times a learned scale."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.classifiers.base import TaskHeads
from mambacl.classifiers.registry import CLASSIFIERS
from mambacl.errors import UserError


def cosines(features: Tensor, weights: Tensor) -> Tensor:
    """(b, classes) from features (b, d) and weights (classes, d). A row of zeros has cosine 0 with every vector."""
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


@dataclass(frozen=True)
class CosineOptions:
    """Options of the cosine classifier."""

    scale: float = 1.0
    """initial value of each task's learned scale"""

    def __post_init__(self) -> None:
        if not 0 < self.scale < float("inf"):
            raise UserError(f"The scale of a cosine classifier must be positive, got {self.scale}.")


class CosineHeads(TaskHeads):
    """One cosine head per task. `scale` is where its learned scale starts."""

    name = "cosine"
    summary = "one cosine head per task, with a learned scale, trained with the backbone"
    options_class: ClassVar[type] = CosineOptions

    def __init__(self, num_features: int, scale: float = 1.0) -> None:
        super().__init__(num_features)
        self.scale = scale

    def new_head(self, classes: int, seed: int) -> nn.Module:
        return CosineHead(self.num_features, classes, seed, self.scale)


CLASSIFIERS.add(CosineHeads.name, CosineHeads)
