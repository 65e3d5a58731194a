"""Rows of a linear layer for classes of tasks to come, which train before their task."""

import torch
from torch import Tensor, nn

from mambacl.tuning.growing_rows import fits_any_count


class RowsAhead(nn.Module):
    """`weight` (classes, d) and `bias` (classes,), as in a linear layer; they start empty."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(0, num_features)), nn.Parameter(torch.empty(0))
        fits_any_count(self)

    def draw(self, classes: int, seed: int) -> None:
        """This many rows, as PyTorch starts a linear layer."""
        generator, bound = torch.Generator().manual_seed(seed), self.weight.shape[1] ** -0.5
        for name, own in list(self.named_parameters()):
            drawn = torch.empty(classes, *own.shape[1:]).uniform_(-bound, bound, generator=generator)
            setattr(self, name, nn.Parameter(drawn.to(own)))

    @torch.no_grad()
    def give(self, head: nn.Module) -> None:
        """Moves the first rows to the weights and biases of a head, in their precision; it keeps its own where there
        are too few."""
        head.to(self.weight)
        for name, own in head.named_parameters():
            rows = getattr(self, name)
            count = min(len(own), len(rows))
            own[:count] = rows[:count]
            setattr(self, name, nn.Parameter(rows[count:].clone()))

    def forward(self, features: Tensor) -> Tensor:
        return nn.functional.linear(features, self.weight, self.bias)
