"""Work in a thread of its own, while this one does something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")


def in_background(work: Callable[[], T]) -> Future[T]:
    """Runs `work` in a thread that Python waits for at exit.

    It kills a daemon thread when that next asks for the GIL. Inside PyTorch, which gives it up even to free a tensor,
    this aborts the process: the user's mistake would end in "terminate called without an active exception".
    """
    from concurrent.futures import ThreadPoolExecutor  # late: few commands need it

    pool = ThreadPoolExecutor(max_workers=1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future
