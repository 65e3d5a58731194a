"""Mamba-Seq: the same parameters as Mamba-CL fine-tuned task after task, with no projection."""

import torch
from torch import nn

from mambacl.methods.base import METHODS, HeadPerTask, Setup
from mambacl.nullspace import NullSpace


class Sequential(HeadPerTask):
    name = "sequential"
    summary = "plain fine-tuning of the same parameters (Mamba-Seq)"

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        self.space = NullSpace(model, setup.setting.without_projection())
        super().__init__(model, setup)

    def trained_names(self) -> list[str]:
        return self.space.trained_names()

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return self.space.wrap(optimizer)  # projects nothing; rows that do not train stay as they are


METHODS.add(Sequential.name, Sequential)
