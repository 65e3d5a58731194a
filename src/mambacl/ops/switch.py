"""Decides between the Triton kernels and their plain PyTorch twins.

The kernels run on NVIDIA GPUs if Triton can be imported and they are not switched off. `with plain():` switches them
off for a block of code, `MAMBACL_PLAIN=1` in the environment for the whole program. Triton is imported when a kernel is
first needed.
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
_imports: bool | None = None  # None: not tried yet
_switched_off = 0  # number of `plain()` blocks we are in


def enabled() -> bool:
    """Whether the kernels are switched on at the moment, whether or not this machine can run them."""
    return _switched_off == 0 and os.environ.get(ENVIRONMENT_VARIABLE, "0") in ("", "0")


@contextmanager
def plain() -> Iterator[None]:
    """Within it, every operator called with backend="auto" uses its plain twin."""
    global _switched_off
    _switched_off += 1
    try:
        yield
    finally:
        _switched_off -= 1


def available() -> bool:
    """Whether Triton can be imported with a PyTorch for NVIDIA GPUs, the only ones tested. Logs once if it cannot."""
    global _imports
    if torch.compiler.is_compiling():  # do not trace the import or the logger
        return _found and torch.version.hip is None
    if _imports is None and torch.version.hip is not None:
        _imports = False
        logger.info("This PyTorch is built for AMD GPUs: using plain PyTorch instead of the fused kernels.")
    if _imports is None:
        try:
            import_module("triton")
            _imports = True
        except ImportError as error:
            _imports = False
            logger.info("Triton cannot be imported (%s): using plain PyTorch instead of the fused kernels.", error)
    return _imports


def serves(device: torch.device) -> bool:
    """Whether backend="auto" uses kernels on this device."""
    return device.type == "cuda" and enabled() and available()


def takes_kernel(x: Tensor, backend: str) -> bool:
    """Whether to run the Triton kernel on x: the caller's choice, or for "auto" the fastest."""
    if backend == "auto":
        return serves(x.device)
    if backend == "plain":
        return False
    if backend != "triton":
        raise UserError(f"There is no fused backend '{backend}'; choose one of {', '.join(BACKENDS)}.")
    if not available():
        raise UserError(
            "backend='triton' needs the package triton and a PyTorch for NVIDIA GPUs; install them, or use "
            "backend='auto'."
        )
    if not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError(f"The Triton kernels need CUDA tensors, got one on {x.device}; use backend='auto'.")
    return True
