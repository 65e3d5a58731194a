"""Projecting the steps of any torch optimizer.

The optimizer computes its step as it always does. Around it, two of PyTorch's own hooks remember the constrained
parameters and then replace their change by the projected one, so that moments, fused kernels and weight decay stay
the optimizer's. Copies of a parameter that an optimizer keeps in its state, such as the sequence z of schedule-free
optimizers, are treated like the parameter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mambacl.errors import UserError
from mambacl.log import logger
from mambacl.nullspace.adapters import named_parameters

if TYPE_CHECKING:
    from mambacl.nullspace.bank import Snapshot
    from mambacl.nullspace.space import NullSpace

COPIES = ("z", "x")  # entries of a schedule-free optimizer's state that are parameters themselves, not moments


def project_steps(optimizer: torch.optim.Optimizer, space: NullSpace) -> torch.optim.Optimizer:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"NullSpace.wrap takes a torch optimizer, got {type(optimizer).__name__}: give it the one that steps."
        )

    known: list[int] = []
    parameters: dict[str, Tensor] = {}

    def trained() -> dict[str, Tensor]:
        """By name; groups may be added after the wrapping."""
        now = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        if now != known:
            given = {parameter for group in optimizer.param_groups for parameter in group["params"]}
            found = {name: parameter for name, parameter in named_parameters(space.model).items() if parameter in given}
            parameters.clear()
            parameters.update(found)
            known[:] = now
        return parameters

    if not any(part.parameter in trained() for _, part in space.parts()):
        raise UserError(
            "NullSpace.wrap got an optimizer without any parameter that it protects: build it from space.parameters()."
        )
    known_parameters = {part.parameter for _, part in space.parts()} | set(space.trained_names())
    others = [name for name in trained() if name not in known_parameters and not space.leaves(name)]
    if others:
        shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        logger.warning(
            "The optimizer also trains %d parameters of the model that are not protected (%s), and old outputs will "
            "move with them: give it space.parameters(), or name a module that is meant so with leave=[...].",
            len(others),
            shown,
        )
    keeps_copies = any("ScheduleFree" in kind.__name__ for kind in type(optimizer).__mro__)
    taken: dict[str, Snapshot] = {}

    def copies(word: str) -> dict[str, Tensor]:
        """One that the first step makes begins as the parameter."""
        moving = {name: p for name, p in trained().items() if p.grad is not None}
        return {name: optimizer.state.get(p, {}).get(word, p) for name, p in moving.items()}

    def remember(*_: Any) -> None:
        taken[""] = space.remember(trained())
        for word in COPIES if keeps_copies else ():
            taken[word] = space.remember(copies(word))

    def project(*_: Any) -> None:
        taken.pop("").project(trained())
        for word in list(taken):
            now = copies(word)
            made = {name: copy for name, copy in now.items() if copy is not trained()[name]}
            before = taken.pop(word)
            if made and len(made) == len(now):
                before.project(made, counted=False)

    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(project)
    return optimizer
