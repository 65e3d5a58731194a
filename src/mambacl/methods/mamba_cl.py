"""Mamba-CL: the selective SSM and the layer after it are fine-tuned, each update projected onto the null space of the
features of all tasks before."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from mambacl.methods.base import METHODS, HeadPerTask, Setup
from mambacl.nullspace import NullSpace


class MambaCL(HeadPerTask):
    name = "mamba-cl"
    summary = "fine-tuning in the null space of earlier tasks (the paper's method)"

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        self.space = NullSpace(model, setup.setting)
        super().__init__(model, setup)

    def trained_names(self) -> list[str]:
        return self.space.trained_names()

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return self.space.wrap(optimizer)

    def finish_task(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        done = self.space.consolidate(batches)
        return {"covariance": done.covariance_seconds, "decomposition": done.decomposition_seconds}

    def task_state_dict(self) -> dict[str, Tensor]:
        return self.space.state_dict()

    def load_task_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.space.load_state_dict(state)


METHODS.add(MambaCL.name, MambaCL)
