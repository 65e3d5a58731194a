"""The parameters that a method trains in a backbone, by name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mambacl.nullspace.shards import cut_like
from mambacl.tuning.per_task import PerTask


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
            parameter.copy_(cut_like(state[f"model.{name}"], parameter))


class AddedModules:
    """Trains modules that a method adds beside the backbone, such as prompts. Their names begin with `prompts.`.

    A method whose modules grow with the tasks sets `fit`, which makes room for a state before it is loaded, and
    `trains`, which says by name what the current task trains. A `PerTask` needs neither: its last module trains."""

    prefix = "prompts."
    fit: Callable[[Mapping[str, Tensor]], None] | None = None
    trains: Callable[[str], bool] | None = None

    def __init__(self, model: nn.Module, **modules: nn.Module) -> None:
        """The modules go to the model's device and precision."""
        self.like = next(model.parameters())
        self.modules = nn.ModuleDict(modules)
        self.place()

    def place(self) -> None:
        """Moves what was added to the model's device and precision."""
        self.modules.to(self.like.device, self.like.dtype)

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        lists = [module for module in self.modules.modules() if isinstance(module, PerTask)]
        earlier = {id(p) for found in lists for module in found.tasks[:-1] for p in module.parameters()}
        named = [(name, p) for name, p in self.modules.named_parameters() if id(p) not in earlier]
        return [(self.prefix + name, p) for name, p in named if self.trains is None or self.trains(name)]

    def state_dict(self) -> dict[str, Tensor]:
        return {self.prefix + name: tensor for name, tensor in self.modules.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if other := [name for name in state if not name.startswith(self.prefix)]:
            raise KeyError(other[0])
        own = {name.removeprefix(self.prefix): tensor for name, tensor in state.items()}
        if self.fit is not None:
            self.fit(own)
            self.place()
        self.modules.load_state_dict(own)
