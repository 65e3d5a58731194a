"""Image files of any kind to RGB bytes: what cannot be read is named."""

import io
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from mambacl.errors import UserError

A = TypeVar("A")
B = TypeVar("B")
# What Pillow's readers raise for damaged files, besides its own.
DAMAGE = (
    OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, struct.error,
    Image.DecompressionBombError,
)  # fmt: skip


def decode(path: Path) -> NDArray[np.uint8]:
    """The image as (h, w, 3), turned as its EXIF says; of an animation the first frame."""
    made = attempt(path)
    if isinstance(made, str):
        raise UserError(f"{path} {made}: mend or remove it, or leave bad images out (--skip-bad).")
    return made


def attempt(path: Path) -> NDArray[np.uint8] | str:
    """The image, or what is wrong with its file."""
    try:
        data = path.read_bytes()
        return rgb(Image.open(io.BytesIO(data))) if data else "is empty (0 bytes)"
    except FileNotFoundError:
        return "is missing"
    except DAMAGE as error:
        return f"cannot be read as an image ({reason(error)})"


def reason(error: Exception) -> str:
    """What Pillow's error says, without addresses in memory."""
    if isinstance(error, Image.UnidentifiedImageError):
        return "no image format that is known"
    return str(error.strerror if isinstance(error, OSError) and error.strerror else error)


def rgb(image: Image.Image) -> NDArray[np.uint8]:
    return np.array(_eight_bits(ImageOps.exif_transpose(image)).convert("RGB"))


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey images of 16 bits by their upper eight, which Pillow would cut off at 255."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 65535) >> 8).astype(np.uint8))
    return image


def in_threads(work: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
    """The results in their order; only a few are under way at a time, and an error stops the rest."""
    with ThreadPoolExecutor() as threads:
        under_way: deque[Future[B]] = deque()
        try:
            for item in items:
                under_way.append(threads.submit(work, item))
                if len(under_way) > 64:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()
