"""Batches of images and labels: image by image on the CPU, or in blocks of many batches on the device.

With blocks, the host samples the random parameters of an epoch and reads nothing back; the device does the rest.
Memory limits the size of a block, which does not change what the model sees.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mambacl import processes
from mambacl.data.augment_params import AugmentParams
from mambacl.data.batched_transforms import BatchedTransforms
from mambacl.data.image_cache import CachedImages, Group, free_bytes, on_device
from mambacl.data.images import Readable, in_threads
from mambacl.data.transforms import Transforms
from mambacl.errors import UserError

Batch = tuple[Tensor, Tensor]
Sample = tuple[int, int | None]  # an image's index, and its augmentation's seed (None: as in evaluation)


@dataclass(frozen=True)
class Share:
    """What one of several processes loads: a part of each batch, or `in_turns` every so many batches."""

    of: int = 1
    number: int = 0
    in_turns: bool = False

    def cut(self, length: int, batch_size: int) -> list[NDArray[np.int64]]:
        """The positions of this process's images in each of its batches, of `length` images in all. Instead of an empty
        part there is the batch's first image, because every process has to send something through the model."""
        batches = [np.arange(start, min(start + batch_size, length)) for start in range(0, length, batch_size)]
        if self.in_turns:
            return batches[self.number :: self.of]
        own = [batch[processes.part(len(batch), self.of, self.number)] for batch in batches]
        return [mine if len(mine) else batch[:1] for mine, batch in zip(own, batches, strict=True)]


@dataclass(frozen=True)
class CpuLoader:
    """Batches made image by image on the CPU, in worker processes if `workers` is not 0."""

    images: Readable
    labels: NDArray[np.int64]
    transforms: Transforms
    samples: Sequence[Sample]
    batch_size: int
    workers: int
    share: Share = Share()

    def __len__(self) -> int:
        return len(self.share.cut(len(self.samples), self.batch_size))

    def shared(self, share: Share) -> "CpuLoader":
        """The same batches, of which this loads only a share."""
        return replace(self, share=share)

    def __iter__(self) -> Iterator[Batch]:
        cuts = self.share.cut(len(self.samples), self.batch_size)
        batches: list[Sequence[Sample]] = [[self.samples[i] for i in cut.tolist()] for cut in cuts]
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
    share: Share = Share()

    def __len__(self) -> int:
        return len(self.share.cut(len(self.places), self.batch_size))

    def shared(self, share: Share) -> "BatchedLoader":
        """The same batches, of which this loads only a share."""
        return replace(self, share=share)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        cuts = self.share.cut(len(self.places), self.batch_size)
        own = np.concatenate(cuts) if cuts else np.zeros(0, dtype=np.int64)
        places, ends = self.places[own], np.cumsum([0, *map(len, cuts)])
        labels = on_device(self.labels[own], self.transforms.device)
        params = None
        if self.seed is not None:
            rng = np.random.Generator(np.random.PCG64(self.seed))
            params = self.transforms.sample(rng, self.images.sizes[self.places])
            params = None if params is None else params.rows(own)
        most = block_values(self.transforms.device)
        blocks = self._blocks(places, ends, most)

        def read(block: tuple[int, int]) -> list[Group]:
            return list(self.images.groups(places[ends[block[0]] : ends[block[1]]], most))

        groups = map(read, blocks) if self.images.on_device else in_threads(read, blocks, threads=1, ahead=1)
        for (first, last), found in zip(blocks, groups, strict=True):
            block = slice(ends[first], ends[last])
            images = self._prepared(found, None if params is None else params.rows(block), block.stop - block.start)
            for batch in range(first, last):
                part = slice(ends[batch] - block.start, ends[batch + 1] - block.start)
                yield images[part], labels[block][part]

    def _blocks(self, places: NDArray[np.int64], ends: NDArray[np.int64], most: int) -> list[tuple[int, int]]:
        """Groups consecutive batches into blocks, from a first batch up to another, with at most `most` values before
        and after the transforms, but at least one batch. Batch i has the images from `ends[i]` to `ends[i + 1]`."""
        each = 3 * np.maximum(self.images.sizes[places].prod(1), self.transforms.size**2)
        blocks: list[tuple[int, int]] = []
        values = 0
        for batch in range(len(ends) - 1):
            own = int(each[ends[batch] : ends[batch + 1]].sum())
            if blocks and values + own <= most:
                blocks[-1] = blocks[-1][0], batch + 1
                values += own
            else:
                blocks.append((batch, batch + 1))
                values = own
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
