"""Heads that are fixed before anything is learned: the vertices of a simplex, all at the same angle (an equiangular
tight frame). The feature learns to point to its class's vertex; room for later classes is there from the start."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.classifiers.base import TaskHeads
from mambacl.errors import UserError


def simplex(num_features: int, classes: int, seed: int = 0) -> Tensor:
    """Unit vectors (classes, num_features) whose products with one another are all -1 / (classes - 1)."""
    if not 2 <= classes <= num_features:
        raise UserError(
            f"A simplex of {classes} classes needs at least two of them and as many features, but the model has "
            f"{num_features}: choose a wider backbone or fewer classes."
        )
    generator = torch.Generator().manual_seed(seed)
    axes, _ = torch.linalg.qr(torch.randn(num_features, classes, generator=generator, dtype=torch.float64))
    return (classes / (classes - 1)) ** 0.5 * (axes - axes.mean(1, keepdim=True)).T


class FixedRows(nn.Module):
    """Scores are cosines with fixed unit vectors."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(F.normalize(features, dim=1), self.weight.to(features.dtype))


class EtfHeads(TaskHeads):
    """Each task takes its classes' vertices, in the order of the labels. Nothing in it trains."""

    name = "etf"
    summary = "fixed vertices of a simplex, for methods that train features towards them"

    def __init__(self, num_features: int, total: int = 0, seed: int = 0) -> None:
        """`total`: the classes of all tasks; 0 if unknown, for as many as fit."""
        super().__init__(num_features)
        self.vertices = simplex(num_features, total or num_features, seed).float()  # a state has those of its heads

    def new_head(self, classes: int, seed: int) -> nn.Module:
        first = self.classes
        if first + classes > len(self.vertices):
            raise UserError(
                f"The fixed heads have room for {len(self.vertices)} classes, but {first + classes} are to be learned: "
                "train with all of them in the stream."
            )
        return FixedRows(self.vertices[first : first + classes].clone())

    def add_task(self, classes: int, seed: int = 0, warm_start: bool = False) -> None:
        self.heads.append(self.new_head(classes, seed))

    def rows(self) -> Tensor:
        """The vectors of all classes so far, by label."""
        return torch.cat([head.weight for head in self.heads])  # type: ignore[misc]

    def regression(self, features: Tensor, labels: Tensor, balance: bool = False, mix: float = 0.0) -> Tensor:
        """Dot regression: half the mean of (cosine with the class's vertex - 1)^2. `balance`: classes count alike,
        however many rows they have. `mix`: with this probability, each feature is averaged with another row's, and the
        losses for both classes too."""
        vertices = self.rows().to(features.dtype)
        weights = features.new_ones(len(labels))
        if balance:
            counts = F.one_hot(labels, len(vertices)).sum(0)
            weights = len(labels) / (counts > 0).sum() / counts[labels]
        if not mix:
            return (weights * half_squares(features, vertices[labels])).mean()
        other = torch.rand(len(labels), device=labels.device).argsort()
        share = 0.5 * (torch.rand((), device=labels.device) < mix)
        mixed = torch.lerp(features, features[other], share.to(features.dtype))
        own, others = ((weights[rows] * half_squares(mixed, vertices[labels[rows]])).mean() for rows in (..., other))
        return torch.lerp(own, others, share.to(own.dtype))


def half_squares(features: Tensor, vertices: Tensor) -> Tensor:
    """(cosine - 1)^2 / 2 of each feature with a vertex."""
    return 0.5 * ((F.normalize(features, dim=1) * vertices).sum(1) - 1).square()
