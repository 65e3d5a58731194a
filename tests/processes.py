"""Runs a function in several processes that exchange tensors through gloo, as the ranks of one run do.

    results = on_ranks(2, train, folder)  # train(folder) in two processes: what each returns, by rank

The function must be importable: one at the top of a test file. What it gets and returns must be picklable. A fork of a
process that has imported PyTorch already starts the ranks, so they are quick.
"""

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch


class RankError(AssertionError):
    """A rank that raised an error, died or did not end in time. `error` is what it raised, if it can be pickled."""

    def __init__(self, rank: int, text: str, error: BaseException | None = None) -> None:
        super().__init__(f"rank {rank}: {text}")
        self.rank, self.text, self.error = rank, text, error


def on_ranks(count: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120.0) -> list[Any]:
    """What the function returns in each process, by rank. Raises the first error of a rank that was not caused by
    another rank's end."""
    found = outcomes(count, function, *arguments, timeout=timeout)
    failed = [one for one in found if isinstance(one, RankError)]
    if failed:
        raise next((one for one in failed if one.error is not None and not _of_exchange(one.error)), failed[0])
    return found


def outcomes(count: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120.0) -> list[Any]:
    """What the function returns in each process, by rank, or a `RankError`. Processes that take longer than `timeout`
    seconds are killed."""
    with tempfile.TemporaryDirectory() as name:
        folder, context = Path(name), _context()
        torch.save(arguments, folder / "arguments.pt")  # in a file: processes would share the memory of tensors
        ranks = [
            context.Process(target=_run, args=(folder, number, count, timeout, function))  # type: ignore[attr-defined]
            for number in range(count)
        ]
        for rank in ranks:
            rank.start()
        try:
            return _collected(folder, ranks, timeout)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def _collected(folder: Path, ranks: list[BaseProcess], timeout: float) -> list[Any]:
    end = time.monotonic() + timeout
    for rank in ranks:
        rank.join(max(0.0, end - time.monotonic()))
    found: list[Any] = []
    for number, rank in enumerate(ranks):
        path = folder / f"{number}.pt"
        if rank.exitcode is None:
            found.append(RankError(number, f"did not end within {timeout:g} seconds"))
        elif not path.exists():
            found.append(RankError(number, f"died with exit code {rank.exitcode}"))
        else:
            result, text, error = torch.load(path, weights_only=False)
            found.append(RankError(number, text, error) if text else result)
    return found


def _context() -> BaseContext:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "mambacl.nullspace.space"])
    return context


def _run(folder: Path, rank: int, count: int, timeout: float, function: Callable[..., Any]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=timeout),
    )
    result: tuple[Any, str, BaseException | None]
    try:
        result = function(*torch.load(folder / "arguments.pt", weights_only=False)), "", None
    except BaseException as error:
        result = None, traceback.format_exc(), error
    written = folder / f"{rank}.part"
    try:
        torch.save(result, written)
    except Exception:  # an error that cannot be pickled
        torch.save((None, result[1] or traceback.format_exc(), None), written)
    written.rename(folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def _of_exchange(error: BaseException) -> bool:
    """Whether it says that another rank is gone."""
    return isinstance(error, RuntimeError) and "gloo" in str(error).lower()
