"""Whether the Triton kernels serve a call, or the plain PyTorch twins do.

The kernels serve tensors on NVIDIA GPUs where Triton imports and nobody switched them off: `with plain():` does so for
a block of code, `MAMBACL_PLAIN=1` in the environment for a whole program. Triton itself is imported when a kernel is
first wanted.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from mambacl.errors import UserError
from mambacl.log import logger

ENVIRONMENT_VARIABLE = "MAMBACL_PLAIN"
BACKENDS = ("auto", "triton", "plain")

_found = find_spec("triton") is not None
_imports: bool | None = None  # unknown until first wanted
_switched_off = 0  # how many `plain()` are open


def enabled() -> bool:
    """Whether the kernels are switched on, here and now; says nothing of whether this machine can run them."""
    return _switched_off == 0 and os.environ.get(ENVIRONMENT_VARIABLE, "0") in ("", "0")


@contextmanager
def plain() -> Iterator[None]:
    """Within it, every function whose backend is left open takes its plain twin."""
    global _switched_off
    _switched_off += 1
    try:
        yield
    finally:
        _switched_off -= 1


def available() -> bool:
    """Whether Triton imports, for the GPUs that the kernels were made for and tested on; otherwise says so once."""
    global _imports
    if torch.compiler.is_compiling():  # the tracer shall see neither the import nor the logger
        return _found and torch.version.hip is None
    if _imports is None and torch.version.hip is not None:
        _imports = False
        logger.info("This PyTorch is for AMD's GPUs: plain PyTorch takes the place of the fused kernels.")
    if _imports is None:
        try:
            import_module("triton")
            _imports = True
        except ImportError as error:
            _imports = False
            logger.info("Triton does not import (%s): plain PyTorch takes the place of the fused kernels.", error)
    return _imports


def serves(device: torch.device) -> bool:
    """Whether kernels serve what is on a device."""
    return device.type == "cuda" and enabled() and available()


def takes_kernel(x: Tensor, backend: str) -> bool:
    """Whether the Triton kernel serves x: the caller's choice, or what is fastest here."""
    if backend == "auto":
        return serves(x.device)
    if backend == "plain":
        return False
    if backend != "triton":
        raise UserError(f"There is no fused backend '{backend}'; choose one of {', '.join(BACKENDS)}.")
    if not available():
        raise UserError(
            "backend='triton' needs the package triton and a PyTorch for NVIDIA's GPUs; install them, or use "
            "backend='auto'."
        )
    if not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError(f"The Triton kernels take CUDA tensors, got one on {x.device}; use backend='auto'.")
    return True
