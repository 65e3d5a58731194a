"""The classes and images of a folder FOLDER/CLASS/*, ready for a model."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mambacl.data.images import FileImages, in_threads
from mambacl.data.sets.folders import SPLITS, images_under, subfolders
from mambacl.data.transforms import Transforms
from mambacl.deploy.comparing import class_of
from mambacl.errors import UserError
from mambacl.files import expanded
from mambacl.log import logger


@dataclass(frozen=True)
class ClassFolder:
    """The images of some classes; `skipped` collects the names of images that cannot be read and were left out."""

    names: list[str]
    images: FileImages
    skip_bad: bool = False
    skipped: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.images.labels)

    def counts(self) -> dict[str, int]:
        """Images by class, without those that were skipped so far."""
        left_out = set(self.skipped)
        counts = dict.fromkeys(self.names, 0)
        for index, label in enumerate(self.images.labels.tolist()):
            counts[self.names[label]] += self.images.name(index) not in left_out
        return counts

    def prepared(self, transforms: Transforms, most: int | None = None) -> Iterator[tuple[Tensor, str]]:
        """Images as in evaluation, before normalisation, with their class. With `most`, that many, spread evenly."""

        def prepare(index: int) -> Tensor | str:
            pixels = self.images.try_image(index)
            if isinstance(pixels, str):
                return pixels
            return transforms.evaluate(torch.from_numpy(pixels).permute(2, 0, 1))

        step = 1 if most is None else max(1, len(self) // most)
        indices = range(0, len(self), step)[:most]
        for index, made in zip(indices, in_threads(prepare, indices), strict=True):
            if isinstance(made, Tensor):
                yield made, self.names[self.images.labels[index]]
            elif not self.skip_bad:
                raise self.images.refusal(index, made)
            elif most is None:
                self.skipped.append(self.images.name(index))
                logger.warning("%s %s and is skipped.", self.images.files[index], made)


def open_folder(folder: str | Path, option: str, known: Collection[str] = (), skip_bad: bool = False) -> ClassFolder:
    """`option`: how the user names the folder, for messages. A class in `known` can be a folder in a folder, as the
    class 'T-shirt/top'."""
    place = expanded(folder)
    if not place.is_dir():
        what = "is a file" if place.exists() else "does not exist"
        raise UserError(f"{folder} {what}: {option} takes a folder with one folder of images per class.")
    folders = subfolders(place)
    if splits := [name for name in folders if name.lower() in SPLITS]:
        split = "train" if option == "--new" and "train" in splits else splits[0]
        raise UserError(f"{folder} holds the folder '{split}', not classes: give {place / split} to {option}.")
    if not folders:
        raise UserError(f"{folder} has no class folders: {option} takes a folder that holds CLASS/* for each class.")
    files: list[Path] = []
    for name in folders:
        found = images_under(place / name)
        if not found:
            raise UserError(f"{place / name} has no images: add some, or remove the folder.")
        files += found
    of_file = [class_of(file.relative_to(place), known) for file in files]
    names = list(dict.fromkeys(of_file))
    labels = np.array([names.index(name) for name in of_file], dtype=np.int64)
    return ClassFolder(names, FileImages(place, files, labels), skip_bad)
