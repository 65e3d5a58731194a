"""The parameters that a method trains in a backbone, by name."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Tuning(Protocol):
    """The interface that methods use. It gets a backbone whose parameters are all fixed, and switches on what
    trains."""

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that train in the current task, by the names that the optimizer's state uses."""

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that training changes, under names that begin with `model.`, `adapters.` or the like."""

    def load_state_dict(self, state: Mapping[str, Tensor], /) -> Any:
        """Raises KeyError or RuntimeError if the state does not match."""


class ModelParameters:
    """Trains some of the model's own parameters; without names, none."""

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
