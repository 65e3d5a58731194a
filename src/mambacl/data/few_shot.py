"""Few-shot streams: a first task of base classes with all their images, then tasks ("sessions") of a few classes with a
few images each. The test images stay all of those there are.

Classes and images are drawn by seeds, or a protocol's own lists name them, as the public splits of few-shot
class-incremental learning do: a file per session with one training image per line.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from mambacl.data.config import StreamConfig
from mambacl.data.dataset import DataSet, indices_by_group
from mambacl.data.images import Images
from mambacl.data.tasks import class_order
from mambacl.errors import UserError


def with_sessions(dataset: DataSet, config: StreamConfig) -> DataSet:
    """The data set with the few-shot tasks as its own, and only their training images."""
    if config.session_lists is not None:
        tasks, kept = listed_sessions(dataset, Path(config.session_lists))
    else:
        order = class_order(config.order, len(dataset.class_names), config.order_seed, dataset.class_names)
        tasks = sessions(order, config.first_task, config.way)
        kept = drawn(dataset, tasks, config.shot, config.shot_seed)
    domains = dataset.domains and dataclasses.replace(dataset.domains, train=dataset.domains.train[kept])
    return dataclasses.replace(dataset, train=dataset.train.subset(kept), tasks=tasks, domains=domains)


def sessions(order: Sequence[int], base: int | None, way: int) -> list[list[int]]:
    """The base classes and then `way` classes at a time. Without `base`, as many full sessions as fit into two fifths
    of the classes."""
    classes = len(order)
    base = classes - way * (2 * classes // (5 * way)) if base is None else base
    if not 1 <= base < classes or (classes - base) % way:
        raise UserError(
            f"Few-shot tasks of {way} classes need base classes that leave a multiple of {way} of the {classes} "
            f"classes, got {base} base classes: set stream.first_task and stream.way."
        )
    return [list(order[:base]), *(list(order[start : start + way]) for start in range(base, classes, way))]


def drawn(dataset: DataSet, tasks: Sequence[Sequence[int]], shot: int, seed: int) -> NDArray[np.int64]:
    """The indices of the base classes' images, and of `shot` images of every other class. Which ones depends only on
    the seed and the class's number in the data set."""
    members = indices_by_group(dataset.train.labels, len(dataset.class_names))
    kept = [members[c] for c in tasks[0]]
    for c in (c for task in tasks[1:] for c in task):
        if len(members[c]) < shot:
            raise UserError(
                f"The class '{dataset.class_names[c]}' has {len(members[c])} training images, fewer than "
                f"{shot}: lower stream.shot."
            )
        chosen = np.random.Generator(np.random.PCG64((seed, c))).choice(members[c], shot, replace=False)
        kept.append(chosen)
    return np.sort(np.concatenate(kept))


def listed_sessions(dataset: DataSet, folder: Path) -> tuple[list[list[int]], NDArray[np.int64]]:
    """The classes of each task in the order in which the lists name them, and the indices of the images. Without
    session_1.txt, the base classes are those that no list names, with all their images."""
    number = 2
    listed: list[NDArray[np.int64]] = []
    finder = Finder(dataset.train)
    while (file := folder / f"session_{number}.txt").is_file():
        listed.append(finder.read(file))
        number += 1
    if not listed:
        raise UserError(f"{folder} has no session_2.txt: name a folder with the lists of a few-shot protocol.")
    labels = dataset.train.labels
    tasks = [list(dict.fromkeys(labels[indices].tolist())) for indices in listed]
    if (first := folder / "session_1.txt").is_file():
        base = finder.read(first)
        tasks.insert(0, list(dict.fromkeys(labels[base].tolist())))
    else:
        later = {c for task in tasks for c in task}
        tasks.insert(0, [c for c in range(len(dataset.class_names)) if c not in later])
        base = np.flatnonzero(np.isin(labels, tasks[0]))
    counts = np.bincount([c for task in tasks for c in task], minlength=len(dataset.class_names))
    if (counts != 1).any():
        name = dataset.class_names[int(np.argmax(counts != 1))]
        where = "no list" if counts.min() == 0 and counts[dataset.class_names.index(name)] == 0 else "several lists"
        raise UserError(f"The class '{name}' of {dataset.name} is in {where} of {folder}: each needs exactly one.")
    if not tasks[0]:
        raise UserError(f"The lists in {folder} leave no base classes: add session_1.txt, or remove a list.")
    return tasks, np.sort(np.concatenate([base, *listed]))


class Finder:
    """Finds training images by number, or by the name of their file, with its folder if several have that name."""

    def __init__(self, images: Images) -> None:
        self.images = images
        self.by_file: dict[str, list[int]] = {}

    def read(self, file: Path) -> NDArray[np.int64]:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file} cannot be read ({error}): write one training image per line, in UTF-8.") from None
        if not lines:
            raise UserError(f"{file} is empty: write one training image per line, or remove it.")
        found: list[int] = []
        for line in lines:
            if (index := self.index(line)) is None:
                raise UserError(f"{file} names '{line}', which is not one training image: check stream.dataset, root.")
            found.append(index)
        if len(set(found)) < len(found):
            raise UserError(f"{file} names an image twice: remove one of the lines.")
        return np.array(found, dtype=np.int64)

    def index(self, line: str) -> int | None:
        """None if no image or more than one fits."""
        count = len(self.images.labels)
        if line.isdecimal():
            return int(line) if int(line) < count else None
        if not self.by_file:
            found = defaultdict(list)
            for index in range(count):
                found[PurePosixPath(self.images.name(index)).name].append(index)
            self.by_file = dict(found)
        path = PurePosixPath(line)
        fitting = self.by_file.get(path.name, [])
        if len(fitting) > 1:
            fitting = [i for i in fitting if PurePosixPath(self.images.name(i)).parts[-2:] == path.parts[-2:]]
        return fitting[0] if len(fitting) == 1 else None
