"""Gradient checkpointing: the backward pass computes each block again instead of keeping its activations.

    recompute(model)  # any model with repeated blocks; names of parameters and modules stay as they are

Only the input of each block is kept. The price is a second forward pass through the blocks in every backward pass.
Gradients are the same, bit for bit on a CPU. Hooks on a block run once; hooks on modules inside it also run in the
backward pass, where `nullspace.recursive.in_backward` tells them so.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mambacl.backbones.layers import Backbone
from mambacl.errors import UserError


def recompute(model: nn.Module, on: bool = True) -> None:
    """Switches it on or off."""
    if isinstance(model, Backbone):
        model.set_grad_checkpointing(on)
        return
    blocks = blocks_of(model)
    if not blocks:
        raise UserError(
            f"{type(model).__name__} has no repeated blocks (in an nn.ModuleList or nn.Sequential) to compute again in "
            "the backward pass: leave training.recompute at false."
        )
    for block in blocks:
        own: Any = vars(block)
        changed = isinstance(own.get("forward"), _Recomputed)
        if on and not changed:
            own["forward"] = _Recomputed(block)
        elif changed and not on:
            del own["forward"]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks: members of module lists, and of sequences of several modules of one class that have parts of
    their own. Where lists are nested, the innermost ones count."""
    found = [
        member
        for module in model.modules()
        if isinstance(module, nn.ModuleList) or _repeats(module)
        for member in module.children()
    ]
    listed = set(found)
    return [block for block in found if not any(other in listed for other in block.modules() if other is not block)]


def _repeats(module: nn.Module) -> bool:
    members = list(module.children()) if isinstance(module, nn.Sequential) else []
    return len(members) > 1 and len({type(m) for m in members}) == 1 and any(members[0].children())


class _Recomputed:
    """A block's forward, with checkpointing where gradients are wanted."""

    def __init__(self, block: nn.Module) -> None:
        self.block, self.forward = block, block.forward

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*arguments, **keywords)
        random = self.block.training  # e.g. dropout; reading the state of random numbers is not allowed in a CUDA graph
        return checkpoint(self.forward, *arguments, use_reentrant=False, preserve_rng_state=random, **keywords)
