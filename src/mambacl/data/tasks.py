"""Class orders, and tasks cut from them: groups of classes, or domains with the same classes in each.

Orders are the conventions of the public code bases, by name; a seed means nothing across them. Without PyTorch and
NumPy: options are checked before they are loaded.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mambacl.errors import UserError
from mambacl.files import expanded
from mambacl.registry import did_you_mean

if TYPE_CHECKING:
    from mambacl.data.dataset import DataSet, Domains


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
                f"file (.txt) with one {what} per line."
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
    """One class per line, by number or name; empty lines do not count."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"The {what} order {path} cannot be read ({error}): write one {what} per line, in UTF-8."
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
    """The order cut into tasks: a number of (nearly) equal size, after a first one of `first_task` classes if given, or
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


def tasks_of(
    dataset: DataSet,
    tasks: int | Sequence[int] | Literal["own"],
    order: str | Sequence[int] = "natural",
    order_seed: int | None = None,
    first_task: int | None = None,
) -> tuple[list[int], list[list[int]]]:
    """The order of the classes, and those of each task."""
    if isinstance(tasks, str):
        if dataset.tasks is None:
            if dataset.domains is not None and (found := class_in_several(dataset, dataset.domains)):
                raise UserError(f"{found}: give each class one task, or set stream.scenario to domain.")
            raise UserError(f"The data set {dataset.name} names no tasks: give stream.tasks a number.")
        if order != "natural" or first_task is not None:
            raise UserError("The data set's own tasks keep their order: leave stream.order and first_task out.")
        return [c for task in dataset.tasks for c in task], [list(task) for task in dataset.tasks]
    classes = class_order(order, len(dataset.class_names), order_seed, dataset.class_names)
    return classes, split_into_tasks(classes, tasks, first_task)


def domains_in_order(
    dataset: DataSet, order: str | Sequence[int] = "natural", order_seed: int | None = None
) -> Domains:
    """The data set's domains, numbered in the order in which they are learned."""
    import numpy as np

    domains = dataset.domains
    if domains is None:
        raise UserError(
            f"The data set {dataset.name} names no domains: use domainnet-345, domain-folders or a manifest with a "
            "task for each image, or leave stream.scenario out."
        )
    _refuse_unusable(dataset, domains)
    wanted = class_order(order, len(domains.names), order_seed, domains.names, "domain")
    place = np.argsort(wanted)
    names = [domains.names[d] for d in wanted]
    return dataclasses.replace(domains, names=names, train=place[domains.train], test=place[domains.test])


def _refuse_unusable(dataset: DataSet, domains: Domains) -> None:
    import numpy as np

    for split, numbers in (("training", domains.train), ("test", domains.test)):
        counts = np.bincount(numbers, minlength=len(domains.names))
        if (counts == 0).any():
            empty = domains.names[int(np.argmin(counts))]
            raise UserError(f"The domain '{empty}' of {dataset.name} has no {split} images; add some, or remove it.")
    if class_in_several(dataset, domains) is None:
        raise UserError(
            f"Each class of {dataset.name} comes from one domain only, which makes its tasks class-incremental: leave "
            "stream.scenario out, or use a data set whose domains share classes, such as domainnet-345."
        )


def class_in_several(dataset: DataSet, domains: Domains) -> str | None:
    """Which class is in more than one of them, in words; None where no class is."""
    import numpy as np

    classes = len(dataset.class_names)
    both = [(domains.train, dataset.train.labels), (domains.test, dataset.test.labels)]
    pairs = np.unique(np.concatenate([numbers + len(domains.names) * labels for numbers, labels in both]))
    counts = np.bincount(pairs // len(domains.names), minlength=classes)
    if (counts < 2).all():
        return None
    found = int(np.argmax(counts > 1))
    one, other = (domains.names[p % len(domains.names)] for p in pairs[pairs // len(domains.names) == found][:2])
    return f"The class '{dataset.class_names[found]}' of {dataset.name} is in the tasks '{one}' and '{other}'"
