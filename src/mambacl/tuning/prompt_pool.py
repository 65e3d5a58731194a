"""A pool of prompts with a key each; an image's query selects some of them. Works with any backbone: what a prompt is,
tokens or a prefix, is up to the method."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def cosines(queries: Tensor, keys: Tensor) -> Tensor:
    """(b, pool) from queries (b, c) and keys (pool, c)."""
    return F.normalize(queries, dim=1) @ F.normalize(keys, dim=1).T


def nearest(similarity: Tensor, count: int) -> Tensor:
    """The indices (b, count) of the most similar keys of each image, the most similar first."""
    return similarity.topk(count, dim=1).indices


def majority(selected: Tensor, size: int) -> Tensor:
    """The same selection for every image: the indices that most images of the batch select, in ascending order; of
    equally frequent ones the lower. Results then depend on the batch, also at test, as in the released code of L2P."""
    counts = F.one_hot(selected, size).sum((0, 1))  # (pool,)
    ranked = counts * size - torch.arange(size, device=counts.device)
    chosen = ranked.topk(selected.shape[1]).indices.sort().values
    return chosen.expand_as(selected)


def pulled(similarity: Tensor, selected: Tensor) -> Tensor:
    """The mean over the images of the sum of the cosines with the selected keys; a loss subtracts it, which pulls keys
    towards the queries that select them."""
    return similarity.gather(1, selected).sum(1).mean()


class PromptPool(nn.Module):
    """`keys` (pool, c) and `values` (pool, *shape). Both start uniformly between `low` and `high`."""

    def __init__(
        self, size: int, width: int, shape: Sequence[int], seed: int, low: float = -1.0, high: float = 1.0
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.values = nn.Parameter(torch.empty(size, *shape).uniform_(low, high, generator=generator))
        self.keys = nn.Parameter(torch.empty(size, width).uniform_(low, high, generator=generator))

    def select(self, queries: Tensor, count: int, by_majority: bool = False) -> tuple[Tensor, Tensor]:
        """Indices (b, count), and all cosines (b, pool)."""
        similarity = cosines(queries, self.keys)
        selected = nearest(similarity, count)
        return (majority(selected, len(self.keys)) if by_majority else selected), similarity

    @torch.no_grad()
    def copy(self, source: int, target: int) -> None:
        """Starts one prompt as a copy of another; the key stays."""
        self.values[target] = self.values[source]
