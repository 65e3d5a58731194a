"""A linear layer whose output is split into two halves, like that of in_proj.

Autograd would concatenate the gradients of the halves before multiplying them by the weight. Here each half is
multiplied directly, and the second product is added to the first.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import _has_any_global_hook

from mambacl.ops import switch


def split_linear(linear: nn.Module, tokens: Tensor, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Returns `linear(tokens)` split into two halves of its features. A layer that is not plain is simply called."""
    direct = is_plain(linear) and tokens.dim() == 3 and not torch.compiler.is_compiling()
    if direct and switch.takes_kernel(tokens, backend):
        return _SplitLinear.apply(tokens, linear.weight, linear.bias)
    first, second = linear(tokens).chunk(2, dim=-1)
    return first, second


def is_plain(linear: nn.Module) -> bool:
    """Whether the layer only multiplies by its weight and adds its bias: no hooks, no patched forward, no special
    weight class such as a quantised one. A fake weight stands for a plain one."""
    hooks = (linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks)
    usual = type(linear.weight) in (Tensor, nn.Parameter, FakeTensor)
    own = type(linear) is nn.Linear and "forward" not in vars(linear) and usual
    return own and not any(hooks) and not _has_any_global_hook()


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        first, second = F.linear(tokens, weight, bias).chunk(2, dim=-1)
        return first, second

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        tokens, weight, _ = inputs
        ctx.save_for_backward(tokens if ctx.needs_input_grad[1] else None, weight)
        ctx.dtype = tokens.dtype

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        tokens, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        rows = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
        dtokens = dweight = dbias = None
        if needs[0]:
            parts = weight.to(rows[0].dtype).chunk(2)
            dtokens = torch.addmm(rows[0] @ parts[0], rows[1], parts[1])
            dtokens = dtokens.view(*gradients[0].shape[:-1], -1).to(ctx.dtype)
        if needs[1]:
            given = tokens.reshape(-1, tokens.shape[-1]).to(rows[0].dtype)
            dweight = torch.cat([row.T @ given for row in rows]).to(weight.dtype)
        if needs[2]:
            dbias = torch.cat([row.sum(0) for row in rows]).to(weight.dtype)
        return dtokens, dweight, dbias
