"""Class orders: the conventions of the public code bases, by name. A seed means nothing across them."""

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from mambacl.errors import UserError
from mambacl.paths import expanded
from mambacl.registry import did_you_mean


def natural(classes: int, seed: int) -> list[int]:
    return list(range(classes))


def pilot(classes: int, seed: int) -> list[int]:
    """PILOT, PyCIL and CPrompt (their usual seed is 1993)."""
    import numpy as np  # here, because options are checked without it

    return np.random.RandomState(seed).permutation(classes).tolist()


def mamba_cl(classes: int, seed: int) -> list[int]:
    """The public Mamba-CL and VPT-NSP (seeds 2024, 2025, 2026)."""
    import numpy as np

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


def class_order(
    order: str | Sequence[int],
    classes: int,
    seed: int | None = None,
    names: Sequence[str] | None = None,
    what: str = "class",
) -> list[int]:
    """The classes in the order in which they are learned: by a convention's name, from a file of class numbers or
    names, or as an explicit list. `what` they are called may be something else, such as "domain"."""
    if isinstance(order, str) and is_file(order):
        order = read_order(expanded(order), names or [], what)
    if isinstance(order, str):
        if order not in ORDERS:
            known = ", ".join(ORDERS)
            hint = did_you_mean(order, ORDERS)
            raise UserError(
                f"There is no {what} order '{order}'.{hint} Known: {known}, a list of {what} numbers, or the path of a "
                f"file (.txt) with one {what} a line."
            )
        if seed is not None and not 0 <= seed < 2**32:
            raise UserError(f"order_seed must lie between 0 and 2^32 - 1, got {seed}.")
        function, usual = ORDERS[order]
        return function(classes, usual if seed is None else seed)
    if sorted(order) != list(range(classes)):
        several = {"class": "classes"}.get(what, f"{what}s")
        raise UserError(f"A {what} order lists each of the {classes} {several}, 0 to {classes - 1}, exactly once.")
    return [int(c) for c in order]


def is_file(order: str) -> bool:
    return order not in ORDERS and expanded(order).is_file()


def read_order(path: Path, names: Sequence[str], what: str = "class") -> list[int]:
    """One class a line, by number or name; empty lines do not count."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"The {what} order {path} cannot be read ({error}): write one {what} a line, in UTF-8."
        ) from None
    number = {name: position for position, name in enumerate(names)}
    by_name = not all(line.isdecimal() for line in lines) or (bool(number) and all(line in number for line in lines))
    if not by_name:
        return [int(line) for line in lines]
    for line in lines:
        if line not in number:
            raise UserError(f"The {what} order {path} names '{line}', which is no {what}.{did_you_mean(line, names)}")
    return [number[line] for line in lines]


def split_into_tasks(
    order: Sequence[int], tasks: int | Sequence[int], first_task: int | None = None
) -> list[list[int]]:
    """The order cut into tasks: so many of (nearly) equal size, after a first one of `first_task` classes if given, or
    of the sizes listed."""
    classes = len(order)
    if first_task is not None:
        if not isinstance(tasks, int) or tasks < 2 or not 1 <= first_task <= classes - (tasks - 1):
            raise UserError(
                f"first_task takes some of the {classes} classes and leaves one at least for each of the other tasks, "
                f"whose number stands in tasks: not {first_task} of {tasks}."
            )
        return [list(order[:first_task]), *split_into_tasks(order[first_task:], tasks - 1)]
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
