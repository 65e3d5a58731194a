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

if TYPE_CHECKING:
    from mambacl.nullspace.space import NullSpace

COPY = "z"  # the entry of a schedule-free optimizer's state that is a parameter itself, not a moment


def project_steps(optimizer: torch.optim.Optimizer, space: NullSpace) -> torch.optim.Optimizer:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"NullSpace.wrap takes a torch optimizer, got {type(optimizer).__name__}: give it the one that steps."
        )

    def trained() -> dict[str, torch.nn.Parameter]:
        """By name; groups may be added after the wrapping."""
        given = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        return {name: parameter for name, parameter in space.model.named_parameters() if parameter in given}

    if not any(part.parameter in trained() for _, part in space.parts()):
        raise UserError(
            "NullSpace.wrap got an optimizer without any parameter that it protects: build it from space.parameters()."
        )
    keeps_copy = "ScheduleFree" in type(optimizer).__name__
    before: dict[str, Tensor] = {}
    copies: dict[str, Tensor] = {}
    parameters: dict[str, torch.nn.Parameter] = {}

    def remember(*_: Any) -> None:
        forget()
        constrained = space.constrained_names()
        for name, parameter in trained().items():
            if name in constrained:
                parameters[name], before[name] = parameter, parameter.detach().clone()
                if keeps_copy:  # one that the first step makes begins as the parameter
                    copies[name] = optimizer.state.get(parameter, {}).get(COPY, parameter).detach().clone()

    def project(*_: Any) -> None:
        space.project(before, {name: parameter.detach() for name, parameter in parameters.items()})
        if keeps_copy:
            now = {
                name: optimizer.state[p][COPY] for name, p in parameters.items() if COPY in optimizer.state.get(p, {})
            }
            space.project({name: copies[name] for name in now}, now, counted=False)
        forget()

    def forget() -> None:
        for table in (before, copies, parameters):
            table.clear()

    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(project)
    return optimizer
