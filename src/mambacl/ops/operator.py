"""PyTorch operators with a low call overhead, and the checks that several of them share.

A custom operator lets `torch.compile` treat a kernel as a unit, but PyTorch's dispatcher often takes longer than the
kernel itself. On plain tensors, when nothing traces or counts operators, the same functions are called directly.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode

from mambacl.errors import UserError


def operator(
    name: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    keep: Callable[..., None] | None = None,
    differentiate: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Registers the operator mambacl::`name` and returns a function that calls it.

    `run` computes it, `fake` returns empty outputs of the right shapes. `keep(ctx, inputs, output)` and
    `differentiate(ctx, *gradients)` define its backward.
    """
    op = torch.library.custom_op(f"mambacl::{name}", run, mutates_args=())
    op.register_fake(fake)
    if keep is None or differentiate is None:
        return lambda *inputs: run(*inputs) if is_direct(inputs) else op(*inputs)
    op.register_autograd(differentiate, setup_context=keep)
    direct = _function(name, run, keep, differentiate)

    def call(*inputs: Any) -> Any:
        if not is_direct(inputs):
            return op(*inputs)
        return direct.apply(*inputs) if wants_gradient(inputs) else run(*inputs)

    return call


def wants_gradient(inputs: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)


def nothing(x: Tensor) -> Tensor:
    """A placeholder for a gradient that is not needed: operators must return tensors."""
    return x.new_empty(0)


def like(x: Tensor, needed: bool = True) -> Tensor:
    """An empty gradient of x; the placeholder if it is not needed."""
    return x.new_empty(x.shape) if needed else nothing(x)


def check_channels(x: Tensor, **vectors: Tensor | None) -> None:
    for name, vector in vectors.items():
        if vector is not None and vector.shape != x.shape[-1:]:
            raise UserError(f"{name} must have one value per channel, ({x.shape[-1]},), got {shapes(vector)}.")


def shapes(*tensors: Tensor) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors)


def is_direct(inputs: tuple[Any, ...]) -> bool:
    """Whether the operator can be bypassed: no compiler, no dispatch mode, only plain tensors with values."""
    if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
        return False
    for x in inputs:
        kind = type(x)
        if x.is_meta if kind is Tensor or kind is nn.Parameter else isinstance(x, Tensor):
            return False
    return True


def _function(name: str, run: Callable[..., Any], keep: Callable[..., None], differentiate: Callable[..., Any]) -> Any:
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = run(*inputs)
        keep(ctx, inputs, output)  # not `setup_context`: PyTorch would inspect its signature at every call
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(once_differentiable(differentiate))}
    return type(name, (torch.autograd.Function,), methods)
