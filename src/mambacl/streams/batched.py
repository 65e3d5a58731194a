"""Images to inputs in blocks of many batches, on the device: the fast twin of `transforms`.

The host draws what is left to chance for a whole epoch and reads nothing back; the device does the rest. Blocks are cut
to what memory allows, and their size changes nothing in what the model sees.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mambacl.datasets.base import Images
from mambacl.streams.batched_ops import autoaugment
from mambacl.streams.batched_resize import resized, resized_boxes, windows
from mambacl.streams.decoded import Decoded, Group, free_bytes, main_memory, on_device
from mambacl.streams.draws import Draws, draw_flips
from mambacl.streams.transforms import Transforms


class BatchedTransforms:
    """What `Transforms` does to one image, for many on a device."""

    def __init__(self, transforms: Transforms, device: torch.device) -> None:
        self.size, self.resize, self.padding = transforms.size, transforms.resize, transforms.padding
        self.transforms, self.device = transforms, device
        self.cubic = transforms.config.interpolation == "bicubic"
        self.bilinear = transforms.config.augment_interpolation == "bilinear"
        self.mean, self.std = on_device(transforms.mean, device), on_device(transforms.std, device)
        self.full = torch.full((), 255.0, device=device)  # a tensor: a GPU divides by it as a CPU does

    def draw(self, rng: np.random.Generator, sizes: NDArray[np.int64]) -> Draws | None:
        """For training on images of these sizes; None where nothing is left to chance."""
        if not self.transforms.augments:
            return None
        if not self.transforms.crops_itself:
            return draw_flips(rng, self.padding, sizes)
        from mambacl.streams.batched_draws import draw

        return draw(rng, self.transforms.augment, sizes)

    def evaluate(self, images: Tensor) -> Tensor:
        """Images of one size, to (n, 3, size, size), still uint8."""
        if images.shape[-2:] != (self.resize, self.resize):
            images = resized(images, self.resize, self.cubic)
        first = round((self.resize - self.size) / 2)  # torchvision's central crop
        return images[..., first : first + self.size, first : first + self.size]

    def train(self, images: Tensor, draws: Draws | None) -> Tensor:
        """The same with the augmentation that was drawn; as in evaluation if None."""
        if draws is None:
            return self.evaluate(images)
        if self.transforms.crops_itself:
            from mambacl.streams.batched_draws import OPS

            images = autoaugment(images, OPS, draws.ops, draws.magnitudes, self.bilinear)
            return resized_boxes(images, draws.boxes, self.size, self.cubic)
        return windows(self.evaluate(images), draws.corners, draws.flips, self.size, self.padding)

    def normalize(self, images: Tensor) -> Tensor:
        return images.float().div_(self.full).sub_(self.mean).div_(self.std)


class Shelf:
    """The decoded images of a stream: the training images of the latest task, and the test images of all, within a
    quarter of main memory."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.room = device, main_memory() // 4
        self._train: tuple[int, Decoded] | None = None
        self._test: dict[int, Decoded] = {}

    def train(self, task: int, images: Images, indices: NDArray[np.int64]) -> Decoded:
        if self._train is None or self._train[0] != task:
            self._train = None  # gone before the next are read
            self._train = (task, self._read(images, indices))
        return self._train[1]

    def test(self, task: int, images: Images, indices: NDArray[np.int64]) -> Decoded:
        if task not in self._test:
            self._test[task] = self._read(images, indices)
        return self._test[task]

    def _read(self, images: Images, indices: NDArray[np.int64]) -> Decoded:
        held = [*self._test.values(), *([self._train[1]] if self._train else [])]
        return Decoded(images, indices, self.device, self.room - sum(decoded.host_bytes for decoded in held))


@dataclass(frozen=True)
class BatchedBatches:
    """Batches of images and labels that lie on the device."""

    transforms: BatchedTransforms
    decoded: Decoded
    places: NDArray[np.int64]
    """which of the decoded images, in their order"""
    labels: NDArray[np.int64]
    """theirs"""
    batch_size: int
    seed: int | None
    """of the augmentation; None: as in evaluation"""

    def __len__(self) -> int:
        return -(-len(self.places) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        labels = on_device(self.labels, self.transforms.device)
        draws = None
        if self.seed is not None:
            rng = np.random.Generator(np.random.PCG64(self.seed))
            draws = self.transforms.draw(rng, self.decoded.sizes[self.places])
        most = block_values(self.transforms.device)
        blocks = self._blocks(most)
        groups = _ahead([self._groups(block, most) for block in blocks], not self.decoded.on_device)
        for block, found in zip(blocks, groups, strict=True):
            images = self._prepared(found, None if draws is None else draws.at(block), block.stop - block.start)
            for start in range(0, len(images), self.batch_size):
                part = slice(start, start + self.batch_size)
                yield images[part], labels[block][part]

    def _blocks(self, most: int) -> list[slice]:
        """Whole batches, as many as have so many values before or after, at least one."""
        each = 3 * np.maximum(self.decoded.sizes[self.places].prod(1), self.transforms.size**2)
        starts = range(0, len(self.places), self.batch_size)
        blocks: list[slice] = []
        values = 0
        for start in starts:
            stop = min(start + self.batch_size, len(self.places))
            values += int(each[start:stop].sum())
            if blocks and values <= most:
                blocks[-1] = slice(blocks[-1].start, stop)
            else:
                blocks.append(slice(start, stop))
                values = int(each[start:stop].sum())
        return blocks

    def _groups(self, block: slice, most: int) -> Callable[[], list[Group]]:
        return lambda: list(self.decoded.groups(self.places[block], most))

    @torch.no_grad()
    def _prepared(self, groups: list[Group], draws: Draws | None, count: int) -> Tensor:
        transforms = self.transforms
        result: Tensor | None = None
        for where, images in groups:
            made = transforms.train(on_device(images, transforms.device), None if draws is None else draws.at(where))
            if len(where) == count:  # all of one size, in their order
                return transforms.normalize(made)
            if result is None:
                result = made.new_empty(count, *made.shape[1:])
            result.index_copy_(0, on_device(where, transforms.device), made)
        assert result is not None
        return transforms.normalize(result)


def block_values(device: torch.device) -> int:
    """Values (three a pixel) in a block: enough for thousands of small images. The work takes some 32 bytes a value."""
    least, most = 1 << 22, 1 << 26
    return max(least, min(most, free_bytes(device) // 64)) if device.type == "cuda" else least


def _ahead(works: list[Callable[[], list[Group]]], threaded: bool) -> Iterator[list[Group]]:
    """The works' results in their order; threaded, the next one is under way while its predecessor is used."""
    if not threaded or len(works) < 2:
        yield from (work() for work in works)
        return
    with ThreadPoolExecutor(1) as thread:
        under_way = thread.submit(works[0])
        for following in [*works[1:], None]:
            found = under_way.result()
            if following is not None:
                under_way = thread.submit(following)
            yield found
