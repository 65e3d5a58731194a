"""One linear layer over all classes, whose rows all train in every task."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mambacl.classifiers.separate import SeparateHeads


class JointHeads(SeparateHeads):
    """Stored as one head per task, like separate heads; those of earlier tasks train on."""

    def add_task(self, classes: int, seed: int = 0, warm_start: bool = False) -> None:
        super().add_task(classes, seed, warm_start)
        self.heads.requires_grad_(True)

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(f"heads.{name}", parameter) for name, parameter in self.heads.named_parameters()]


class WideningHeads(JointHeads):
    """The same for a feature that grows with the tasks."""

    @torch.no_grad()
    def widen(self, num_features: int, seed: int) -> None:
        """Adds columns for further features; they start as a new layer's."""
        self.num_features = num_features
        for index, before in enumerate(list(self.heads)):
            assert isinstance(before, nn.Linear)
            head = self.new_head(before.out_features, seed + index).to(before.weight.device, before.weight.dtype)
            assert isinstance(head, nn.Linear)
            head.weight[:, : before.in_features] = before.weight
            head.bias.copy_(before.bias)
            self.heads[index] = head

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        if "heads.0.weight" in state:
            self.num_features = state["heads.0.weight"].shape[1]
        return super().load_state_dict(state, strict, assign)
