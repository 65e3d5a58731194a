"""Class orders: the conventions of the public code bases, by name. A seed means nothing across them."""

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from mambacl.errors import UserError
from mambacl.registry import did_you_mean


def natural(classes: int, seed: int) -> list[int]:
    return list(range(classes))


def pilot(classes: int, seed: int) -> list[int]:
    """PILOT, PyCIL and CPrompt (their usual seed is 1993)."""
    return np.random.RandomState(seed).permutation(classes).tolist()


def mamba_cl(classes: int, seed: int) -> list[int]:
    """The public Mamba-CL and VPT-NSP (seeds 2024, 2025, 2026)."""
    order = np.arange(classes)
    np.random.Generator(np.random.PCG64(seed)).shuffle(order)
    return order.tolist()


def coda_prompt(classes: int, seed: int) -> list[int]:
    """CODA-Prompt: seed 0 is the natural order."""
    order = list(range(classes))
    if seed > 0:
        random.Random(seed).shuffle(order)
    return order


ORDERS: dict[str, tuple[Callable[[int, int], list[int]], int]] = {  # with the seed that each code base starts from
    "natural": (natural, 0),
    "pilot": (pilot, 1993),
    "mamba-cl": (mamba_cl, 2024),
    "coda-prompt": (coda_prompt, 0),
}


def class_order(order: str | Sequence[int], classes: int, seed: int | None = None) -> list[int]:
    """The classes in the order in which they are learned, by a convention's name or as an explicit list."""
    if isinstance(order, str):
        if order not in ORDERS:
            known = ", ".join(ORDERS)
            hint = did_you_mean(order, ORDERS)
            raise UserError(f"There is no class order '{order}'.{hint} Known: {known}, or a list of class numbers.")
        if seed is not None and not 0 <= seed < 2**32:
            raise UserError(f"order_seed must lie between 0 and 2^32 - 1, got {seed}.")
        function, usual = ORDERS[order]
        return function(classes, usual if seed is None else seed)
    if sorted(order) != list(range(classes)):
        raise UserError(f"A class order lists each of the {classes} classes, 0 to {classes - 1}, exactly once.")
    return [int(c) for c in order]


def split_into_tasks(order: Sequence[int], tasks: int | Sequence[int]) -> list[list[int]]:
    """The order cut into tasks: so many of (nearly) equal size, or of the sizes listed."""
    classes = len(order)
    if isinstance(tasks, int):
        if not 1 <= tasks <= classes:
            raise UserError(f"{classes} classes make 1 to {classes} tasks, not {tasks}.")
        sizes = [classes // tasks + (1 if t < classes % tasks else 0) for t in range(tasks)]
    else:
        sizes = [int(size) for size in tasks]
        if sum(sizes) != classes or min(sizes, default=0) < 1:
            raise UserError(f"The task sizes {sizes} must be positive and add up to the {classes} classes.")
    cuts = [sum(sizes[:t]) for t in range(len(sizes) + 1)]
    return [list(order[a:b]) for a, b in pairwise(cuts)]
