"""Batches of images and labels: image by image on the CPU, or in blocks of many batches on the device.

With blocks, the host samples the random parameters of an epoch and reads nothing back; the device does the rest.
Memory limits the size of a block, which does not change what the model sees.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mambacl.data.augment_params import AugmentParams
from mambacl.data.batched_transforms import BatchedTransforms
from mambacl.data.image_cache import CachedImages, Group, free_bytes, on_device
from mambacl.data.images import Readable, in_threads
from mambacl.data.transforms import Transforms
from mambacl.errors import UserError

Batch = tuple[Tensor, Tensor]
Sample = tuple[int, int | None]  # an image's index, and its augmentation's seed (None: as in evaluation)


@dataclass(frozen=True)
class CpuLoader:
    """Batches made image by image on the CPU, in worker processes if `workers` is not 0."""

    images: Readable
    labels: NDArray[np.int64]
    transforms: Transforms
    samples: Sequence[Sample]
    batch_size: int
    workers: int

    def __len__(self) -> int:
        return -(-len(self.samples) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        starts = range(0, len(self.samples), self.batch_size)
        batches = [self.samples[start : start + self.batch_size] for start in starts]
        return self._from_workers(batches) if self.workers else map(self.__getitems__, batches)

    def __getitems__(self, samples: Sequence[Sample]) -> Batch:
        """One batch. PyTorch's loader calls this as well."""
        pixels = []
        for index, seed in samples:
            image = self.images.image(index)
            pixels.append(self.transforms.evaluate(image) if seed is None else self.transforms.train(image, seed))
        labels = self.labels[[index for index, _ in samples]]
        return self.transforms.normalize(torch.stack(pixels)), torch.from_numpy(labels)

    def _from_workers(self, batches: list[Sequence[Sample]]) -> Iterator[Batch]:
        loader: DataLoader[Any] = DataLoader(
            cast(Dataset[Any], self),
            batch_sampler=cast(Any, batches),
            num_workers=self.workers,
            collate_fn=_collated,
            pin_memory=torch.cuda.is_available(),
        )
        try:
            yield from loader
        except UserError as error:  # it carries the worker's traceback; the last line is ours
            sentence = str(error).strip().splitlines()[-1]
            raise UserError(sentence.removeprefix(f"{UserError.__module__}.UserError: ")) from None


def _collated(batch: Any) -> Any:
    """`__getitems__` has collated the batch already."""
    return batch


@dataclass(frozen=True)
class BatchedLoader:
    """Batches of images and labels on the device."""

    transforms: BatchedTransforms
    images: CachedImages
    places: NDArray[np.int64]
    """positions of the cached images, in the order to load"""
    labels: NDArray[np.int64]
    """labels of these images"""
    batch_size: int
    seed: int | None
    """seed of the augmentation; None: as in evaluation"""

    def __len__(self) -> int:
        return -(-len(self.places) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        labels = on_device(self.labels, self.transforms.device)
        params = None
        if self.seed is not None:
            rng = np.random.Generator(np.random.PCG64(self.seed))
            params = self.transforms.sample(rng, self.images.sizes[self.places])
        most = block_values(self.transforms.device)
        blocks = self._blocks(most)

        def read(block: slice) -> list[Group]:
            return list(self.images.groups(self.places[block], most))

        groups = map(read, blocks) if self.images.on_device else in_threads(read, blocks, threads=1, ahead=1)
        for block, found in zip(blocks, groups, strict=True):
            images = self._prepared(found, None if params is None else params.rows(block), block.stop - block.start)
            for start in range(0, len(images), self.batch_size):
                part = slice(start, start + self.batch_size)
                yield images[part], labels[block][part]

    def _blocks(self, most: int) -> list[slice]:
        """Groups consecutive batches into blocks with at most `most` values before and after the transforms, but at
        least one batch."""
        each = 3 * np.maximum(self.images.sizes[self.places].prod(1), self.transforms.size**2)
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

    @torch.no_grad()
    def _prepared(self, groups: list[Group], params: AugmentParams | None, count: int) -> Tensor:
        transforms = self.transforms
        result: Tensor | None = None
        for where, images in groups:
            part = None if params is None else params.rows(where)
            made = transforms.train(on_device(images, transforms.device), part)
            if len(where) == count:  # all have one size, so they are in order
                return transforms.normalize(made)
            if result is None:
                result = made.new_empty(count, *made.shape[1:])
            result.index_copy_(0, on_device(where, transforms.device), made)
        assert result is not None
        return transforms.normalize(result)


def block_values(device: torch.device) -> int:
    """The number of values (three per pixel) in a block: enough for thousands of small images. The transforms need
    about 32 bytes per value."""
    least, most = 1 << 22, 1 << 26
    return max(least, min(most, free_bytes(device) // 64)) if device.type == "cuda" else least
