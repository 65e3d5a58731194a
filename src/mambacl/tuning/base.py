"""The parameters that a method trains in a backbone, by name."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

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
            parameter.copy_(state[f"model.{name}"])


class AddedModules:
    """Trains modules that a method adds beside the backbone, such as prompts. Their names begin with `prompts.`. Of a
    `PerTask` among them, the module of the current task trains."""

    prefix = "prompts."

    def __init__(self, model: nn.Module, aside: Iterable[str] = (), **modules: nn.Module) -> None:
        """The modules go to the model's device and precision. `aside`: names of modules that do not train."""
        like = next(model.parameters())
        self.modules, self.aside = nn.ModuleDict(modules).to(like.device, like.dtype), set(aside)

    def rest(self, *names: str) -> None:
        """These modules do not train from now on."""
        self.aside.update(names)
        for name in names:
            self.modules[name].requires_grad_(False)

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        fixed = {id(p) for name in self.aside for p in self.modules[name].parameters()}
        for module in self.modules.modules():
            if isinstance(module, PerTask):
                fixed |= {id(p) for earlier in module.tasks[:-1] for p in earlier.parameters()}
        named = self.modules.named_parameters()
        return [(self.prefix + name, parameter) for name, parameter in named if id(parameter) not in fixed]

    def state_dict(self) -> dict[str, Tensor]:
        return {self.prefix + name: tensor for name, tensor in self.modules.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if other := [name for name in state if not name.startswith(self.prefix)]:
            raise KeyError(other[0])
        self.modules.load_state_dict({name.removeprefix(self.prefix): tensor for name, tensor in state.items()})
