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
from mambacl.paths import expanded
from mambacl.registry import Registry


class Images(Protocol):
    """A split: images by index as uint8 (3, h, w), their labels, and a digest of both. `bad` has what is wrong with
    those that cannot be read, by index; `name` what an image is called."""

    labels: NDArray[np.int64]

    def image(self, index: int) -> Tensor: ...

    def digest(self) -> str: ...

    def check(self) -> None: ...

    def bad(self) -> dict[int, str]: ...

    def name(self, index: int) -> str: ...

    def subset(self, indices: NDArray[np.int64]) -> "Images": ...


class ArrayImages:
    """Images in one uint8 array, (n, h, w) for grey ones or (n, h, w, 3)."""

    def __init__(self, pixels: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
        self.pixels, self.labels = pixels, np.asarray(labels, dtype=np.int64)

    def image(self, index: int) -> Tensor:
        pixels = torch.from_numpy(np.ascontiguousarray(self.pixels[index]))
        return pixels.expand(3, *pixels.shape) if pixels.dim() == 2 else pixels.permute(2, 0, 1)

    def several(self, indices: NDArray[np.int64]) -> Tensor:
        """(n, 3, h, w)."""
        pixels = torch.from_numpy(self.pixels[indices])
        several = pixels[:, None].expand(-1, 3, -1, -1) if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2)
        return several.contiguous()

    def bytes_of(self, count: int) -> int:
        return count * 3 * int(np.prod(self.pixels.shape[1:3]))

    def check(self) -> None:
        return

    def bad(self) -> dict[int, str]:
        return {}

    def name(self, index: int) -> str:
        return f"image {index}"

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
class Domains:
    """Which domain, such as photographs or sketches, each image is of."""

    names: list[str]
    train: NDArray[np.int64]
    test: NDArray[np.int64]

    @classmethod
    def of(cls, train: Sequence[str], test: Sequence[str], names: list[str] | None = None) -> "Domains":
        """From each image's domain by name; without `names` they are sorted."""
        names = sorted({*train, *test}) if names is None else names
        number = {name: position for position, name in enumerate(names)}
        return cls(names, *(np.array([number[name] for name in part], dtype=np.int64) for part in (train, test)))


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
    domains: Domains | None = None
    """where the data set says it itself"""

    def fingerprint(self) -> str:
        """Changes when the data does."""
        parts = "\n".join([*self.class_names, self.train.digest(), self.test.digest()])
        return hashlib.sha256(parts.encode(errors="surrogateescape")).hexdigest()

    def check(self) -> None:
        """Raises a `UserError` for an image that cannot be read."""
        self.train.check()
        self.test.check()

    def limited(self, train_per_class: int | None, by_domain: bool = False) -> "DataSet":
        """The first so many training images of each class, or of each class in each domain; all of them if None."""
        if train_per_class is None:
            return self
        if train_per_class < 1:
            raise UserError(f"train_per_class must be at least 1, got {train_per_class}.")
        kept = np.sort(np.concatenate([members[:train_per_class] for members in self._groups(by_domain)]))
        domains = self.domains and dataclasses.replace(self.domains, train=self.domains.train[kept])
        return dataclasses.replace(self, train=self.train.subset(kept), domains=domains)

    def with_validation(self, share: float, by_domain: bool = False) -> "DataSet":
        """That share of each class's training images, or of each class's in each domain, drawn with a fixed seed, takes
        the place of the test images; training keeps the others. Nothing of the test split is looked at."""
        if not 0 < share < 1:
            raise UserError(f"validation is a share of the training images between 0 and 1, got {share}.")
        rng = np.random.Generator(np.random.PCG64(0))
        kept, held = [], []
        for number, members in enumerate(self._groups(by_domain)):
            if len(members) < 2 and not by_domain:  # a domain may lack a class
                name = self.class_names[number]
                raise UserError(f"The class '{name}' has one training image: too few to hold one back for validation.")
            count = min(len(members) - 1, max(1, round(share * len(members)))) if len(members) > 1 else 0
            order = rng.permutation(members)
            held.append(order[:count])
            kept.append(order[count:])
        train, test = (np.sort(np.concatenate(part)) for part in (kept, held))
        domains = self.domains and Domains(self.domains.names, self.domains.train[train], self.domains.train[test])
        return dataclasses.replace(self, train=self.train.subset(train), test=self.train.subset(test), domains=domains)

    def without_bad(self) -> "DataSet":
        """Without the images that cannot be read; `skipped` names them."""
        splits: list[Images] = []
        skipped, domains = list(self.skipped), self.domains
        for split, images in (("train", self.train), ("test", self.test)):
            bad = images.bad()
            skipped += [f"{split}: {images.name(index)} {trouble}" for index, trouble in bad.items()]
            kept = np.setdiff1d(np.arange(len(images.labels)), np.array(list(bad), dtype=np.int64))
            images = images.subset(kept) if bad else images
            if isinstance(images, FileImages):
                images.checked = True
            splits.append(images)
            domains = domains and dataclasses.replace(domains, **{split: getattr(domains, split)[kept]})
        return dataclasses.replace(self, train=splits[0], test=splits[1], skipped=tuple(skipped), domains=domains)

    def refuse_empty(self, name: str) -> None:
        """Raises a `UserError` for a class that has no image in one of the splits."""
        for split, other, images in (("training", "test", self.train), ("test", "training", self.test)):
            present = np.bincount(images.labels, minlength=len(self.class_names))
            if (present == 0).any():
                empty = self.class_names[int(np.argmin(present))]
                raise UserError(
                    f"The class '{empty}' of {name} has no {split} images; add some, or remove its {other} images."
                )

    def _groups(self, by_domain: bool) -> list[NDArray[np.int64]]:
        """Numbers of the training images of each class, or of each class in each domain, in their order."""
        groups, count = self.train.labels, len(self.class_names)
        if by_domain and self.domains is not None:
            groups, count = groups + count * self.domains.train, count * len(self.domains.names)
        order = np.argsort(groups, kind="stable")
        return np.split(order, np.cumsum(np.bincount(groups, minlength=count))[:-1])


DATASETS: Registry[Callable[[Path | None], DataSet]] = Registry("data set", "mambacl.datasets")


def open_dataset(name: str, root: str | Path | None, skip_bad: bool = False) -> DataSet:
    """A data set by name; `root` is the folder with its files, for those that are not part of the package."""
    dataset = DATASETS.get(name)(None if root is None else expanded(root))
    if skip_bad:
        dataset = dataset.without_bad()
        if dataset.skipped:
            count = len(dataset.skipped)
            logger.warning("%d images of %s are left out: they cannot be read.", count, name)
    dataset.refuse_empty(name)
    return dataset
