"""The Triton kernels of the operators: `kernels.norm` etc. Imported on first use, because Triton is optional."""

from importlib import import_module
from typing import Any

MODULES = ("conv", "delta", "gate", "launch", "norm", "rotary", "scan", "scan_single", "scan_sums", "scan_tiles")


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return import_module(f"{__name__}.{name}")
