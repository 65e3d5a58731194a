"""The exponential moving average of a model's weights."""

import copy

import torch
from torch import Tensor, nn


def averaging_rate(decay: float, steps: int) -> float:
    """How far the average moves towards the weights after `steps` earlier steps. It forgets the random start first: the
    decay is (1 + n) / (10 + n) until that exceeds `decay`."""
    return 1 - min(decay, (1 + steps) / (10 + steps))


class WeightAverage:
    """A copy of a model: average += rate * (weights - average), also for running statistics. Counters are copied."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        pairs = list(zip(self.model.state_dict().values(), model.state_dict().values(), strict=True))
        moving = [pair for pair in pairs if pair[0].is_floating_point()]
        self._averages, self._weights = [list(part) for part in zip(*moving, strict=True)]
        self._counters = [pair for pair in pairs if not pair[0].is_floating_point()]
        self.rate = torch.ones((), device=self._averages[0].device)  # a tensor, which a recorded step follows

    @torch.no_grad()
    def update(self) -> None:
        change: list[Tensor] = list(torch._foreach_sub(self._weights, self._averages))
        torch._foreach_mul_(change, self.rate)
        torch._foreach_add_(self._averages, change)
        for own, other in self._counters:
            own.copy_(other)
