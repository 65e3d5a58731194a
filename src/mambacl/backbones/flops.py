"""Counts a model's operations, including the scan. A multiply-add counts as two."""

from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

SCAN_OPERATIONS = 9  # per token, channel and state: exp(delta A) 2, delta x B 2, the state 2, C h 2, the sum 1


@register_flop_formula(torch.ops.mambacl.scan)
def _scan_flops(u: Any, delta: Any, A: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    batch, tokens, channels = u
    return SCAN_OPERATIONS * batch * tokens * channels * A[1]


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
