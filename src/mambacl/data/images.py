"""The images of a split, in memory or on disk; image files of any kind as RGB bytes.

PyTorch is imported with the first image, so that data sets can be listed and prepared without it.
"""

from __future__ import annotations

import hashlib
import io
import re
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from mambacl.errors import UserError
from mambacl.status import counted

if TYPE_CHECKING:
    from torch import Tensor

A = TypeVar("A")
B = TypeVar("B")
# What Pillow raises for damaged files, besides its own errors.
DAMAGE = (
    OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, struct.error,
    Image.DecompressionBombError,
)  # fmt: skip


class Readable(Protocol):
    """Images by index as uint8 (3, h, w)."""

    def image(self, index: int) -> Tensor: ...


class Images(Readable, Protocol):
    """A split: images, their labels, and a digest of both. `bad` returns what is wrong with unreadable images, by
    index."""

    labels: NDArray[np.int64]

    def digest(self) -> str: ...

    def check(self, number: int = 0, of: int = 1) -> None: ...

    def bad(self) -> dict[int, str]: ...

    def name(self, index: int) -> str: ...

    def subset(self, indices: NDArray[np.int64]) -> Images: ...


class ArrayImages:
    """Images in one uint8 array, (n, h, w) if grey or (n, h, w, 3)."""

    def __init__(self, pixels: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
        self.pixels, self.labels = pixels, np.asarray(labels, dtype=np.int64)

    def image(self, index: int) -> Tensor:
        pixels = _tensor(np.ascontiguousarray(self.pixels[index]))
        return pixels.expand(3, *pixels.shape) if pixels.dim() == 2 else pixels.permute(2, 0, 1)

    def stack(self, indices: NDArray[np.int64]) -> Tensor:
        """These images as (n, 3, h, w)."""
        pixels = _tensor(self.pixels[indices])
        images = pixels[:, None].expand(-1, 3, -1, -1) if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2)
        return images.contiguous()

    def nbytes(self, count: int) -> int:
        return count * 3 * int(np.prod(self.pixels.shape[1:3]))

    def check(self, number: int = 0, of: int = 1) -> None:
        return

    def bad(self) -> dict[int, str]:
        return {}

    def name(self, index: int) -> str:
        return f"image {index}"

    def digest(self) -> str:
        return self._digest

    @cached_property
    def _digest(self) -> str:
        content = hashlib.sha256(np.ascontiguousarray(self.pixels).data)
        content.update(self.labels.tobytes())
        return content.hexdigest()

    def subset(self, indices: NDArray[np.int64]) -> ArrayImages:
        return ArrayImages(self.pixels[indices], self.labels[indices])


class WithPixels:
    """Images in memory behind the `count` images of a split."""

    def __init__(self, images: Readable, count: int, pixels: Sequence[Tensor]) -> None:
        self.images, self.count, self.pixels = images, count, pixels

    def image(self, index: int) -> Tensor:
        return self.images.image(index) if index < self.count else self.pixels[index - self.count]


class DecodedImages:
    """Images that are decoded on access. A subclass defines how."""

    labels: NDArray[np.int64]
    checked = False  # whether every image is known to be readable

    def try_image(self, index: int) -> NDArray[np.uint8] | str:
        """The image as (h, w, 3), or what is wrong with it."""
        raise NotImplementedError

    def refusal(self, index: int, trouble: str) -> UserError:
        raise NotImplementedError

    def image(self, index: int) -> Tensor:
        pixels = self.try_image(index)
        if isinstance(pixels, str):
            raise self.refusal(index, pixels)
        return _tensor(pixels).permute(2, 0, 1)

    def check(self, number: int = 0, of: int = 1) -> None:
        """Decodes every image, to find bad ones before training starts; or one of so many shares of them."""
        own = range(len(self.labels))[number::of]
        if not self.checked:
            for _ in counted(in_threads(self.image, own), len(own), "images checked"):
                pass

    def bad(self) -> dict[int, str]:
        """What is wrong with the images that cannot be read, by index."""
        found = counted(in_threads(self.try_image, range(len(self.labels))), len(self.labels), "images checked")
        return {index: trouble for index, trouble in enumerate(found) if isinstance(trouble, str)}


class FileImages(DecodedImages):
    """Image files. The digest covers names, sizes and labels, not the pixels."""

    def __init__(self, root: Path, files: Sequence[Path], labels: NDArray[np.int64], checked: bool = False) -> None:
        self.root, self.files, self.labels = root, list(files), np.asarray(labels, dtype=np.int64)
        self.checked = checked

    def try_image(self, index: int) -> NDArray[np.uint8] | str:
        return try_decode(self.files[index])

    def refusal(self, index: int, trouble: str) -> UserError:
        return _refusal(self.files[index], trouble)

    def name(self, index: int) -> str:
        """The path relative to the root, if the file is below it."""
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

    def subset(self, indices: NDArray[np.int64]) -> FileImages:
        return FileImages(self.root, [self.files[i] for i in indices], self.labels[indices], self.checked)


def _tensor(pixels: NDArray[np.uint8]) -> Tensor:
    import torch

    return torch.from_numpy(pixels)


def decode(path: Path) -> NDArray[np.uint8]:
    """The image as (h, w, 3), rotated as its EXIF data says; the first frame of an animation."""
    made = try_decode(path)
    if isinstance(made, str):
        raise _refusal(path, made)
    return made


def _refusal(path: Path, trouble: str) -> UserError:
    remedy = "shrink" if trouble.startswith("is too large") else "repair"
    return UserError(f"{path} {trouble}: {remedy} or remove it, or skip bad images (--skip-bad).")


def try_decode(path: Path) -> NDArray[np.uint8] | str:
    """The image, or what is wrong with its file."""
    try:
        data = path.read_bytes()
        return rgb(Image.open(io.BytesIO(data))) if data else "is empty (0 bytes)"
    except FileNotFoundError:
        return "is missing"
    except Image.DecompressionBombError as error:
        most = (
            2 * (Image.MAX_IMAGE_PIXELS or 0) / 1e6
        )  # Pillow warns above MAX_IMAGE_PIXELS and refuses above twice that
        found = re.search(r"\d+", str(error))
        pixels = f"{int(found[0]) / 1e6:.0f} megapixels, " if found else ""
        return f"is too large ({pixels}at most {most:.0f} megapixels can be read)"
    except DAMAGE as error:
        return f"cannot be read as an image ({reason(error)})"


def reason(error: Exception) -> str:
    """Pillow's error message, without memory addresses."""
    if isinstance(error, Image.UnidentifiedImageError):
        return "unknown image format"
    return str(error.strerror if isinstance(error, OSError) and error.strerror else error)


def rgb(image: Image.Image) -> NDArray[np.uint8]:
    return np.array(_eight_bits(ImageOps.exif_transpose(image)).convert("RGB"))


def _eight_bits(image: Image.Image) -> Image.Image:
    """Keeps the upper eight bits of 16-bit grey images; Pillow would clip them at 255."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 65535) >> 8).astype(np.uint8))
    return image


def in_threads(work: Callable[[A], B], items: Iterable[A], threads: int | None = None, ahead: int = 64) -> Iterator[B]:
    """The results in order. At most `ahead` are computed in advance, and an error stops the rest."""
    with ThreadPoolExecutor(threads) as pool:
        under_way: deque[Future[B]] = deque()
        try:
            for item in items:
                under_way.append(pool.submit(work, item))
                if len(under_way) > ahead:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()
