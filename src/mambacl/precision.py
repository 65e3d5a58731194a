"""What a run computes in, and how products of float32 matrices are computed."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def named(precision: str, device: torch.device) -> str:
    """The precision that `auto` stands for on a device: bf16 where it has it; any other as it is."""
    if precision != "auto":
        return precision
    if device.type != "cuda":
        return "float32"
    with torch.cuda.device(device):
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"


@contextmanager
def float32_products(tf32: bool) -> Iterator[None]:
    """In TF32 where the hardware has it, or in full; afterwards as before. PyTorch has two settings for that, and the
    older one cannot be asked where the newer one contradicts it: both are given back."""
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
