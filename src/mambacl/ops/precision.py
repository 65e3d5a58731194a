"""Float32 or better, whatever autocast is set to."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision up to float32; float32 and float64 as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Autocast switched off where x lives. The meta device knows no autocast."""
    return nullcontext() if x.device.type == "meta" else torch.autocast(x.device.type, enabled=False)
