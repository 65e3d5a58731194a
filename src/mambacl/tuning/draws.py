"""Random choices for each image of an epoch, such as a task whose prompts it gets."""

import torch
from torch import Tensor

COUNT = 1 << 16  # numbers per epoch; images beyond use them again


class Draws:
    """Numbers that are drawn when an epoch starts, from a seed, so that a resumed run draws the same. They stay in the
    same memory, so that a recorded step takes new ones each time."""

    def __init__(self, device: torch.device) -> None:
        self.numbers = torch.zeros(COUNT, dtype=torch.int64, device=device)
        self.taken = torch.zeros((), dtype=torch.int64, device=device)

    def restart(self, *seeds: int) -> None:
        """Called when an epoch starts; `seeds`: the run's, the task, the epoch."""
        seed = 0
        for number in seeds:
            seed = (seed * 1_000_003 + number) % (1 << 62)
        self.numbers.copy_(torch.randint(1 << 62, (COUNT,), generator=torch.Generator().manual_seed(seed)))
        self.taken.zero_()

    def below(self, bound: int, count: int) -> Tensor:
        """`count` whole numbers from 0 to bound - 1, each equally likely."""
        places = (self.taken + torch.arange(count, device=self.taken.device)) % COUNT
        self.taken += count
        return self.numbers[places] % bound
