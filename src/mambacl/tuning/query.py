"""The query of two-stage methods: the feature of the fixed model without prompts.

It costs one forward pass. It is not kept from step to step: each pass over a task's images augments them differently.
"""

import torch
from torch import Tensor, nn

from mambacl.tuning.passes import run_blocks


@torch.no_grad()
def frozen_query(model: nn.Module, images: Tensor, normed: bool = True) -> Tensor:
    """The class token (b, c) after the last norm, or before it. Works with every backbone that has a class token."""
    return run_blocks(model, images).feature(normed)
