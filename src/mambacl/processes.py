"""The processes that train one run together, and what they exchange. `torchrun` starts and numbers them: the ranks.

In a single process everything here does nothing: there is one path for one process and for many. All ranks call the
functions below in the same order, because each waits for the others. PyTorch is imported only when there is something
to exchange.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from mambacl.errors import UserError
from mambacl.log import logger

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch._C._distributed_c10d import Store

T = TypeVar("T")
LOST = (  # said by one that is left
    "Another process of this run has ended or cannot be reached, so this one cannot go on: see its message, or the "
    "system's log if it was killed"
)
EVERY = 0.02  # seconds between two looks at who has come
WORDS = 1 << 22  # of a tensor that are summed at once
PATIENCE = 1800.0  # seconds; PyTorch's own for a process that does not come

_restarted = False


def launched() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def count() -> int:
    """Number of processes that have joined: 1 before `join`."""
    torch = sys.modules.get("torch")
    if torch is None or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    return torch.distributed.get_world_size()


def rank() -> int:
    """The number of this process, from 0; known before it has joined."""
    if count() > 1:
        import torch

        return torch.distributed.get_rank()
    return int(os.environ["RANK"]) if launched() else 0


def is_first() -> bool:
    """Whether this process writes files and speaks to the user."""
    return rank() == 0


def on_machine() -> tuple[int, int]:
    """The number of this process on its machine, from 0, and how many there are on it."""
    if not launched():
        return 0, 1
    return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])


def restarted() -> bool:
    """Whether torchrun has started the processes again, after one of them died or came late; known after `join`, and
    the same in all."""
    return _restarted


def launch() -> str:
    """The name that torchrun gives to its processes and those that it starts again in their place; empty without
    torchrun. Launches have different names if they are `--standalone` or differ in `--rdzv-id`."""
    return os.environ["TORCHELASTIC_RUN_ID"] if launched() else ""


def join(device: torch.device) -> None:
    """Joins the processes that torchrun has started, until this process ends; `device` is this process's. Without
    torchrun, and the second time, it does nothing."""
    import torch
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    global _restarted

    if not launched() or torch.distributed.is_initialized():
        return
    on_gpu = device.type == "cuda"
    store, number, size = next(rendezvous("env://"))
    name, _restarted = _meet(store, number, size)
    store = PrefixStore(name, store)
    torch.distributed.init_process_group(
        "nccl" if on_gpu else "gloo", store=store, rank=number, world_size=size, device_id=device if on_gpu else None
    )
    atexit.register(_leave)
    if not is_first():
        logger.setLevel(logging.ERROR)


def _meet(store: Store, number: int, size: int) -> tuple[str, bool]:
    """A name that the processes of this start have in common and those of earlier ones do not, and whether there were
    earlier ones.

    In the same store, restarted processes would find the addresses of dead ones under the same names. torchrun counts
    restarts on each machine, and only those for a process that died there, so the counts can differ. Here each process
    says who it is, the first answers with the name, again if it sees someone new, until all have said that they know.
    """
    own = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{uuid.uuid4().hex}"
    if number > 0:
        store.set(f"here-{number}", own)
        name = store.get(f"name-for-{own}").decode()
        store.set(f"{name}-known-to-{number}", "yes")
        return name, name.startswith("again")
    start = store.add("starts", 1)
    name = f"{'first' if start == 1 and own.startswith('0-') else 'again'}-{uuid.uuid4().hex}"
    missing, end, answered = set(range(1, size)), time.monotonic() + PATIENCE, set[str]()
    while missing:
        for other in sorted(missing):
            if not store.check([f"here-{other}"]):
                continue
            asking = store.get(f"here-{other}").decode()
            if asking not in answered:
                store.set(f"name-for-{asking}", name)
                answered.add(asking)
            elif store.check([f"{name}-known-to-{other}"]):
                missing.remove(other)
        if time.monotonic() > end:
            raise UserError(f"Process {min(missing)} of {size} has not come within {PATIENCE / 60:.0f} minutes.")
        time.sleep(EVERY)
    return name, name.startswith("again")


def _leave() -> None:
    """At a good end. After an error, others can be in an exchange that this process never joins: with NCCL, leaving in
    good order would wait for it, and they would wait until their timeout."""
    import torch

    if torch.distributed.is_initialized() and not hasattr(sys, "last_value"):
        torch.distributed.destroy_process_group()


def leave_at_once() -> None:
    """From now on, this process is to end without waiting for others: it has failed."""
    atexit.unregister(_leave)


def part(length: int, of: int | None = None, number: int | None = None) -> slice:
    """This rank's part of `length` things in a row, e.g. the images of a batch: parts differ by at most one in size. It
    is empty if there are fewer things than ranks. `of` and `number`: of another number of ranks, or of another rank."""
    of = count() if of is None else of
    number = rank() if number is None else number
    return slice(length * number // of, length * (number + 1) // of)


def sum_(tensors: Iterable[Tensor], largest: bool = False) -> None:
    """Replaces each tensor by the sum over all ranks, in its own precision; `largest`: by the elementwise maximum."""
    if count() > 1:
        import torch

        kind = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
        for tensor in tensors:
            torch.distributed.all_reduce(tensor, kind)


def copy_from(tensors: Iterable[Tensor], source: int = 0) -> None:
    """Replaces each tensor by that of one rank."""
    if count() > 1:
        import torch

        for tensor in tensors:
            torch.distributed.broadcast(tensor, source)


def rows(own: Tensor) -> Tensor:
    """The rows of all ranks, one rank after another; ranks can have different numbers of them, or none."""
    if count() == 1:
        return own
    import torch

    lengths = together(len(own))
    padded = own.new_zeros(max(lengths), *own.shape[1:])
    padded[: len(own)] = own
    found = [torch.empty_like(padded) for _ in lengths]
    torch.distributed.all_gather(found, padded)
    return torch.cat([rows[:length] for rows, length in zip(found, lengths, strict=True)])


def from_first(value: T) -> T:
    """The first rank's value, which can be any Python object; other ranks' values are ignored."""
    if count() == 1:
        return value
    import torch

    found: list[Any] = [value]
    torch.distributed.broadcast_object_list(found, 0)
    return found[0]


def decide(work: Callable[[], T]) -> T:
    """What `work` returns in the first rank, which alone does it; or the error that it raises there, in all."""
    if count() == 1:
        return work()
    value: Any = None
    raised: Exception | None = None
    if is_first():
        try:
            value = work()
        except Exception as error:
            raised = error
    said = raised if raised is None or isinstance(raised, (UserError, OSError)) else RuntimeError(str(raised))
    value, elsewhere = from_first((value, said))
    if raised is not None:
        raise raised
    if elsewhere is not None:
        raise elsewhere
    return value


def together(value: T) -> Sequence[T]:
    """Every rank's value, by rank."""
    if count() == 1:
        return [value]
    import torch

    found: list[Any] = [None] * count()
    torch.distributed.all_gather_object(found, value)
    return found


def differing(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of a tensor whose bits are not the same in all ranks; None if there is none."""
    if count() == 1:
        return None
    found = together([checksum(x.detach()) for x in tensors.values()])
    return next(
        (name for name, values in zip(tensors, zip(*found, strict=True), strict=True) if len(set(values)) > 1), None
    )


def checksum(tensor: Tensor) -> int:
    """Of its bits and their places: other signs or another order give another number."""
    import torch

    words = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[tensor.element_size()]
    total = 0
    for some in tensor.contiguous().flatten().view(words).split(WORDS):
        places = torch.arange(1, len(some) + 1, device=some.device)
        total = 31 * total + int((some * places).sum())  # `places` are int64, where sums may overflow
    return total % (1 << 61)


def wait() -> None:
    """Waits until all ranks are here."""
    if count() > 1:
        import torch

        torch.distributed.barrier()


def is_loss(error: BaseException) -> bool:
    """Whether an error says that another process is gone."""
    if count() == 1:
        return False
    import torch

    words = ("gloo", "nccl", "connection closed", "connection reset")
    of_backend = isinstance(error, torch.distributed.DistError)
    return of_backend or (isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words))
