"""PyTorch's optimizers without what keeps `torch.compile` out of them: it loads the compiler, which takes seconds and
which a run never uses. The code that computes is PyTorch's own."""

import inspect
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T", bound=torch.optim.Optimizer)
GUARDED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


@cache
def without_compiler(kind: type[T]) -> type[T]:
    """The same optimizer. Not for one that `torch.compile` is to see."""
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in GUARDED}
    step = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), {**methods, "step": step, "__doc__": kind.__doc__})
