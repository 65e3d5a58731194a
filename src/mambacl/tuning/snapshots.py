"""What a module would compute with the values that some of its parameters had earlier."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call


def snapshot(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named}


@torch.no_grad()
def output_with(module: nn.Module, values: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """The module's output with these values, by parameter name, in place of its parameters'; without gradients."""
    output: Tensor = functional_call(module, dict(values), (inputs,))
    return output
