"""Prompt tokens that a small network makes of the query, in every block. Works with any backbone."""

import torch
from torch import Tensor, nn


class PromptMLP(nn.Module):
    """W2 relu(W1 q) for each block: `first` (blocks, hidden, c), `second` (blocks, length * c, hidden), no biases. They
    start as linear layers of PyTorch do."""

    def __init__(self, blocks: int, length: int, width: int, hidden: int, seed: int) -> None:
        super().__init__()
        self.length, generator = length, torch.Generator().manual_seed(seed)
        first, second = torch.empty(blocks, hidden, width), torch.empty(blocks, length * width, hidden)
        self.first = nn.Parameter(first.uniform_(-(width**-0.5), width**-0.5, generator=generator))
        self.second = nn.Parameter(second.uniform_(-(hidden**-0.5), hidden**-0.5, generator=generator))

    def units(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """For queries (b, c): hidden units (blocks, b, hidden) and outputs (blocks, b, length * c)."""
        hidden = (query @ self.first.mT).relu()
        return hidden, hidden @ self.second.mT

    def prompts(self, query: Tensor) -> Tensor:
        """(blocks, b, length, c)"""
        return self.units(query)[1].unflatten(2, (self.length, -1))
