"""A memory of training images: which images of a class represent it best (herding), and how many there is room for.

It holds numbers, positions in the data set, unless it is told to hold pixels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from mambacl.errors import UserError
from mambacl.options import Options, at_least
from mambacl.stored import StoredImages


@dataclass(frozen=True)
class MemoryOptions(Options):
    """Options of methods that store images."""

    memory: Literal["indices", "pixels"] = "indices"
    """indices: positions in the data set, which has to stay; pixels: the images themselves, in the checkpoints"""
    images: Annotated[int, at_least(1)] = 2000
    """images stored in total, divided equally among the classes so far"""
    per_class: Annotated[int | None, at_least(1)] = None
    """images stored per class, in place of a total"""

    def room(self, classes: int) -> int:
        """Images of a class when there are so many classes."""
        room = self.per_class or self.images // max(1, classes)
        if not room:
            raise UserError(
                f"options.images = {self.images} is too few for {classes} classes, which need one each: set "
                f"options.images to {classes} or more, or options.per_class."
            )
        return room

    def words(self, classes: int) -> str:
        """What is stored, in one sentence; `classes` of the whole run, 0 if unknown."""
        total = self.images if self.per_class is None else self.per_class * classes
        many = f"{self.per_class} images per class" if not total else f"up to {total:,} images"
        where = "as positions in the data set" if self.memory == "indices" else "with their pixels in the checkpoints"
        return f"This method stores training images: {many} of earlier tasks, {where} (options.memory)."


@torch.no_grad()
def herd(features: Tensor, count: int) -> list[int]:
    """The rows of (n, d), at most `count`, whose running mean stays closest to the mean of all rows, in the order in
    which they are picked: row k minimises |mean - (sum of the rows before it + row) / k|. The order of the rows plays
    no part: they are sorted first, so that sums and ties are the same for any order."""
    order = features.unique(dim=0, return_inverse=True)[1].argsort(stable=True)
    rows = features[order]
    mean, total, picked = rows.mean(0), torch.zeros_like(rows[:1]), []
    free = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    for k in range(1, min(count, len(rows)) + 1):
        distance = (mean - (rows + total) / k).square().sum(1).masked_fill(~free, torch.inf)
        best = int(distance.argmin())
        picked.append(int(order[best]))
        free[best] = False
        total = total + rows[best]
    return picked


class ExemplarMemory:
    """Old classes first; the images of a class in the order in which herding picked them, so that a smaller memory
    keeps the first."""

    def __init__(self, options: MemoryOptions) -> None:
        self.options = options
        none = torch.zeros(0, dtype=torch.int64)
        self.held = StoredImages(none, none, none, () if options.memory == "pixels" else None)

    def stored(self) -> StoredImages | None:
        """For the batches; None if there are none. The same object until something changes."""
        return self.held if len(self.held) else None

    def update(self, features: Tensor, labels: Tensor, first: int, classes: int, task: int) -> list[int]:
        """Takes in a task. `features` are those of its images in the order of the data set, then those of the images
        stored so far; the classes from label `first` to `classes` are new. Returns the rows of what is stored now."""
        room, given = self.options.room(classes), labels.tolist()
        new = [row for row, label in enumerate(given) if label >= first]
        old = [row for row, label in enumerate(given) if label < first]
        if len(old) > len(self.held) or not {given[row] for row in new}.isdisjoint(self.held.labels.tolist()):
            raise UserError(
                "A class that is stored already cannot come again in a later task: give all of its images to one task."
            )
        kept, seen = [], dict[int, int]()
        for place, label in enumerate(self.held.labels.tolist()):
            seen[label] = seen.get(label, 0) + 1
            if seen[label] <= room:
                kept.append(place)
        rows = [old[place] for place in kept if place < len(old)]
        picked: list[int] = []
        for label in range(first, classes):
            if members := [row for row in new if given[row] == label]:
                picked += [members[i] for i in herd(features[members].cpu().double(), room)]
        position = {row: place for place, row in enumerate(new)}
        held, here = self.held, torch.tensor(picked, dtype=torch.int64)
        self.held = StoredImages(
            torch.cat((held.labels[kept], labels.cpu()[here])),
            torch.cat((held.tasks[kept], torch.full_like(here, task))),
            torch.cat((held.positions[kept], torch.tensor([position[row] for row in picked], dtype=torch.int64))),
            None if held.pixels is None else tuple(held.pixels[place] for place in kept),
        )
        return rows + picked

    def keep(self, read: Callable[[int], Tensor]) -> None:
        """Completes the pixels, if these are kept. `read` returns an image of the latest task by its position."""
        if self.held.pixels is not None:
            missing = self.held.positions[len(self.held.pixels) :].tolist()
            self.held = replace(self.held, pixels=(*self.held.pixels, *(read(place).clone() for place in missing)))

    def state_dict(self) -> dict[str, Tensor]:
        held = self.held
        state = {"labels": held.labels, "tasks": held.tasks, "positions": held.positions}
        if held.pixels is not None:
            none = torch.zeros(0, dtype=torch.uint8)
            state["pixels"] = torch.cat([none, *(image.flatten() for image in held.pixels)])
            sizes = [image.shape[1:] for image in held.pixels]
            state["sizes"] = torch.tensor(sizes, dtype=torch.int64).reshape(-1, 2)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        own = {name: tensor.cpu() for name, tensor in state.items()}
        pixels: tuple[Tensor, ...] | None = None
        if "pixels" in own:
            sizes = own["sizes"].tolist()
            parts = own["pixels"].split([3 * height * width for height, width in sizes])
            pixels = tuple(part.view(3, *size) for part, size in zip(parts, sizes, strict=True))
        self.held = StoredImages(own["labels"], own["tasks"], own["positions"], pixels)
