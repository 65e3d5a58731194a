"""Class orders and the tasks made from them: groups of classes, or domains that share all classes.

Orders are named after the public code bases whose convention they follow; the same seed means something else in each.
No PyTorch or NumPy here: options are checked before they are imported.
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
    """PILOT, PyCIL and CPrompt (usual seed: 1993)."""
    import numpy as np  # late: options are checked without it

    return np.random.RandomState(seed).permutation(classes).tolist()


def mamba_cl(classes: int, seed: int) -> list[int]:
    """The public Mamba-CL and VPT-NSP (usual seeds: 2024, 2025, 2026)."""
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


ORDERS: dict[str, tuple[Callable[[int, int], list[int]], int]] = {  # with the first seed of each code base
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
    """The classes in the order in which they are learned: from the name of a convention, from a file of class numbers
    or names, or from a list. `what` is the word for a class in messages, e.g. "domain"."""
    if isinstance(order, str) and is_file(order):
        order = read_order(expanded(order), names or [], what)
    if isinstance(order, str):
        if order not in ORDERS:
            known = ", ".join(ORDERS)
            hint = did_you_mean(order, ORDERS)
            raise UserError(
                f"There is no {what} order '{order}'.{hint} Known: {known}, a list of {what} numbers, or the path of a "
                f"text file with one {what} per line."
            )
        if seed is not None and not 0 <= seed < 2**32:
            raise UserError(f"order_seed must be between 0 and 2^32 - 1, got {seed}.")
        function, usual = ORDERS[order]
        return function(classes, usual if seed is None else seed)
    if sorted(order) != list(range(classes)):
        several = {"class": "classes"}.get(what, f"{what}s")
        raise UserError(f"A {what} order must list each of the {classes} {several}, 0 to {classes - 1}, exactly once.")
    return [int(c) for c in order]


def is_file(order: str) -> bool:
    return order not in ORDERS and expanded(order).is_file()


def read_order(path: Path, names: Sequence[str], what: str = "class") -> list[int]:
    """Reads one class per line, by number or name, and ignores empty lines."""
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
            raise UserError(f"The {what} order {path} has '{line}', which is not a {what}.{did_you_mean(line, names)}")
    return [number[line] for line in lines]


def split_into_tasks(
    order: Sequence[int], tasks: int | Sequence[int], first_task: int | None = None
) -> list[list[int]]:
    """Cuts the order into tasks: either a number of (nearly) equal size, after a first one with `first_task` classes if
    given, or tasks of these sizes."""
    classes = len(order)
    if first_task is not None:
        if not isinstance(tasks, int) or tasks < 2 or not 1 <= first_task <= classes - (tasks - 1):
            raise UserError(
                f"first_task must leave at least one of the {classes} classes for each other task, and tasks must be "
                f"a number of at least 2, got first_task {first_task} and tasks {tasks}."
            )
        return [list(order[:first_task]), *split_into_tasks(order[first_task:], tasks - 1)]
    if isinstance(tasks, int):
        if not 1 <= tasks <= classes:
            raise UserError(f"tasks must be between 1 and {classes}, the number of classes, got {tasks}.")
        sizes = [classes // tasks + (1 if t < classes % tasks else 0) for t in range(tasks)]
    else:
        sizes = [int(size) for size in tasks]
        if sum(sizes) != classes or min(sizes, default=0) < 1:
            raise UserError(f"The task sizes {sizes} must be positive and add up to the {classes} classes.")
    cuts = [sum(sizes[:t]) for t in range(len(sizes) + 1)]
    return [list(order[a:b]) for a, b in pairwise(cuts)]


Tasks = int | Sequence[int] | Literal["own"]


def tasks_or_domains(
    dataset: DataSet, scenario: str, tasks: Tasks, order: str | Sequence[int], seed: int | None, first: int | None
) -> tuple[list[int], list[list[int]], Domains | None]:
    """The class order, the classes of each task, and the domains if these are the tasks."""
    if scenario != "domain":
        return *tasks_of(dataset, tasks, order, seed, first), None
    domains = domains_in_order(dataset, order, seed)
    classes = list(range(len(dataset.class_names)))
    return classes, [list(classes) for _ in domains.names], domains


def tasks_of(
    dataset: DataSet,
    tasks: Tasks,
    order: str | Sequence[int] = "natural",
    order_seed: int | None = None,
    first_task: int | None = None,
) -> tuple[list[int], list[list[int]]]:
    """The class order, and the classes of each task."""
    if isinstance(tasks, str):
        if dataset.tasks is None:
            if dataset.domains is not None and (found := class_in_several(dataset, dataset.domains)):
                raise UserError(f"{found}: give each class one task, or set stream.scenario to domain.")
            raise UserError(f"The data set {dataset.name} defines no tasks: set stream.tasks to a number.")
        if order != "natural" or first_task is not None:
            raise UserError("The data set's own tasks have a fixed order: remove stream.order and first_task.")
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
            f"The data set {dataset.name} defines no domains: use domainnet-345, domain-folders or a manifest with a "
            "task for each image, or remove stream.scenario."
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
            f"Each class of {dataset.name} comes from only one domain, which makes its tasks class-incremental: remove "
            "stream.scenario, or use a data set whose domains share classes, such as domainnet-345."
        )


def class_in_several(dataset: DataSet, domains: Domains) -> str | None:
    """A sentence about a class that is in more than one domain; None if no class is."""
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
