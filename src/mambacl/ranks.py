"""The processes that train one run together, and what they exchange. `torchrun` starts and numbers them: the ranks.

In a single process everything here does nothing: there is one path for one process and for many. All ranks call the
functions below in the same order, because each waits for the others.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def count() -> int:
    """Number of processes."""
    processes = torch.distributed
    together = processes.is_available() and processes.is_initialized()
    return processes.get_world_size() if together else 1


def rank() -> int:
    """The number of this process, from 0."""
    return torch.distributed.get_rank() if count() > 1 else 0


def is_first() -> bool:
    """Whether this process writes files and speaks to the user."""
    return rank() == 0


def launched() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def part(length: int, of: int | None = None, number: int | None = None) -> slice:
    """This rank's part of `length` things in a row, e.g. the images of a batch: parts differ by at most one in size. It
    is empty if there are fewer things than ranks. `of` and `number`: of another number of ranks, or of another rank."""
    of = count() if of is None else of
    number = rank() if number is None else number
    return slice(length * number // of, length * (number + 1) // of)


def sum_(tensors: Iterable[Tensor], largest: bool = False) -> None:
    """Replaces each tensor by the sum over all ranks, in its own precision; `largest`: by the elementwise maximum."""
    if count() > 1:
        kind = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
        for tensor in tensors:
            torch.distributed.all_reduce(tensor, kind)


def copy_from(tensors: Iterable[Tensor], source: int = 0) -> None:
    """Replaces each tensor by that of one rank."""
    if count() > 1:
        for tensor in tensors:
            torch.distributed.broadcast(tensor, source)


def from_first(value: T) -> T:
    """The first rank's value, which can be any Python object; other ranks' values are ignored."""
    if count() == 1:
        return value
    found: list[Any] = [value]
    torch.distributed.broadcast_object_list(found, 0)
    return found[0]


def together(value: T) -> Sequence[T]:
    """Every rank's value, by rank."""
    if count() == 1:
        return [value]
    found: list[Any] = [None] * count()
    torch.distributed.all_gather_object(found, value)
    return found


def wait() -> None:
    """Waits until all ranks are here."""
    if count() > 1:
        torch.distributed.barrier()


@contextmanager
def joined(device: torch.device) -> Iterator[None]:
    """Joins the processes that torchrun has started; `device` is this process's."""
    if not launched() or torch.distributed.is_initialized():
        yield
        return
    on_gpu = device.type == "cuda"
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
