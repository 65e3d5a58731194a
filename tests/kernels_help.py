"""Where the tests of Triton kernels run: on the GPU, or in Triton's interpreter, which conftest.py switches on."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def kernels_run() -> bool:
    """Whether Triton is there and, without a GPU, its interpreter is active."""
    try:
        triton = importlib.import_module("triton")
    except ImportError:
        return False
    return DEVICE == "cuda" or not isinstance(triton.language.zeros, triton.runtime.JITFunction)


kernels = pytest.mark.kernels  # conftest.py skips them where none can run
gpu = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="there is no CUDA device")]


@contextmanager
def poisoned() -> Iterator[None]:
    """Within it, new memory is full of NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3, device=DEVICE).isnan().all()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def captured(step: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A CUDA graph of a step that has run once before, and the tensors that a replay fills."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    return graph, made
