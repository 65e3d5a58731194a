"""Separate heads that are aligned when a task ends: trained together on samples of the Gaussians of all classes so far.
SLCA (Zhang et al., ICCV 2023).

Each head trains only with its own task's classes, so logits of different heads are not comparable. The alignment makes
them so without any old image. The heads themselves stay as they were trained: each alignment starts from them, or from
the one before.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.classifiers.class_statistics import ClassStatistics, CovarianceOptions, FollowsWithStatistics
from mambacl.classifiers.registry import CLASSIFIERS
from mambacl.classifiers.sampling import draw
from mambacl.classifiers.separate import SeparateHeads
from mambacl.errors import UserError
from mambacl.ops.precision import full_precision
from mambacl.options import Must, at_least, build_config, finite_from

positive = Must("be positive and finite", lambda value: 0 < value < float("inf"))


@dataclass(frozen=True)
class AlignedOptions(CovarianceOptions):
    """Options of heads that are aligned on samples of class Gaussians."""

    ridge: Annotated[float, finite_from(0)] = 1e-4
    """number that is added to every variance"""
    age: Annotated[float, Must("be at least 0 and below 1", lambda value: 0 <= value < 1)] = 0.0
    """how much means of old classes shrink in the samples: those of task t of T are multiplied by 1 - age (1 - t/T)"""
    samples: Annotated[int, at_least(1)] = 256
    """samples per class and epoch; also the size of a batch"""
    epochs: Annotated[int, at_least(0)] = 5
    """epochs of an alignment"""
    lr: Annotated[float, positive] = 0.1
    """learning rate of an alignment, which follows a cosine to zero"""
    momentum: Annotated[float, Must("be at least 0 and below 1", lambda value: 0 <= value < 1)] = 0.9
    """momentum of an alignment"""
    weight_decay: Annotated[float, finite_from(0)] = 5e-4
    """weight decay of an alignment"""
    logit_norm: Annotated[float, positive] | None = None
    """logits are divided by the mean norm of a task's logits, times this number; null: they are not"""
    accumulate: bool = False
    """start from the previous alignment; false: from the heads as they were trained, as SLCA does"""


SLCA = AlignedOptions(own=1.0, pooled=0.0, age=0.1, lr=0.01, logit_norm=0.1)
"""SLCA's public code"""


def age_factors(widths: Sequence[int], age: float) -> Tensor:
    """(classes,): the factor of each class's mean, from 1 - age (1 - 1/T) for the first task to 1 for the last."""
    tasks = torch.arange(1, len(widths) + 1, dtype=torch.float64) / len(widths)
    return (1 - age * (1 - tasks)).repeat_interleave(torch.tensor(widths))


def scaled_logits(logits: Tensor, widths: Sequence[int], logit_norm: float | None) -> Tensor:
    """Logits (b, classes), divided by the mean norm of each task's logits and by `logit_norm`."""
    if logit_norm is None:
        return logits
    norms = [part.norm(dim=1) + 1e-7 for part in logits.split(list(widths), dim=1)]
    return logits / torch.stack(norms).mean(0)[:, None] / logit_norm


def align(
    weight: Tensor, bias: Tensor, epochs: Iterable[Iterable[tuple[Tensor, Tensor]]], widths: Sequence[int], options: Any
) -> tuple[Tensor, Tensor]:
    """Trains a linear classifier by SGD on batches of features and labels, and returns its new weight and bias."""
    with torch.enable_grad():
        weight, bias = weight.detach().clone().requires_grad_(), bias.detach().clone().requires_grad_()
        optimizer = torch.optim.SGD(
            [weight, bias], lr=options.lr, momentum=options.momentum, weight_decay=options.weight_decay
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(1, options.epochs))
        for batches in epochs:
            for features, labels in batches:
                logits = scaled_logits(F.linear(features, weight, bias), widths, options.logit_norm)
                optimizer.zero_grad()
                F.cross_entropy(logits, labels).backward()
                optimizer.step()
            schedule.step()
    return weight.detach(), bias.detach()


