"""Projects the steps of any torch optimizer.

The optimizer computes its step as usual. Two PyTorch hooks take a snapshot of the restricted parameters before the step
and replace their change by the projected one after it. Moments, fused kernels and weight decay remain the optimizer's.
Copies of a parameter in the optimizer's state, such as z of schedule-free optimizers, are treated like the parameter.
Where the setting projects gradients, this happens in the first hook, before the optimizer sees them.
"""

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from mambacl.errors import UserError
from mambacl.log import logger
from mambacl.nullspace.blocks import named_parameters
from mambacl.nullspace.masters import HALF, Masters, check_no_closure
from mambacl.nullspace.projected_step import ProjectedStep, Snapshot
from mambacl.nullspace.selection import Selection

COPIES = ("z", "x")  # entries of a schedule-free optimizer's state that are parameters themselves, not moments


def inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside a wrapper that passes steps on to it, as Accelerate's."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"NullSpace.wrap needs a torch optimizer, got {type(optimizer).__name__}: pass the optimizer itself."
        )
    while not hasattr(optimizer, "_optimizer_step_pre_hooks"):  # a wrapper's own hooks would not run
        optimizer = getattr(optimizer, "optimizer")  # noqa: B009
    return optimizer


def register_projection(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    selection: Selection,
    current: Callable[[], ProjectedStep],
    kept: MutableMapping[str, Tensor] | None = None,
) -> None:
    """Makes every future step of the optimizer go through the projected step that is `current` then. `kept`: where
    float32 masters of parameters in half precision are kept, by name; None: such parameters have none."""

    known: list[int] = []
    parameters: dict[str, Tensor] = {}

    def trained() -> dict[str, Tensor]:
        """The optimizer's parameters by name; groups can be added after wrapping."""
        now = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        if now != known:
            given = {parameter for group in optimizer.param_groups for parameter in group["params"]}
            found = {name: parameter for name, parameter in named_parameters(model).items() if parameter in given}
            _warn_unprotected(selection, [name for name in found if name not in parameters])
            parameters.clear()
            parameters.update(found)
            known[:] = now
        return parameters

    if not any(part.parameter in trained() for _, part in selection.parts()):
        raise UserError(
            "NullSpace.wrap got an optimizer with none of the protected parameters: build it from space.parameters()."
        )
    masters = None if kept is None else Masters(optimizer, kept)
    if masters is None:
        _warn_half_precision(selection, trained())
    keeps_copies = any("ScheduleFree" in kind.__name__ for kind in type(optimizer).__mro__)
    taken: dict[str, Snapshot] = {}

    def stepped() -> dict[str, Tensor]:
        """What the optimizer steps on, in the middle of a step."""
        return trained() if masters is None else masters.current(parameters)

    def copies(word: str) -> dict[str, Tensor]:
        """A copy that the first step creates starts as the parameter itself."""
        moving = {name: p for name, p in stepped().items() if p.grad is not None}
        return {name: optimizer.state.get(p, {}).get(word, p) for name, p in moving.items()}

    def before_step(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if masters is not None:
            check_no_closure(arguments, named)
            masters.enter(trained())
        current().project_gradients(stepped())
        taken[""] = current().snapshot(stepped())
        for word in COPIES if keeps_copies else ():
            taken[word] = current().snapshot(copies(word))

    def after_step(*_: Any) -> None:
        taken.pop("").restrict(stepped())
        for word in list(taken):
            now = copies(word)
            made = {name: copy for name, copy in now.items() if copy is not stepped()[name]}
            before = taken.pop(word)
            if made and len(made) == len(now):
                before.restrict(made, counted=False)
        if masters is not None:
            masters.leave()

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)
    if masters is not None:  # a state is loaded into the precision of the parameters that the optimizer then has
        optimizer.register_load_state_dict_pre_hook(lambda *_: masters.before_loading(trained()))
        optimizer.register_load_state_dict_post_hook(lambda *_: masters.after_loading())


def _warn_half_precision(selection: Selection, named: Mapping[str, Tensor]) -> None:
    protected = {p.part.parameter for p in selection.protections}
    half = [name for name, p in named.items() if name in protected and p.dtype in HALF]
    if half:
        logger.warning(
            "%d protected parameters are in %s (%s), which rounds projected updates so that old outputs drift: keep "
            "float32 masters with wrap(optimizer, masters=True).",
            len(half), str(named[half[0]].dtype).removeprefix("torch."), half[0] + (", ..." if len(half) > 1 else ""),
        )  # fmt: skip


def _warn_unprotected(selection: Selection, names: list[str]) -> None:
    """Warns of parameters that an optimizer trains but that are neither protected nor in `leave`."""
    restricted = {part.parameter for _, part in selection.parts()} | set(selection.trained)
    free = [name for name in names if name not in restricted and not selection.leaves(name)]
    for is_new, message in (
        (True, "The model has %d new parameters since the NullSpace was built (%s). They train freely, neither "
               "projected nor reset. If that is intended, name their module in leave=[...]."),
        (False, "The optimizer also trains %d unprotected parameters of the model (%s), which changes old outputs: "
                "give it space.parameters(), or if that is intended, name their module in leave=[...]."),
    ):  # fmt: skip
        some = [name for name in free if selection.is_new(name) == is_new]
        if some:
            logger.warning(message, len(some), ", ".join(some[:3]) + (", ..." if len(some) > 3 else ""))
