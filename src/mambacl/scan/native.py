"""The C++ kernel, if it was built at installation, called through ctypes.

Shapes: u, delta (b, l, d); A (d, n); B, C (b, l, g, n).
"""

import ctypes
import functools
import importlib.machinery
from pathlib import Path

import torch
from torch import Tensor

TILE = 16  # times between kept states, as in kernel.cpp
MOST_STATES = 256
MOST_CHUNKS = 8  # parts of a group of channels that threads share; fixed by the shapes, so that sums never vary


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernel, or None where there was no compiler at installation."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name("_kernel" + suffix)
        if path.exists():
            try:
                return ctypes.CDLL(str(path))
            except OSError:  # built for another machine
                return None
    return None


def built() -> bool:
    return library() is not None


built._dynamo_marked_constant = True  # type: ignore[attr-defined]  # `assume_constant_result` imports all of the compiler


def supports(u: Tensor, dtype: torch.dtype, states: int) -> bool:
    fits = u.device.type == "cpu" and dtype in (torch.float32, torch.float64) and states <= MOST_STATES
    return fits and built()


def kept_shape(u: Tensor, A: Tensor, B: Tensor) -> tuple[int, ...]:
    """Shape of the states that the forward keeps for the backward, (b, tiles, n, d)."""
    return u.shape[0], -(-u.shape[1] // TILE), A.shape[1], u.shape[2]


def forward(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    u, delta, A, B, C = _prepared(u, delta, A, B, C)
    y, starts = u.new_empty(u.shape), u.new_empty(kept_shape(u, A.mT, B))
    last = u.new_empty(u.shape[0], *A.shape)
    _call(u, delta, A, B, C, None, None, y, starts, last, None, None, None, None, None)
    return y, last.mT, starts


def backward(
    dy: Tensor, dlast: Tensor, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    u, delta, A, B, C = _prepared(u, delta, A, B, C)
    du, ddelta, dA = u.new_empty(u.shape), u.new_empty(u.shape), u.new_empty(u.shape[0], *A.shape)
    batch, length, groups, states = B.shape
    dB, dC = (u.new_empty(batch, groups, _chunks(u, B), length, states) for _ in range(2))
    dlast = dlast.mT.contiguous()
    _call(u, delta, A, B, C, dy.contiguous(), dlast, None, starts, None, du, ddelta, dA, dB, dC)
    return du, ddelta, dA.sum(0).mT, dB.sum(2).transpose(1, 2), dC.sum(2).transpose(1, 2)


def _prepared(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, ...]:
    """u and delta with contiguous channels, whatever their other strides; A (n, d), B and C contiguous."""
    u, delta = (x if x.stride(2) == 1 else x.contiguous() for x in (u, delta))
    return u, delta, A.mT.contiguous(), B.contiguous(), C.contiguous()


def _chunks(u: Tensor, B: Tensor) -> int:
    if B.shape[0] * B.shape[2] >= 16:  # images and groups are work enough to share
        return 1
    lanes = 64 // u.element_size()
    return min(MOST_CHUNKS, -(-u.shape[2] // B.shape[2] // lanes))


def _call(*tensors: Tensor | None) -> None:
    kernel, (u, delta, A, B, *_) = library(), tensors
    assert kernel is not None and u is not None and delta is not None and A is not None and B is not None
    tiles = -(-u.shape[1] // TILE)
    sizes = [*u.shape, B.shape[2], A.shape[0], tiles, _chunks(u, B), *u.stride()[:2], *delta.stride()[:2]]
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    function = kernel.scan_f64 if u.dtype == torch.float64 else kernel.scan_f32
    arguments = (ctypes.c_void_p * len(pointers))(*pointers), (ctypes.c_longlong * len(sizes))(*sizes)
    if function(*arguments, ctypes.c_int(torch.get_num_threads())) != 0:
        raise RuntimeError(f"the compiled scan has no kernel for {A.shape[0]} states")
