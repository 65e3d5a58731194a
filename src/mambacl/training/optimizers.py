"""PyTorch's optimizers without the wrappers that keep `torch.compile` out: they import the compiler, which takes
seconds and which a run never uses. PyTorch's own code does the computation."""

import inspect
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T", bound=torch.optim.Optimizer)
GUARDED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


@cache
def without_compiler(kind: type[T]) -> type[T]:
    """The same optimizer; do not use it inside `torch.compile`."""
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in GUARDED}
    step = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), {**methods, "step": step, "__doc__": kind.__doc__})
