"""Work that ranks share out: each does its share, and passes the results on to the others.

    owners = shared_out({key: cost, ...})          # the same on all ranks
    with failing_together():
        mine = {key: work(key) for key in own(owners)}
    found = passed_round(mine, owners, shapes, like)

In a single process, that one owns everything and passes nothing on. `is_cut` says whether a tensor itself is shared
out, as `shards` explains.
"""

import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from mambacl import processes
from mambacl.errors import UserError

K = TypeVar("K", bound=Hashable)


def is_cut(tensor: Tensor) -> bool:
    """Whether it is a DTensor. Without importing them: that takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def any_is_cut(tensors: Mapping[str, Tensor]) -> bool:
    """Whether any is; quick where there are no DTensors, because every step asks."""
    return "torch.distributed.tensor" in sys.modules and any(is_cut(tensor) for tensor in tensors.values())


def shared_out(costs: Mapping[K, float], count: int | None = None) -> dict[K, int]:
    """The rank that does each piece of work: the most expensive first, each to the rank with the least to do."""
    loads = [0.0] * (processes.count() if count is None else count)
    found: dict[K, int] = {}
    for key in sorted(costs, key=lambda key: -costs[key]):  # stable: equal ones in the order given
        owner = loads.index(min(loads))
        found[key] = owner
        loads[owner] += costs[key]
    return {key: found[key] for key in costs}


def own(owners: Mapping[K, int]) -> list[K]:
    """What this rank does."""
    return [key for key, owner in owners.items() if owner == processes.rank()]


def passed_round(
    mine: Mapping[K, Tensor], owners: Mapping[K, int], shapes: Mapping[K, Sequence[int]], like: Tensor
) -> dict[K, Tensor]:
    """Every rank's tensors, by key, with the same bits on all ranks. `like`: has their dtype, and the device on which
    ranks exchange tensors."""
    if processes.count() == 1:
        return dict(mine)
    found: dict[K, Tensor] = {}
    for number in range(processes.count()):
        keys = [key for key, owner in owners.items() if owner == number]
        sizes = [torch.Size(shapes[key]).numel() for key in keys]
        flat = like.new_empty(sum(sizes))
        if number == processes.rank():
            for place, key in zip(flat.split(sizes), keys, strict=True):
                place.copy_(mine[key].reshape(-1))
        if flat.numel():
            processes.copy_from([flat], number)
        found |= {key: t.view(tuple(shapes[key])) for key, t in zip(keys, flat.split(sizes), strict=True)}
    return {key: found[key] for key in owners}


@contextmanager
def failing_together() -> Iterator[None]:
    """What fails within it on one rank fails on all of them afterwards, so that none waits for a rank that is gone."""
    if processes.count() == 1:
        yield
        return
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    try:
        said = processes.together(None if failure is None else f"{failure}" or type(failure).__name__)
    except Exception:
        if failure is None:
            raise
        said = []
    if failure is not None:
        raise failure
    for number, text in enumerate(said):
        if text is not None:
            raise UserError(f"Process {number} failed: {text}")
