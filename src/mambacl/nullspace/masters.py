"""Float32 masters: copies of parameters in half precision that updates are added to.

A weight in bfloat16 has three digits, so that an update below a few thousandths of it is lost, and the rounding of a
larger one is not projected: old outputs drift with the number of steps. With masters, an optimizer steps on the float32
copies, their update is projected, and the weights are their rounding.

Only during a step does the optimizer hold the copies: before and after it, it has the model's parameters, so that
schedulers, clipping, `zero_grad` and `state_dict` see what they always see. Its moments stay in float32.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from mambacl.errors import UserError
from mambacl.nullspace.shards import cut_like

HALF = (torch.bfloat16, torch.float16)


class Masters:
    """The masters of one optimizer's parameters. `kept`: masters by parameter name; they outlive the optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, kept: MutableMapping[str, Tensor]) -> None:
        self.optimizer, self.kept = optimizer, kept
        self._swapped: dict[str, tuple[Tensor, Tensor]] = {}  # during a step: parameter and master by name

    @torch.no_grad()
    def enter(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gives the optimizer the masters instead of the parameters in half precision; returns all it now has, by
        name."""
        self.leave()  # a step that failed has not
        self._take({name: self._master(name, p) for name, p in named.items() if p.dtype in HALF}, named)
        return self.current(named)

    def before_loading(self, named: Mapping[str, Tensor]) -> None:
        """Moments are loaded into the precision of what the optimizer has. The values of both do not matter yet."""
        self.leave()
        self._take(
            {name: torch.zeros_like(p, dtype=torch.float32) for name, p in named.items() if p.dtype in HALF}, named
        )

    def after_loading(self) -> None:
        self._give_back()

    def _take(self, masters: Mapping[str, Tensor], named: Mapping[str, Tensor]) -> None:
        for name, master in masters.items():
            gradient = named[name].grad
            master.grad = None if gradient is None else gradient.to(torch.float32)
            self._swapped[name] = named[name], master
        self._swap({id(parameter): master for parameter, master in self._swapped.values()})

    def current(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the optimizer has for each parameter at the moment."""
        return {name: self._swapped[name][1] if name in self._swapped else p for name, p in named.items()}

    @torch.no_grad()
    def leave(self) -> None:
        """Rounds the masters into the parameters, and gives those back to the optimizer."""
        for parameter, master in self._swapped.values():
            parameter.copy_(master)
        self._give_back()

    def _give_back(self) -> None:
        for _, master in self._swapped.values():
            master.grad = None
        self._swap({id(master): parameter for parameter, master in self._swapped.values()})
        self._swapped = {}

    def _master(self, name: str, parameter: Tensor) -> Tensor:
        """Where a parameter is no longer the rounding of its master, because someone else has changed it, the parameter
        counts."""
        known = self.kept.get(name)
        if known is None or known.shape != parameter.shape:
            self.kept[name] = parameter.detach().to(torch.float32)
            return self.kept[name]
        master = cut_like(known, parameter)
        master.copy_(torch.where(master.to(parameter.dtype) == parameter, master, parameter.to(torch.float32)))
        self.kept[name] = master
        return master

    def _swap(self, instead: Mapping[int, Tensor]) -> None:
        state: MutableMapping[Any, Any] = self.optimizer.state
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in instead and parameter in state:
                    own = state.pop(parameter)
                    state[instead[id(parameter)]] = {
                        key: value.float() if isinstance(value, Tensor) and value.dtype in HALF else value
                        for key, value in own.items()
                    }
            group["params"] = [instead.get(id(parameter), parameter) for parameter in group["params"]]


def check_no_closure(arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    if named.get("closure") is not None or any(argument is not None for argument in arguments[1:]):
        raise UserError(
            "A closure would run the model while the optimizer holds the float32 masters: call step() without one, or "
            "wrap the optimizer without masters."
        )
