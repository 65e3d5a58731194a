"""Prompt tokens that join the sequence before a block. They also work on De-focus Mamba and Vim.

A causal scan passes on what came before, so there the tokens stand in front of the sequence. Vim scans in both
directions and has its class token in the middle, so they stand at both ends.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from mambacl.backbones.vit import ViT
from mambacl.tuning.passes import Tokens, with_class_token


def place_of_prompts(model: nn.Module) -> int | Literal["ends"]:
    """`Tokens.at` for a model: after a ViT's class token, in front of a causal sequence, or at both ends."""
    backbone = with_class_token(model)
    if isinstance(model, ViT):
        return 1
    return 0 if backbone.class_index(3) == 2 else "ends"


class TokenPrompts(nn.Module):
    """One prompt per block, the same for every image: `values` (blocks, n, c). Several blocks as in VPT-Deep, one as in
    VPT-Shallow."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[int], length: int, seed: int, low: float = -1.0, high: float = 1.0,
        kept: Literal["always", "block", "attention"] = "block", at: int | Literal["end", "ends"] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.places, self.kept = {block: place for place, block in enumerate(blocks)}, kept
        self.at = place_of_prompts(model) if at is None else at
        values = torch.empty(len(blocks), length, with_class_token(model).num_features)
        self.values = nn.Parameter(values.uniform_(low, high, generator=torch.Generator().manual_seed(seed)))

    def tokens(self, block: int) -> Tokens | None:
        """For `Change.tokens`; None in a block without a prompt."""
        if block not in self.places:
            return None
        return Tokens(self.values[None, self.places[block]], self.at, self.kept)
