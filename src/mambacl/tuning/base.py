"""The parameters that a method trains in a backbone, by name."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Tuning(Protocol):
    """What a method asks of it. The backbone is fixed when it comes; a tuning switches on what trains."""

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """What trains in the current task, by the names that the optimizer's state is kept under."""

    def state_dict(self) -> dict[str, Tensor]:
        """What training changes, under names that begin with `model.`, `adapters.` or another word."""

    def load_state_dict(self, state: Mapping[str, Tensor], /) -> Any:
        """A state of something else is a KeyError or a RuntimeError."""


class ModelParameters:
    """Some of the model's own parameters; with no names, nothing trains."""

    def __init__(self, model: nn.Module, names: Sequence[str] = ()) -> None:
        named = dict(model.named_parameters())
        self.parameters = {name: named[name] for name in names}
        for parameter in self.parameters.values():
            parameter.requires_grad_()

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.parameters.items())

    def state_dict(self) -> dict[str, Tensor]:
        return {f"model.{name}": parameter.detach() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if differing := state.keys() ^ self.state_dict().keys():
            raise KeyError(*sorted(differing)[:1])
        for name, parameter in self.parameters.items():
            parameter.copy_(state[f"model.{name}"])
