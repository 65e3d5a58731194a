"""The paper's classifier: one linear head per task, trained only in that task, concatenated at inference."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn

from mambacl.classifiers.base import TaskHeads
from mambacl.classifiers.registry import CLASSIFIERS

Start = Literal["random", "zero"]


@dataclass(frozen=True)
class SeparateOptions:
    """Options of separate heads."""

    start: Start = "random"
    """random: as PyTorch starts a linear layer, and as the paper's code does; zero: every logit starts at 0. The loss
    of a task does not see what all its classes have in common, so what a random start puts there stays, and spoils the
    comparison with other tasks' heads"""


class SeparateHeads(TaskHeads):
    """One linear head per task. `start`: whether its weights start at random or at zero."""

    name = "separate"
    summary = "one linear head per task, trained with the backbone (the paper's)"
    options_class: ClassVar[type] = SeparateOptions

    def __init__(self, num_features: int, start: Start = "random") -> None:
        super().__init__(num_features)
        self.start = start

    def new_head(self, classes: int, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            head = nn.Linear(self.num_features, classes)
        if self.start == "zero":
            for parameter in head.parameters():
                nn.init.zeros_(parameter)
        return head


CLASSIFIERS.add(SeparateHeads.name, SeparateHeads)
