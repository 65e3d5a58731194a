"""The optimizers of a run."""

import inspect
from functools import cache
from typing import Any, TypeVar

import torch

from mambacl.training.recipe import Recipe

T = TypeVar("T", bound=torch.optim.Optimizer)


def make_optimizer(
    recipe: Recipe, groups: list[dict[str, Any]], recorded_on: torch.device | None = None
) -> torch.optim.Optimizer:
    """`recorded_on`: the GPU that records the steps. Adam then keeps all its state there, including learning rates."""
    decay, fused = recipe.weight_decay, recorded_on is not None
    if recipe.optimizer == "sgd":
        return without_compiler(torch.optim.SGD)(groups, lr=recipe.lr, momentum=0.9, weight_decay=decay)
    if fused:
        groups = [{**group, "lr": torch.tensor(group["lr"], device=recorded_on)} for group in groups]
    kind = torch.optim.Adam if recipe.optimizer == "adam" else torch.optim.AdamW
    return without_compiler(kind)(groups, weight_decay=decay, fused=fused, capturable=fused)


@cache
def without_compiler(kind: type[T]) -> type[T]:
    """The same optimizer without the wrappers that keep `torch.compile` out: they import the compiler, which takes
    seconds and which a run never uses. PyTorch's own code does the computation. Do not use it inside `torch.compile`.
    """
    guarded = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in guarded}
    step = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), {**methods, "step": step, "__doc__": kind.__doc__})
