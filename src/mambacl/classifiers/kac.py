"""KAC (Hu et al., *KAC: Kolmogorov-Arnold Classifier for Continual Learning*, CVPR 2025): linear heads on Gaussian
bumps of each feature instead of the feature itself.

    z = LayerNorm(f),  phi_di = exp(-((z_d - c_i) / h)^2)       bumps at c_i, evenly spaced from -2 to 2, h apart

The variant public-code is the released layer: logits = W vec(phi), W starts at zero, no bias. The variant paper mixes
the bumps of a channel before the classes see them: logits_c = sum_d W_cd sum_i a_di phi_di. LayerNorm and a are shared:
they go on training in every task, so old logits drift; with `shared: false` each task has its own.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.classifiers.base import TaskHeads
from mambacl.classifiers.registry import CLASSIFIERS
from mambacl.errors import UserError
from mambacl.options import Must, Options, at_least, build_config

BUMPS = {"paper": 4, "public-code": 16}


@dataclass(frozen=True)
class KacOptions(Options):
    """Options of heads on Gaussian bumps."""

    variant: Literal["paper", "public-code"] = "public-code"
    """public-code: a weight per class, feature and bump; paper: a weight per class and feature, and one mixture of
    bumps per feature, from a summary of the paper"""
    bumps: Annotated[int, at_least(2)] | None = None
    """bumps per feature; null: 16 in public-code, 4 in paper"""
    reach: Annotated[float, Must("be positive and finite", lambda value: 0 < value < float("inf"))] = 2.0
    """the bumps' centres are from -reach to reach"""
    shared: bool = True
    """whether all tasks share the norm and the mixtures, which go on training; otherwise each task has its own, which
    are fixed when it ends"""


class KacHead(nn.Module):
    """The head of one task, with a copy of the shared parts as they were in that task."""

    def __init__(self, num_features: int, classes: int, seed: int, options: KacOptions) -> None:
        super().__init__()
        bumps = options.bumps or BUMPS[options.variant]
        self.reach, self.count, self.distance = options.reach, bumps, 2 * options.reach / (bumps - 1)
        self.mixes = options.variant == "paper"
        self.weight = nn.Parameter(torch.zeros(classes, num_features * (1 if self.mixes else bumps)))
        self.norm = nn.LayerNorm(num_features)
        if self.mixes:  # random, because bumps add up to almost the same number everywhere
            draws = torch.randn(num_features, bumps, generator=torch.Generator().manual_seed(seed))
            self.mixing = nn.Parameter(draws * bumps**-0.5)

    def bumps(self, features: Tensor) -> Tensor:
        """(b, d, bumps) from features (b, d)."""
        z = self.norm(features)
        centres = torch.linspace(-self.reach, self.reach, self.count, device=z.device, dtype=z.dtype)
        return torch.exp(-(((z[..., None] - centres) / self.distance) ** 2))

    def basis(self, features: Tensor) -> Tensor:
        """What the classes' weights multiply: (b, d * bumps), or (b, d) if the bumps are mixed."""
        bumps = self.bumps(features)
        return (bumps * self.mixing).sum(2) if self.mixes else bumps.flatten(1)

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(self.basis(features), self.weight)


class KacHeads(TaskHeads):
    """One head on Gaussian bumps per task. Keywords are the options of `KacOptions`."""

    name = "kac"
    summary = "one head per task on Gaussian bumps of each feature, trained with the backbone (KAC)"
    options_class: ClassVar[type] = KacOptions

    def __init__(self, num_features: int, **options: Any) -> None:
        super().__init__(num_features)
        self.options: KacOptions = build_config(KacOptions, options, self.name)

    def new_head(self, classes: int, seed: int) -> KacHead:
        return KacHead(self.num_features, classes, seed, self.options)

    def add_task(self, classes: int, seed: int = 0, warm_start: bool = False) -> None:
        """The new head goes on with the shared parts of the one before."""
        super().add_task(classes, seed, warm_start)
        if self.options.shared and len(self.heads) > 1:
            before = self.heads[-2].state_dict()
            shared = {name: tensor for name, tensor in before.items() if name != "weight"}
            head = self.heads[-1].to(before["weight"].dtype)
            head.load_state_dict({"weight": head.weight, **shared})

    def take_over(self, classifier: nn.Module) -> None:
        raise UserError(
            "The classifier 'kac' has no place for a linear classifier that was trained elsewhere: use separate."
        )

    def forward(self, features: Tensor) -> Tensor:
        if not self.options.shared:
            return super().forward(features)
        heads: Any = self.heads
        basis = heads[-1].basis(features)  # of the shared parts as they are now
        return torch.cat([F.linear(basis, head.weight) for head in heads], dim=1)


CLASSIFIERS.add(KacHeads.name, KacHeads)
