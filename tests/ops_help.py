"""Inputs for the tests of the fused kernels, and how a kernel is compared with its plain twin."""

from collections.abc import Callable
from functools import partial

import torch
from kernels_help import DEVICE, poisoned
from tolerance import rounding
from torch import Tensor


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(DEVICE, dtype)


def half(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The second half of the channels of a tensor twice as wide, as in_proj's output is cut."""
    return normal(*shape[:-1], 2 * shape[-1], dtype=dtype).chunk(2, dim=-1)[1]


def normalized(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def differentiated(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The output and the gradient of every input, for an output gradient that depends only on the shape."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    y = function(*leaves)
    slope = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).reshape(y.shape).to(y)
    return [y.detach(), *torch.autograd.grad(y, leaves, slope)]


def compare(
    function: Callable[..., Tensor], twin: Callable[..., Tensor], inputs: list[Tensor], tolerance: float
) -> None:
    """The kernel in the inputs' types, its memory poisoned, against the twin in float64."""
    with poisoned():
        found = differentiated(partial(function, backend="triton"), inputs)
    wanted = differentiated(twin, [tensor.double() for tensor in inputs])
    for tensor, like in zip(found[1:], inputs, strict=True):
        assert tensor.dtype == like.dtype and tensor.shape == like.shape
    for ours, theirs in zip(found, wanted, strict=True):
        scale = max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(ours.double(), theirs, atol=tolerance * scale, rtol=0)


TOLERANCES = {  # sums over rows or groups of some dozens; in half precision, four roundings of what is stored
    torch.float64: 1e-12,
    torch.float32: rounding(2**6),
    torch.float16: 4 * 2**-11,
    torch.bfloat16: 4 * 2**-8,
}
