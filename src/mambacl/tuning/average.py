"""An exponential average of added modules, which follows their training step by step."""

import copy

import torch
from torch import Tensor, nn


def averaged_copy(module: nn.Module) -> nn.Module:
    """A copy that does not train: the start of an average."""
    return copy.deepcopy(module).requires_grad_(False)


@torch.no_grad()
def follow(average: nn.Module, module: nn.Module, decay: float) -> None:
    """average <- decay * average + (1 - decay) * module, for all parameters. To call it after every step, register it
    with `optimizer.register_step_post_hook` in `Method.wrap`; a recorded step then has it too."""
    own: list[Tensor] = list(average.parameters())
    other: list[Tensor] = list(module.parameters())
    torch._foreach_lerp_(own, other, 1 - decay)
