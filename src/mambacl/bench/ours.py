"""What the bench takes of the scan: the one place that knows where it lives in the package."""

from collections.abc import Callable
from typing import Any

from mambacl.ops import (
    available_backends,
    scan_tokens,
    selective_scan,
    selective_scan_reference,
    switch,
)

__all__ = ["available_backends", "kernels_of", "scan_tokens", "selective_scan", "selective_scan_reference"]


def kernels_of(call: Callable[[], object]) -> dict[str, Any]:
    """The compiled Triton kernels that a call runs, by name; empty where none does."""
    if not switch.available():
        return {}
    from mambacl.ops.kernels import launch

    remembered = launch._compiled
    launch._compiled = {}  # whatever the call launches is entered again
    try:
        call()
        found = launch._compiled
    finally:
        launch._compiled = remembered
    return {key[0].__name__: kernel for key, kernel in found.items()}
