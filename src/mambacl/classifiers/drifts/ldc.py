"""LDC (Gomez-Villa et al., *Exemplar-free Continual Representation Learning via Learnable Drift Compensation*, ECCV
2024): a linear map without bias from x to y, trained by Adam with the mean squared error; a mean m becomes m P^T. Acts
on means."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mambacl.classifiers.drifts.base import Move, WithPairs, shuffled
from mambacl.classifiers.drifts.shift import positive
from mambacl.options import Options, at_least


@dataclass(frozen=True)
class LDCOptions(Options):
    """Options of the drift ldc."""

    epochs: Annotated[int, at_least(1)] = 20
    """epochs over the new images"""
    batch: Annotated[int, at_least(1)] = 128
    """images per step"""
    lr: Annotated[float, positive] = 1e-3
    """learning rate of Adam"""
    start: Literal["random", "identity"] = "random"
    """the map before training: as PyTorch starts a linear layer, like the public code, or the identity"""


@torch.enable_grad()
def trained_map(start: Tensor, batches: Iterable[tuple[Tensor, Tensor]], lr: float) -> Tensor:
    """P (d, d) with y = x P^T, from batches of x and y (b, d)."""
    weight = start.detach().clone().requires_grad_()
    optimizer = torch.optim.Adam([weight], lr=lr)
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(F.linear(x, weight), y).backward()
        optimizer.step()
    return weight.detach()


class LDC(WithPairs):
    name = "ldc"
    options_class: ClassVar[type] = LDCOptions

    def move(self, means: Tensor, covariances: Tensor | None = None) -> Move:
        pairs, options = self.pairs(), self.options
        generator, d = torch.Generator().manual_seed(self.end.seed), means.shape[1]
        random = (2 * torch.rand(d, d, generator=generator) - 1) / math.sqrt(d)
        start = (torch.eye(d) if options.start == "identity" else random).to(pairs[0])
        epochs = shuffled(pairs, options.batch, options.epochs, generator)
        weight = trained_map(start, (batch for epoch in epochs for batch in epoch), options.lr)
        return Move(offset=means @ weight.T.to(means) - means)
