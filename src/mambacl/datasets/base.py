"""What a data set is: named classes and two splits of labelled images, in memory or on disk."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mambacl.datasets.decoding import attempt, decode, in_threads
from mambacl.errors import UserError
from mambacl.log import logger
from mambacl.registry import Registry


class Images(Protocol):
    """A split: images by index as uint8 (3, h, w), their labels, and a digest of both."""

    labels: NDArray[np.int64]

    def image(self, index: int) -> Tensor: ...

    def digest(self) -> str: ...

    def check(self) -> None: ...

    def subset(self, indices: NDArray[np.int64]) -> "Images": ...


class ArrayImages:
    """Images in one uint8 array, (n, h, w) for grey ones or (n, h, w, 3)."""

    def __init__(self, pixels: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
        self.pixels, self.labels = pixels, np.asarray(labels, dtype=np.int64)

    def image(self, index: int) -> Tensor:
        pixels = torch.from_numpy(np.ascontiguousarray(self.pixels[index]))
        return pixels.expand(3, *pixels.shape) if pixels.dim() == 2 else pixels.permute(2, 0, 1)

    def check(self) -> None:
        return

    def digest(self) -> str:
        content = hashlib.sha256(np.ascontiguousarray(self.pixels).data)
        content.update(self.labels.tobytes())
        return content.hexdigest()

    def subset(self, indices: NDArray[np.int64]) -> "ArrayImages":
        return ArrayImages(self.pixels[indices], self.labels[indices])


class FileImages:
    """Image files, decoded when asked for. The digest covers names, sizes and labels, not the pixels."""

    def __init__(self, root: Path, files: Sequence[Path], labels: NDArray[np.int64], checked: bool = False) -> None:
        self.root, self.files, self.labels = root, list(files), np.asarray(labels, dtype=np.int64)
        self.checked = checked

    def image(self, index: int) -> Tensor:
        return torch.from_numpy(decode(self.files[index])).permute(2, 0, 1)

    def check(self) -> None:
        """Decodes every file, so that a bad one is found before the first task is trained."""
        if not self.checked:
            for _ in in_threads(decode, self.files):
                pass

    def bad(self) -> dict[int, str]:
        """The numbers of the files that cannot be read, each with what is wrong."""
        made = enumerate(in_threads(_trouble, self.files))
        return {index: trouble for index, trouble in made if trouble is not None}

    def name(self, index: int) -> str:
        """Its path below the root, where it lies there."""
        path = self.files[index]
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else path.as_posix()

    def digest(self) -> str:
        content = hashlib.sha256(self.labels.tobytes())
        for index, path in enumerate(self.files):
            try:
                size = path.stat().st_size
            except OSError as error:
                raise UserError(f"{path} cannot be read ({error.strerror}): restore or remove it.") from None
            content.update(f"{self.name(index)}:{size}\n".encode(errors="surrogateescape"))
        return content.hexdigest()

    def subset(self, indices: NDArray[np.int64]) -> "FileImages":
        return FileImages(self.root, [self.files[i] for i in indices], self.labels[indices], self.checked)


def _trouble(path: Path) -> str | None:
    made = attempt(path)
    return made if isinstance(made, str) else None


@dataclass(frozen=True)
class DataSet:
    name: str
    class_names: list[str]
    train: Images
    test: Images
    tasks: list[list[int]] | None = None
    """the classes of each task, where the data set says it itself"""
    skipped: tuple[str, ...] = ()
    """images left out because they cannot be read: split, name, what is wrong"""

    def fingerprint(self) -> str:
        """Changes when the data does."""
        parts = "\n".join([*self.class_names, self.train.digest(), self.test.digest()])
        return hashlib.sha256(parts.encode(errors="surrogateescape")).hexdigest()

    def check(self) -> None:
        """Raises a `UserError` for an image that cannot be read."""
        self.train.check()
        self.test.check()

    def limited(self, train_per_class: int | None) -> "DataSet":
        """The first so many training images of each class; all of them if None."""
        if train_per_class is None:
            return self
        if train_per_class < 1:
            raise UserError(f"train_per_class must be at least 1, got {train_per_class}.")
        kept = [members[:train_per_class] for members in self._by_class()]
        return dataclasses.replace(self, train=self.train.subset(np.sort(np.concatenate(kept))))

    def with_validation(self, share: float) -> "DataSet":
        """That share of each class's training images, drawn with a fixed seed, takes the place of the test images;
        training keeps the others. Nothing of the test split is looked at."""
        if not 0 < share < 1:
            raise UserError(f"validation is a share of the training images between 0 and 1, got {share}.")
        rng = np.random.Generator(np.random.PCG64(0))
        kept, held = [], []
        for name, members in zip(self.class_names, self._by_class(), strict=True):
            if len(members) < 2:
                raise UserError(f"The class '{name}' has one training image: too few to hold one back for validation.")
            count = min(len(members) - 1, max(1, round(share * len(members))))
            order = rng.permutation(members)
            held.append(order[:count])
            kept.append(order[count:])
        train, test = (self.train.subset(np.sort(np.concatenate(part))) for part in (kept, held))
        return dataclasses.replace(self, train=train, test=test)

    def without_bad(self) -> "DataSet":
        """Without the files that cannot be read; `skipped` names them."""
        splits: list[Images] = []
        skipped = list(self.skipped)
        for split, images in (("train", self.train), ("test", self.test)):
            if isinstance(images, FileImages):
                bad = images.bad()
                skipped += [f"{split}: {images.name(index)} {trouble}" for index, trouble in bad.items()]
                images = images.subset(np.setdiff1d(np.arange(len(images.labels)), np.array(list(bad), dtype=np.int64)))
                images.checked = True
            splits.append(images)
        return dataclasses.replace(self, train=splits[0], test=splits[1], skipped=tuple(skipped))

    def refuse_empty(self, name: str) -> None:
        """Raises a `UserError` for a class that has no image in one of the splits."""
        for split, other, images in (("training", "test", self.train), ("test", "training", self.test)):
            present = np.bincount(images.labels, minlength=len(self.class_names))
            if (present == 0).any():
                empty = self.class_names[int(np.argmin(present))]
                raise UserError(
                    f"The class '{empty}' of {name} has no {split} images; add some, or remove its {other} images."
                )

    def _by_class(self) -> list[NDArray[np.int64]]:
        """Numbers of the training images of each class, in their order."""
        order = np.argsort(self.train.labels, kind="stable")
        counts = np.bincount(self.train.labels, minlength=len(self.class_names))
        return np.split(order, np.cumsum(counts)[:-1])


DATASETS: Registry[Callable[[Path | None], DataSet]] = Registry("data set", "mambacl.datasets")


def open_dataset(name: str, root: str | Path | None, skip_bad: bool = False) -> DataSet:
    """A data set by name; `root` is the folder with its files, for those that are not part of the package."""
    dataset = DATASETS.get(name)(None if root is None else Path(root).expanduser())
    if skip_bad:
        dataset = dataset.without_bad()
        if dataset.skipped:
            count = len(dataset.skipped)
            logger.warning("%d images of %s are left out: they cannot be read.", count, name)
    dataset.refuse_empty(name)
    return dataset