class AlignedHeads(FollowsWithStatistics, SeparateHeads):
    """Separate heads that are trained together on samples of the classes' Gaussians when a task ends. Keywords are the
    options of `AlignedOptions`."""

    name = "aligned"
    summary = "one linear head per task, trained with the backbone, then aligned on samples of class Gaussians"
    options_class: ClassVar[type] = AlignedOptions
    updates = True
    weight: Tensor  # (classes of finished tasks, d): the last alignment
    bias: Tensor  # minus infinity for a class without images

    def __init__(self, num_features: int, **options: Any) -> None:
        super().__init__(num_features)
        self.options = build_config(self.options_class, options, self.name)
        self.statistics = ClassStatistics(num_features)
        self.register_buffer("weight", torch.zeros(0, num_features))
        self.register_buffer("bias", torch.zeros(0))
        self.prepare_drift()

    def new_head(self, classes: int, seed: int) -> nn.Module:
        return super().new_head(classes, seed).to(self.weight.device)

    def update(self, features: Tensor, labels: Tensor) -> None:
        if len(labels) and int(labels.max()) >= self.classes:
            raise UserError(f"Label {int(labels.max())} has no head: add_task comes before update.")
        self.statistics.update(features, labels)

    def finish_task(self) -> None:
        """Aligns all heads. The samples depend only on the statistics and the number of tasks, so that a resumed run
        draws the same."""
        if not self.heads:
            return
        self.statistics.resize(self.classes)
        weight, bias = self._start()
        seen = self.statistics.counts > 0
        widths = [int(part.sum()) for part in seen.split(self.widths)]
        if len(self.heads) > 1 and any(widths):
            with full_precision(weight):
                kept = [width for width in widths if width]
                new = align(weight[seen], bias[seen], self._epochs(seen, weight.dtype), kept, self.options)
            if not all(torch.isfinite(tensor).all() for tensor in new):
                raise UserError(
                    f"The alignment of the heads diverged: set the classifier's lr below {self.options.lr}."
                )
            weight[seen], bias[seen] = new
        self.weight, self.bias = weight, bias.masked_fill(~seen, -torch.inf)

    @torch.no_grad()
    def _start(self) -> tuple[Tensor, Tensor]:
        """Weight and bias before an alignment."""
        heads: Any = self.heads
        weight, bias = torch.cat([head.weight for head in heads]), torch.cat([head.bias for head in heads])
        if self.options.accumulate:
            known = self.bias > -torch.inf
            weight[: len(known)][known], bias[: len(known)][known] = self.weight[known], self.bias[known]
        return weight, bias

    @torch.no_grad()
    def _epochs(self, seen: Tensor, dtype: torch.dtype) -> Iterable[Iterable[tuple[Tensor, Tensor]]]:
        """Shuffled samples of the classes seen, which are numbered without gaps."""
        options, statistics = self.options, self.statistics
        generator = torch.Generator().manual_seed(len(self.heads))
        factors = age_factors(self.widths, options.age).to(seen.device)
        means = (statistics.means() * factors[:, None])[seen].to(dtype)
        roots = statistics.roots(options.own, options.pooled, options.ridge)[seen].to(dtype)
        labels = torch.arange(len(means), device=seen.device).repeat_interleave(options.samples)
        for _ in range(options.epochs):
            features = draw(means, roots, options.samples, generator).flatten(0, 1)
            order = torch.randperm(len(labels), generator=generator).to(seen.device)
            yield [(features[part], labels[part]) for part in order.split(options.samples)]

    def forward(self, features: Tensor) -> Tensor:
        """Heads of a task that has not ended are not aligned yet."""
        finished = F.linear(features, self.weight, self.bias)
        places = accumulate(self.widths)  # where each head ends
        others = [head(features) for head, end in zip(self.heads, places, strict=True) if end > len(self.bias)]
        return torch.cat([finished, *others], dim=1)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Replaces the heads, the statistics and the alignment by those of the state."""
        self.statistics.resize(len(state["statistics.counts"]))
        finished = len(state["bias"])
        self.weight, self.bias = self.weight.new_zeros(finished, self.num_features), self.bias.new_zeros(finished)
        return super().load_state_dict(state, strict, assign)


CLASSIFIERS.add(AlignedHeads.name, AlignedHeads)
