"""SLDC (Rao et al., *Compensating Distribution Drifts in Class-incremental Learning of Pre-trained Vision
Transformers*): the map is fitted to features of length 1. Both kinds act on means and covariances.

    sldc-linear  A = (X^T X + r I)^-1 X^T Y, then (1 - w) A + w I with w = exp(-n / (trust d)) for n images. A mean m
                 becomes m A, a covariance S becomes A^T S A + 0.01 I. Called alpha-1 there.
    sldc         a weakly nonlinear network: x, a linear layer and an MLP, mixed by a softmax that starts at (1, 0, 0)
                 before it. Samples of each class go through it, scaled to length 1 and back, and the class gets their
                 mean and covariance. Called alpha-2 there.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.classifiers.drifts.base import Drift, Move, TaskEnd, WithPairs, resampled
from mambacl.classifiers.drifts.dpcr import ridge_map
from mambacl.classifiers.drifts.shift import positive
from mambacl.options import Options, at_least, finite_from


@dataclass(frozen=True)
class SLDCLinearOptions(Options):
    """Options of the drift sldc-linear."""

    ridge: Annotated[float, finite_from(0)] = 1e-4
    """r"""
    trust: Annotated[float, positive] = 1.0
    """how many images per feature the map needs against the identity"""
    residual: Annotated[float, finite_from(0)] = 0.01
    """number that is added to every variance"""


class SLDCLinear(Drift):
    name = "sldc-linear"
    options_class: ClassVar[type] = SLDCLinearOptions

    def __init__(self, options: Any = None, end: TaskEnd | None = None) -> None:
        super().__init__(options, end)
        self.sums: Tensor | None = None  # (2, d, d): X^T X and X^T Y
        self.images = 0

    def update(self, old: Tensor, new: Tensor, labels: Tensor) -> None:
        x, y = F.normalize(old, dim=1), F.normalize(new, dim=1)
        found = torch.stack([x.T @ x, x.T @ y])
        self.sums = found if self.sums is None else self.sums + found
        self.images += len(x)

    def move(self, means: Tensor, covariances: Tensor | None = None) -> Move:
        assert self.sums is not None
        identity = torch.eye(means.shape[1], dtype=means.dtype, device=means.device)
        weight = math.exp(-self.images / (self.options.trust * len(identity)))
        matrix = (1 - weight) * ridge_map(self.sums[0], self.sums[1], self.options.ridge) + weight * identity
        return Move(matrix=matrix, residual=self.options.residual * identity)


@dataclass(frozen=True)
class SLDCOptions(Options):
    """Options of the drift sldc."""

    steps: Annotated[int, at_least(1)] = 5000
    """steps of Adam"""
    batch: Annotated[int, at_least(1)] = 32
    """images per step"""
    lr: Annotated[float, positive] = 1e-3
    """learning rate, which follows a cosine to half of it"""
    samples: Annotated[int, at_least(2)] = 10
    """samples per class and feature"""
    residual: Annotated[float, finite_from(0)] = 1e-3
    """number that is added to every variance before and after"""


class WeaklyNonlinear(nn.Module):
    """For features of length 1."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.linear = nn.Linear(d, d, bias=False)
        nn.init.eye_(self.linear.weight)
        self.mlp = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, d))
        self.mix = nn.Parameter(torch.tensor([1.0, 0.0, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = torch.softmax(self.mix, dim=0)
        return a * x + b * self.linear(x) + c * self.mlp(x)


class SLDC(WithPairs):
    name = "sldc"
    options_class: ClassVar[type] = SLDCOptions
    needs_covariances = True
    needs_features = True

    def move(self, means: Tensor, covariances: Tensor | None = None) -> Move:
        assert covariances is not None
        generator, d = torch.Generator().manual_seed(self.end.seed), means.shape[1]
        network = self._trained(generator)

        def mapping(x: Tensor) -> Tensor:
            return network(F.normalize(x, dim=1)) * x.norm(dim=1, keepdim=True)

        extra = self.options.residual * torch.eye(d, dtype=means.dtype, device=means.device)
        count, dtype = self.options.samples * d, next(network.parameters()).dtype
        moved, spread = resampled(means, covariances + extra, count, mapping, generator, dtype)
        return Move(offset=moved - means, covariances=spread + extra)

    @torch.enable_grad()
    def _trained(self, generator: torch.Generator) -> nn.Module:
        x, y = (F.normalize(features, dim=1) for features in self.pairs())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.end.seed)
            network = WeaklyNonlinear(x.shape[1]).to(x)
        options = self.options
        optimizer = torch.optim.Adam(network.parameters(), lr=options.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps, eta_min=options.lr / 2)
        for _ in range(options.steps):
            own = torch.randint(len(x), (options.batch,), generator=generator).to(x.device)
            optimizer.zero_grad()
            F.mse_loss(network(x[own]), y[own]).backward()
            optimizer.step()
            schedule.step()
        return network
