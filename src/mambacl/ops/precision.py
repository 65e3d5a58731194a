"""Precision of computations: autocast off, TF32 or full float32, what `auto` means, and what bf16 gains on a CPU."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Converts half precision to float32; returns float32 and float64 unchanged."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Switches autocast off on x's device. The meta device has no autocast."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # entering the context takes microseconds
        return nullcontext()
    return torch.autocast(device, enabled=False)


def resolve_precision(precision: str, device: torch.device) -> str:
    """Resolves `auto` for a device: bf16 if the device supports it, otherwise float32. Returns other values
    unchanged."""
    if precision != "auto":
        return precision
    if device.type != "cuda":
        return "float32"
    with torch.cuda.device(device):
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"


@contextmanager
def float32_products(tf32: bool) -> Iterator[None]:
    """Within it, float32 matrices are multiplied in TF32 (if the hardware has it) or in full precision.

    PyTorch has two settings for this, and reading the older one raises if the newer one contradicts it. Both are
    restored.
    """
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


def bf16_gain(size: int = 384, rounds: int = 8) -> float:
    """How many times as fast a CPU core multiplies matrices in bf16 as in float32. Takes less than a second."""
    threads = torch.get_num_threads()
    seconds: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
    torch.set_num_threads(1)
    try:
        for _ in range(1 + rounds):  # the first is a warm-up
            for dtype, found in seconds.items():
                a = torch.ones(size, size, dtype=dtype)
                started = time.perf_counter()
                a @ a
                found.append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(threads)
    return min(seconds[torch.float32][1:]) / min(seconds[torch.bfloat16][1:])
