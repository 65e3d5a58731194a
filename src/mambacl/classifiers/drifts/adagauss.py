"""AdaGauss (Rypesc et al., *Task-recency bias strikes back: Adapting covariances in Exemplar-Free Class Incremental
Learning*, NeurIPS 2024): a network trains to map x to y, samples of each old class's Gaussian go through it, and the
class gets their mean and covariance. Acts on means and covariances.

The loss is the mean squared error plus a term against collapse, the mean of the Cholesky diagonal of a batch's
covariance, cut off at `beta` and negative. It needs more images in a batch than features.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.classifiers.drifts.base import Move, WithPairs, resampled, shuffled
from mambacl.classifiers.drifts.shift import positive
from mambacl.options import Options, at_least, finite_from

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class AdaGaussOptions(Options):
    """Options of the drift adagauss."""

    map: Literal["mlp", "linear"] = "mlp"
    """a network with one hidden layer, or a linear layer"""
    hidden: Annotated[int, at_least(1)] = 2048
    """hidden units of the network; 32 per feature of 64 in the public code"""
    epochs: Annotated[int, at_least(1)] = 100
    """epochs over the new images; the rate is divided by 10 after 30, 60 and 90"""
    batch: Annotated[int, at_least(2)] = 256
    """images per step; two per feature if that is more"""
    lr: Annotated[float, positive] = 0.01
    """learning rate of SGD"""
    weight_decay: Annotated[float, finite_from(0)] = 5e-4
    """weight decay of SGD"""
    alpha: Annotated[float, finite_from(0)] = 1.0
    """weight of the term against collapse"""
    beta: Annotated[float, positive] = 1.0
    """where a diagonal value stops to count"""
    samples: Annotated[int, at_least(2)] = 10_000
    """samples per class"""
    shrink: Annotated[float, finite_from(0)] = 0.0
    """share of the mean variance that is added to every variance of a new covariance"""


def anti_collapse(features: Tensor, beta: float = 1.0) -> Tensor:
    """Minus the mean of the Cholesky diagonal of the features' (b, d) covariance, each value at most `beta`; 0 if the
    covariance is singular."""
    lower, failed = torch.linalg.cholesky_ex(features.T.cov())
    return features.sum() * 0 if failed else -lower.diagonal().clamp(max=beta).mean()


def shrunk(covariances: Tensor, share: float) -> Tensor:
    """Matrices (..., d, d) with this share of their mean variance added to every variance."""
    variance = share * covariances.diagonal(dim1=-2, dim2=-1).mean(-1)
    identity = torch.eye(covariances.shape[-1], dtype=covariances.dtype, device=covariances.device)
    return covariances + variance[..., None, None] * identity


@torch.enable_grad()
def train(
    network: nn.Module, epochs: Iterable[Iterable[tuple[Tensor, Tensor]]], options: AdaGaussOptions
) -> list[float]:
    """Trains a map on batches of x and y; returns the term against collapse of every step."""
    parameters = list(network.parameters())
    optimizer = torch.optim.SGD(parameters, options.lr, momentum=0.9, weight_decay=options.weight_decay)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, (30, 60, 90), 0.1)
    terms = []
    for batches in epochs:
        for x, y in batches:
            optimizer.zero_grad()
            mapped = network(x)
            loss, term = F.mse_loss(mapped, y), mapped.new_zeros(())
            if options.alpha and len(x) > x.shape[1]:
                term = anti_collapse(mapped, options.beta)
            (loss + options.alpha * term).backward()
            nn.utils.clip_grad_norm_(parameters, 1)
            optimizer.step()
            terms.append(term.detach())
        schedule.step()
    return torch.stack(terms).tolist() if terms else []


def network(d: int, options: AdaGaussOptions, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if options.map == "linear":
            return nn.Linear(d, d)
        return nn.Sequential(nn.Linear(d, options.hidden), nn.GELU(), nn.Linear(options.hidden, d))


class AdaGauss(WithPairs):
    name = "adagauss"
    options_class: ClassVar[type] = AdaGaussOptions
    needs_covariances = True
    needs_features = True

    def move(self, means: Tensor, covariances: Tensor | None = None) -> Move:
        assert covariances is not None
        pairs, options, generator = self.pairs(), self.options, torch.Generator().manual_seed(self.end.seed)
        mapping = network(means.shape[1], options, self.end.seed).to(pairs[0])
        batch = max(options.batch, 2 * means.shape[1])
        train(mapping, shuffled(pairs, batch, options.epochs, generator, full=True), options)
        dtype = pairs[0].dtype
        moved, spread = resampled(means, covariances, options.samples, mapping, generator, dtype)
        return Move(offset=moved - means, covariances=shrunk(spread, options.shrink))
