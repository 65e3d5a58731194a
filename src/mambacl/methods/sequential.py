"""Mamba-Seq: fine-tunes the same parameters as Mamba-CL on all tasks in turn, without projection."""

import torch

from mambacl.methods.base import Method
from mambacl.methods.registry import METHODS
from mambacl.nullspace import NullSpace
from mambacl.nullspace.description import in_one_line
from mambacl.tuning import ModelParameters, Tuning


class Sequential(Method):
    name = "sequential"
    summary = "plain fine-tuning of the same parameters (Mamba-Seq)"
    takes_shards = True

    def make_tuning(self) -> Tuning:
        self.space = NullSpace(self.model, self.setup.setting.without_projection())
        return ModelParameters(self.model, self.space.trained_names())

    def overview(self) -> str:
        return in_one_line(self.space.describe())

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return self.space.wrap(optimizer)  # projects nothing, but resets rows that do not train


METHODS.add(Sequential.name, Sequential)
