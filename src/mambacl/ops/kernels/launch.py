# mypy: disable-error-code="import-untyped, import-not-found"
"""Helpers for launching kernels: the launch itself, layouts, dtypes and block sizes."""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # values per tile: 8 per thread of four warps
MOST_PARTIALS = 2048  # of a parameter's gradient: small compared to the inputs, enough to fill any GPU


_compiled: dict[tuple[Any, ...], Any] = {}


def launch(kernel: Any, grid: tuple[int, ...], *inputs: Tensor | int, **constants: Any) -> None:
    """Like `kernel[grid](*inputs, **constants)`, but faster.

    Triton's own processing of the arguments takes several times as long as starting the kernel. This caches the
    compiled kernel by the tensors' dtypes, their alignment, and all numbers.
    """
    first = inputs[0]
    assert isinstance(first, Tensor)
    if first.is_cuda and first.device.index != torch.cuda.current_device():
        with torch.cuda.device(first.device):
            return launch(kernel, grid, *inputs, **constants)
    described = [(x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, Tensor) else x for x in inputs]
    key = (kernel, first.device, *described, *constants.values())
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = kernel[grid](*inputs, **constants)
        if compiled is not None:  # the interpreter compiles nothing
            _compiled[key] = compiled
        return None
    names = kernel.arg_names[len(inputs) :]
    compiled[(*grid, 1, 1)[:3]](*inputs, *[constants[name] for name in names])
    return None


def unit_stride(x: Tensor) -> Tensor:
    """x with contiguous channels: x itself if it has them, otherwise a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def as_rows(x: Tensor) -> Tensor:
    """(.., d) as (rows, d) with contiguous channels: a view if all rows have the same stride, as half of a linear
    layer's output has; otherwise a copy."""
    return unit_stride(x).reshape(-1, x.shape[-1])


def accumulator(*tensors: Tensor) -> tl.dtype:
    """The dtype a kernel computes in: float64 if an input is float64, otherwise float32."""
    return tl.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else tl.float32


def torch_type(accumulator: tl.dtype) -> torch.dtype:
    return torch.float64 if accumulator == tl.float64 else torch.float32


def triton_type(dtype: torch.dtype) -> tl.dtype:
    names = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
    return names.get(dtype, tl.float64)


@functools.cache
def as_exact_as_float32(device: torch.device) -> str:
    """The `input_precision` of `tl.dot` that keeps float32 accuracy: three TF32 products if the GPU has tensor
    cores."""
    fast = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return "tf32x3" if fast else "ieee"


def row_blocks(rows: int, columns: int, summed: bool) -> tuple[int, int, int]:
    """Rows per tile, tiles per program and number of programs, for tiles of about `TILE` values.

    A program that sums over its rows takes several tiles, which limits the number of partial sums; others take one.
    """
    block = max(1, TILE // columns)
    tiles = triton.cdiv(rows, block)
    steps = triton.next_power_of_2(triton.cdiv(tiles, MOST_PARTIALS)) if summed and tiles else 1
    return block, steps, triton.cdiv(tiles, steps)


def tile_constants(block: int, columns: int) -> dict[str, int]:
    """The size of a tile, and warps for eight values per thread."""
    return {"ROWS": block, "COLUMNS": columns, "num_warps": min(16, max(1, block * columns // 256))}
