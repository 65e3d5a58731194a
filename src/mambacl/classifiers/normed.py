"""One layer norm and linear head per task, trained only in that task: ConvPrompt's heads."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mambacl.classifiers.base import TaskHeads


class NormedHead(nn.Linear):
    def __init__(self, num_features: int, classes: int, seed: int) -> None:
        super().__init__(num_features, classes)
        self.norm = nn.LayerNorm(num_features)
        generator = torch.Generator().manual_seed(seed)
        nn.init.trunc_normal_(self.weight, std=0.02, generator=generator)
        nn.init.zeros_(self.bias)

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(self.norm(features))


class NormedHeads(TaskHeads):
    """A head that was trained elsewhere and taken over has no norm."""

    name = "normed"
    summary = "one layer norm and linear head per task, trained with the backbone"

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.plain: set[int] = set()  # tasks whose heads have no norm

    def new_head(self, classes: int, seed: int) -> nn.Module:
        if len(self.heads) in self.plain:
            return nn.Linear(self.num_features, classes)
        with torch.random.fork_rng(devices=[]):  # the linear layer draws numbers that are not used
            return NormedHead(self.num_features, classes, seed)

    def take_over(self, classifier: nn.Module) -> None:
        self.plain.add(len(self.heads))
        super().take_over(classifier)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        tasks = {int(name.split(".")[1]) for name in state}
        self.plain = {task for task in tasks if f"heads.{task}.norm.weight" not in state}
        return super().load_state_dict(state, strict, assign)
