"""Adapters that grow: each task adds a few channels to every bottleneck and fixes those before.

In one place, the output is relu(u D^T) U^T over the rows D and columns U of all tasks, which is the sum of the tasks'
adapters. New rows and columns start orthogonal to the earlier ones.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.tuning.per_task import PerTask


def orthogonal_to(earlier: Tensor, draws: Tensor) -> Tensor:
    """Unit rows (n, c) from random ones, orthogonal to each other and to all earlier rows (m, c), unless m + n is more
    than c."""
    if len(earlier) + len(draws) > draws.shape[1]:
        return F.normalize(draws, dim=1)
    basis = torch.linalg.qr(earlier.T).Q if len(earlier) else draws.new_zeros(draws.shape[1], 0)
    rest = draws.T - basis @ (basis.T @ draws.T)
    return torch.linalg.qr(rest).Q.T


class Share(nn.Module):
    """What one task adds in each place: `down` and `up`, (places, size, c) each."""

    def __init__(self, places: int, size: int, width: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.zeros(places, size, width))
        self.up = nn.Parameter(torch.zeros(places, size, width))


class GrowingAdapters(nn.Module):
    def __init__(self, places: int, size: int, width: int) -> None:
        super().__init__()
        self.places = places
        self.shares = PerTask(lambda: Share(places, size, width))

    @torch.no_grad()
    def add(self, seed: int) -> None:
        """Starts a task's share."""
        new, generator = self.shares.add(), torch.Generator().manual_seed(seed)
        for name in ("down", "up"):
            rows: Tensor = getattr(new, name)
            for place in range(self.places):
                draws = torch.randn(rows.shape[1:], generator=generator).to(rows)
                rows[place] = orthogonal_to(self.rows(name, place, len(self.shares) - 1), draws)

    def rows(self, name: str, place: int, tasks: int) -> Tensor:
        """Those of the first tasks, (rows, c)."""
        shares: Any = self.shares.tasks
        found = [getattr(share, name)[place] for share in shares[:tasks]]
        return torch.cat(found) if found else getattr(shares[0], name)[place][:0]

    def forward(self, u: Tensor, place: int) -> Tensor:
        every = len(self.shares)
        return F.relu(u @ self.rows("down", place, every).T) @ self.rows("up", place, every)

    def overlap(self) -> Tensor:
        """The sum of squared products between the current task's rows and the earlier ones, over all places."""
        last = len(self.shares) - 1
        total = self.shares[last].down.new_zeros(())
        for name in ("down", "up"):
            for place in range(self.places if last else 0):
                own: Tensor = getattr(self.shares[last], name)[place]
                total = total + (own @ self.rows(name, place, last).detach().T).square().sum()
        return total


class ScaleShift(nn.Module):
    """A factor and an offset per channel in each place; nothing changes at first."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(places, width)), nn.Parameter(torch.zeros(places, width))

    def forward(self, u: Tensor, place: int) -> Tensor:
        return u * self.scale[place] + self.shift[place]
