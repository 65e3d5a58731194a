"""What a data set is: named classes and two splits of labelled images, in memory or on disk."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from mambacl.errors import UserError
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


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    try:
        with Image.open(path) as file:
            yield file
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} cannot be read as an image ({error}): mend or remove it.") from None


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey images of 16 bits by their upper eight, which Pillow would cut off at 255."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 65535) >> 8).astype(np.uint8))
    return image


class FileImages:
    """Image files, decoded when asked for. The digest covers names, sizes and labels, not the pixels."""

    def __init__(self, root: Path, files: Sequence[Path], labels: NDArray[np.int64]) -> None:
        self.root, self.files, self.labels = root, list(files), np.asarray(labels, dtype=np.int64)

    def image(self, index: int) -> Tensor:
        with _opened(self.files[index]) as file:
            pixels = np.array(_eight_bits(ImageOps.exif_transpose(file)).convert("RGB"))
        return torch.from_numpy(pixels).permute(2, 0, 1)

    def check(self) -> None:
        """Decodes every file, so that a bad one is found before the first task is trained."""

        def decode(path: Path) -> None:
            with _opened(path) as file:
                file.load()

        with ThreadPoolExecutor() as threads:
            list(threads.map(decode, self.files))

    def digest(self) -> str:
        content = hashlib.sha256(self.labels.tobytes())
        for path in self.files:
            content.update(f"{path.relative_to(self.root).as_posix()}:{path.stat().st_size}\n".encode())
        return content.hexdigest()

    def subset(self, indices: NDArray[np.int64]) -> "FileImages":
        return FileImages(self.root, [self.files[i] for i in indices], self.labels[indices])


@dataclass(frozen=True)
class DataSet:
    name: str
    class_names: list[str]
    train: Images
    test: Images

    def fingerprint(self) -> str:
        """Changes when the data does."""
        parts = "\n".join([*self.class_names, self.train.digest(), self.test.digest()])
        return hashlib.sha256(parts.encode()).hexdigest()

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
        labels = self.train.labels
        kept = [np.flatnonzero(labels == c)[:train_per_class] for c in range(len(self.class_names))]
        return DataSet(self.name, self.class_names, self.train.subset(np.sort(np.concatenate(kept))), self.test)


DATASETS: Registry[Callable[[Path | None], DataSet]] = Registry("data set", "mambacl.datasets")


def open_dataset(name: str, root: str | Path | None) -> DataSet:
    """A data set by name; `root` is the folder with its files, for those that are not part of the package."""
    dataset = DATASETS.get(name)(None if root is None else Path(root).expanduser())
    for split, images in (("training", dataset.train), ("test", dataset.test)):
        present = np.bincount(images.labels, minlength=len(dataset.class_names))
        if (present == 0).any():
            empty = dataset.class_names[int(np.argmin(present))]
            raise UserError(f"The class '{empty}' of {name} has no {split} images; add some, or remove the class.")
    return dataset
