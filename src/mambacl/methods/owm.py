"""OWM, orthogonal weights modification (Zeng et al., *Continual learning of context-dependent processing in neural
networks*, Nature Machine Intelligence 2019): each linear layer has a projector that absorbs the mean input of every
batch and multiplies every gradient, from the first step on.

Its recipe: SGD at 0.02 with momentum 0.9, batches of 64, 25 passes, gradients clipped at 10, small networks from random
weights. The released code clips after the projection, `training.clip` before it, and projects its single head, too;
here each task has a head.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from mambacl.methods.base import Task
from mambacl.methods.mamba_cl import MambaCL
from mambacl.methods.registry import METHODS
from mambacl.nullspace import Setting
from mambacl.options import Must, Options


@dataclass(frozen=True)
class OWMOptions(Options):
    """Options of OWM."""

    alpha: Annotated[float, Must("be larger than 0 and at most 1", lambda alpha: 0 < alpha <= 1)] = 1e-3
    """last value of alpha, which falls from 1 over the steps of each task; the smaller, the stricter"""


class OWM(MambaCL):
    name = "owm"
    summary = "all linear layers, gradients times projectors that absorb each batch (OWM)"
    options_class: ClassVar[type] = OWMOptions
    splits = False  # projectors absorb the mean input of each batch
    steps = 0

    def setting(self) -> Setting:
        return self.by_rule("owm", alpha=self.options.alpha)

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        self.steps = task.steps

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return self.space.wrap(optimizer, self.steps)  # 0 if a task resumes: the clock's state is known

    def finish_task(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        self.space.consolidate()
        return {}


METHODS.add(OWM.name, OWM)
