"""Prompts in front of the keys and values of attention. They are tied to attention: vit backbones only."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def split_rows(rows: Tensor, heads: int) -> Tensor:
    """A prefix (..., 2, n, heads, d) from rows (..., 2 n, c): first those for keys, then those for values."""
    return rows.unflatten(-1, (heads, -1)).unflatten(-3, (2, -1))


class PrefixPrompts(nn.Module):
    """One prompt per block, the same for every image and task: `values` (blocks, 2, n, heads, d)."""

    def __init__(
        self,
        blocks: Sequence[int],
        length: int,
        width: int,
        heads: int,
        seed: int,
        low: float = -1.0,
        high: float = 1.0,
    ) -> None:
        super().__init__()
        self.places = {block: place for place, block in enumerate(blocks)}
        values = torch.empty(len(blocks), 2, length, heads, width // heads)
        self.values = nn.Parameter(values.uniform_(low, high, generator=torch.Generator().manual_seed(seed)))

    def prefix(self, block: int) -> Tensor | None:
        """For `Change.prefix`; None in a block without a prompt."""
        return self.values[None, self.places[block]] if block in self.places else None
