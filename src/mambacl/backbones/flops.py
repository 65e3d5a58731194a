"""Counts a model's operations, including the scan. A multiply-add counts as two."""

import math
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

SCAN_OPERATIONS = 9  # per token, channel and state: exp(delta A) 2, delta x B 2, the state 2, C h 2, the sum 1


SCAN_BACKWARD_OPERATIONS = 21
"""the states again 7; through C h: dh 2, dC 2; through the state: its gradient 1, d(delta A) 2, ddelta 3, dA 1; through
delta x B: dB 1, d(delta x) 2"""


@register_flop_formula(torch.ops.mambacl.scan)
def _scan_flops(u: Any, delta: Any, A: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    batch, tokens, channels = u
    return SCAN_OPERATIONS * batch * tokens * channels * A[1]


@register_flop_formula(torch.ops.mambacl.scan_backward)
def _scan_backward_flops(dout: Any, dlast: Any, u: Any, delta: Any, A: Any, *_: Any, **__: Any) -> int:
    batch, tokens, channels = u
    return SCAN_BACKWARD_OPERATIONS * batch * tokens * channels * A[1]


def _convolution_backward(gradient: Any, x: Any, weight: Any, *rest: Any, **__: Any) -> int:
    """As many as the forward for each of the gradients of input and weight; PyTorch's own count forgets the groups."""
    wanted = rest[-1]
    places = math.prod(x[2:]) if rest[4] else math.prod(gradient[2:])  # of a transposed convolution, or not
    return 2 * math.prod(weight) * gradient[0] * places * sum(wanted[:2])


def count_step_flops(model: nn.Module, size: int) -> tuple[int, int]:
    """The operations of a training step for one image: of the forward pass, and of the backward pass, which depends on
    the parameters that train. The model can be on the meta device."""
    parameter = next(model.parameters())
    image = torch.empty(1, 3, size, size, device=parameter.device, dtype=parameter.dtype)
    counter = FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten.convolution_backward: _convolution_backward}
    )
    with counter:
        output = model(image)
    forward = counter.get_total_flops()
    with counter:
        output.sum().backward()
    return forward, counter.get_total_flops()


def count_flops(model: nn.Module, size: int) -> tuple[int, int]:
    """The number of operations for one square image of this size, and those of the scan. Counts products and
    convolutions, but no elementwise operations. The model can be on the meta device."""
    parameter = next(model.parameters())
    image = torch.empty(1, 3, size, size, device=parameter.device, dtype=parameter.dtype)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(image)
    scan = counter.get_flop_counts()["Global"].get(torch.ops.mambacl.scan, 0)
    return counter.get_total_flops(), scan
