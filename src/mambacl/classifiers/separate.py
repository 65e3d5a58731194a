"""The paper's classifier: one linear head per task, trained only in that task, concatenated at inference."""

import torch
from torch import nn

from mambacl.classifiers.base import TaskHeads
from mambacl.classifiers.registry import CLASSIFIERS


class SeparateHeads(TaskHeads):
    name = "separate"
    summary = "one linear head per task, trained with the backbone (the paper's)"

    def new_head(self, classes: int, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return nn.Linear(self.num_features, classes)


CLASSIFIERS.add(SeparateHeads.name, SeparateHeads)
