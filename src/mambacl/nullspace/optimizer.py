"""Projecting the steps of any torch optimizer.

The optimizer computes its step as it always does. Around it, two of PyTorch's own hooks remember the constrained
parameters and then replace their change by the projected one, so that moments, fused kernels and weight decay stay
the optimizer's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mambacl.errors import UserError
from mambacl.nullspace.adapters import Part
from mambacl.nullspace.projectors import Projector

if TYPE_CHECKING:
    from mambacl.nullspace.space import NullSpace


def project_change(before: Tensor, after: Tensor, parts: list[tuple[Part, Projector | None]]) -> None:
    """Replaces the change from `before` to `after`, in place, by its projection. Rows of no part keep theirs."""
    for part, projector in parts:
        old, new = part.of(before), part.of(after)
        if projector is None:
            new.copy_(old)
        else:
            new.copy_(old + projector.apply(new - old, part.side))


def project_steps(optimizer: torch.optim.Optimizer, space: NullSpace) -> torch.optim.Optimizer:
    def trained() -> dict[str, torch.nn.Parameter]:
        """By name; groups may be added after the wrapping."""
        given = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        return {name: parameter for name, parameter in space.model.named_parameters() if parameter in given}

    if not any(part.parameter in trained() for _, part in space.parts()):
        raise UserError(
            "NullSpace.wrap got an optimizer without any parameter that it protects: build it from space.parameters()."
        )
    before: dict[str, tuple[torch.nn.Parameter, Tensor]] = {}

    def remember(*_: Any) -> None:
        before.clear()
        names = trained()
        for name in space.constrained():
            if name in names:
                before[name] = names[name], names[name].detach().clone()

    @torch.no_grad()
    def project(*_: Any) -> None:
        for name, parts in space.constrained().items():
            if name in before:
                parameter, old = before[name]
                project_change(old, parameter.detach(), parts)
        before.clear()

    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(project)
    return optimizer
