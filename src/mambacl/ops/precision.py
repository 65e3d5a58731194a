"""What is computed in which precision: without autocast, in TF32 or full float32, and what `auto` stands for."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision up to float32; float32 and float64 as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Autocast switched off where x lives. The meta device knows no autocast."""
    return nullcontext() if x.device.type == "meta" else torch.autocast(x.device.type, enabled=False)


def resolve_precision(precision: str, device: torch.device) -> str:
    """The precision that `auto` stands for on a device: bf16 where it has it. Any other is returned unchanged."""
    if precision != "auto":
        return precision
    if device.type != "cuda":
        return "float32"
    with torch.cuda.device(device):
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"


@contextmanager
def float32_products(tf32: bool) -> Iterator[None]:
    """Multiplies float32 matrices in TF32 where the hardware has it, or in full precision; restores the setting after.
    PyTorch has two settings for this, and the older one cannot be read where the newer one contradicts it: both are
    restored."""
    newer = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [place.fp32_precision for place in newer]
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        older = "highest"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(older)
        for place, precision in zip(newer, before, strict=True):
            place.fp32_precision = precision
