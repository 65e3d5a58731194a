"""Caches decoded images as uint8: on the device if they fit, else in main memory. The rest is read again."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mambacl import processes
from mambacl.data.images import ArrayImages, Readable, in_threads

Group = tuple[NDArray[np.int64], Tensor]  # positions among the images asked for, and those images, all of one size


def on_device(values: NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """Copies values to the device without waiting: through pinned memory if it is a GPU."""
    tensor = torch.from_numpy(np.ascontiguousarray(values)) if isinstance(values, np.ndarray) else values
    return _pinned(tensor, device).to(device, non_blocking=True)


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor in pinned memory if it will go to a GPU."""
    return tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor


class CachedImages:
    """Some images of a split. They can use `room` bytes of main memory and a quarter of the device's free memory.
    Images of one size become one tensor. If sizes differ, as many as fit are kept."""

    def __init__(self, images: Readable, indices: NDArray[np.int64], device: torch.device, room: int) -> None:
        self.images, self.indices, self.device = images, indices, device
        self.host_bytes = 0
        self._kept: list[Tensor | None] = []
        self._all: Tensor | None = None
        if isinstance(images, ArrayImages) and images.nbytes(len(indices)) <= room:
            self._all = self._placed(images.stack(indices))
            self.sizes = np.tile(np.array(self._all.shape[-2:], dtype=np.int64), (len(indices), 1))
            return
        sizes = []
        for image in self._read(indices):
            fits = self.host_bytes + image.numel() <= room
            self.host_bytes += image.numel() if fits else 0
            self._kept.append(image if fits else None)
            sizes.append(image.shape[-2:])
        self.sizes = np.array(sizes, dtype=np.int64).reshape(-1, 2)
        present = [image for image in self._kept if image is not None]
        if present and len(present) == len(sizes) and (self.sizes == self.sizes[0]).all():
            self._kept = []
            self._all = self._placed(torch.stack(present))

    def _placed(self, images: Tensor) -> Tensor:
        """Moves all images to the device if they fit."""
        if self.device.type != "cpu" and images.numel() <= free_bytes(self.device) // 4:
            self.host_bytes = 0
            return images.to(self.device)
        self.host_bytes = images.numel()
        return images

    def are(self, images: Readable, indices: NDArray[np.int64]) -> bool:
        return self.images is images and np.array_equal(self.indices, indices)

    @property
    def on_device(self) -> bool:
        return self._all is not None and self._all.device.type == self.device.type

    def groups(self, places: NDArray[np.int64], most: int) -> Iterator[Group]:
        """The images at these places, in groups of one size with at most `most` values, but at least one image."""
        if self._all is not None:  # all have one size
            sizes, which = self.sizes[:1], np.zeros(len(places), dtype=np.int64)
        else:
            sizes, which = np.unique(self.sizes[places], axis=0, return_inverse=True)
        for number, (height, width) in enumerate(sizes):
            members = np.flatnonzero(which.reshape(-1) == number)
            step = max(1, most // int(3 * height * width))
            for start in range(0, len(members), step):
                part = members[start : start + step]
                yield part, self._stacked(places[part])

    def _stacked(self, places: NDArray[np.int64]) -> Tensor:
        if self._all is not None:
            return _pinned(self._all.index_select(0, on_device(places, self._all.device)), self.device)
        missing = [place for place in places if self._kept[place] is None]
        again = dict(zip(missing, self._read(self.indices[missing]), strict=True)) if missing else {}
        images = [again[place] if place in again else self._kept[place] for place in places]
        return _pinned(torch.stack(images), self.device)

    def _read(self, indices: NDArray[np.int64]) -> Iterator[Tensor]:
        return in_threads(self.images.image, map(int, indices))


class ImageCache:
    """The decoded images of a stream: the training images of the latest task and the test images of all tasks, within
    a quarter of main memory."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.room = device, main_memory() // (4 * processes.on_machine()[1])
        self._train: tuple[int, CachedImages] | None = None
        self._test: dict[int, CachedImages] = {}

    def train(self, task: int, images: Readable, indices: NDArray[np.int64]) -> CachedImages:
        """The cached ones if they are these. With stored images, a task's images change when it ends."""
        if self._train is None or self._train[0] != task or not self._train[1].are(images, indices):
            self._train = None  # frees the old images before the next are read
            self._train = (task, self._read(images, indices))
        return self._train[1]

    def test(self, task: int, images: Readable, indices: NDArray[np.int64]) -> CachedImages:
        if task not in self._test:
            self._test[task] = self._read(images, indices)
        return self._test[task]

    def _read(self, images: Readable, indices: NDArray[np.int64]) -> CachedImages:
        cached = [*self._test.values(), *([self._train[1]] if self._train else [])]
        return CachedImages(images, indices, self.device, self.room - sum(images.host_bytes for images in cached))


def free_bytes(device: torch.device) -> int:
    """Free bytes on a GPU, including memory that PyTorch has reserved but does not use."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def main_memory() -> int:
    """Bytes of memory for this process: the machine's, or the container's limit if lower; 8 GiB if unknown."""
    limits = []
    with suppress(AttributeError, OSError, ValueError):  # not on Windows
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # "max": no limit
            limits.append(int(Path(path).read_text()))
    return min(limits, default=8 << 30)
