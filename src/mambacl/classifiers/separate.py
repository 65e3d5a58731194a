"""The paper's classifier: a linear head for each task, trained in its task only, concatenated at inference."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mambacl.errors import UserError


class SeparateHeads(nn.Module):
    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features
        self.heads = nn.ModuleList()

    def add(self, classes: int, seed: int, warm_start: bool = False) -> None:
        """A new last head, drawn from the seed; the others are fixed from now on. With `warm_start` it begins as a
        copy of the one before, if that is as wide."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            head = nn.Linear(self.num_features, classes)
        if len(self.heads):
            before = self.heads[-1]
            before.requires_grad_(False)
            if warm_start and before.out_features == classes:
                head.load_state_dict(before.state_dict())
            head.to(next(before.parameters()).device)
        self.heads.append(head)

    def take_over(self, classifier: nn.Linear) -> None:
        """A classifier that was trained elsewhere as the next head, fixed."""
        if not isinstance(classifier, nn.Linear):
            raise UserError(
                f"take_over takes a linear classifier, got {type(classifier).__name__}: build the model with classes."
            )
        if classifier.in_features != self.num_features:
            raise UserError(
                f"The classifier takes {classifier.in_features} features, the model gives {self.num_features}: "
                "take over the one that was trained with it."
            )
        self.add(classifier.out_features, seed=0)
        head = self.heads[-1]
        assert isinstance(head, nn.Linear)
        with torch.no_grad():
            head.weight.copy_(classifier.weight)
            head.bias.zero_() if classifier.bias is None else head.bias.copy_(classifier.bias)
        head.requires_grad_(False)

    @property
    def widths(self) -> list[int]:
        return [head.out_features for head in self.heads]  # type: ignore[misc]

    def last(self, features: Tensor) -> Tensor:
        """Logits of the current task's classes, for training."""
        return self.heads[-1](features)

    def forward(self, features: Tensor) -> Tensor:
        """Logits of all classes seen so far, in the order in which they were learned."""
        return torch.cat([head(features) for head in self.heads], dim=1)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Takes up a saved state, with as many heads, of the widths, as it holds."""
        self.heads = nn.ModuleList()
        while (bias := state.get(f"heads.{len(self.heads)}.bias")) is not None:
            self.add(len(bias), seed=0)
        self.load_state_dict(dict(state))
