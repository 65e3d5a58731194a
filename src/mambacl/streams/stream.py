"""A stream of tasks: the classes of a data set in an order, cut into tasks, as batches for training and evaluation."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mambacl.errors import UserError
from mambacl.streams.batched import BatchedBatches, BatchedTransforms, Shelf
from mambacl.streams.data import DataSet, Images, open_dataset
from mambacl.streams.orders import class_order, split_into_tasks
from mambacl.streams.transforms import TransformConfig, Transforms

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class StreamConfig:
    """Which data, in which tasks."""

    dataset: str = "fashion-mnist-small"
    """name of a data set; 'folders' for your own images"""
    root: str | None = None
    """folder with the data set's files"""
    tasks: int | list[int] = 5
    """number of tasks, or the number of classes in each"""
    order: str | list[int] = "natural"
    """class order: natural, pilot, mamba-cl, coda-prompt, or a list of all class numbers"""
    order_seed: int | None = None
    """seed of that order; the one its code base starts from if empty"""
    train_per_class: int | None = None
    """use only the first so many training images of each class"""
    transforms: TransformConfig = field(default_factory=TransformConfig)
    """how images become inputs"""


class Stream:
    """Labels are positions: class c of the data set has the label `class_order.index(c)`, so that task after task the
    classifier grows at its end. `seed` fixes the order of the images and their augmentation. Batches lie on `device`
    where the transforms' engine is the batched one (on a GPU, unless the other is named), else on the CPU."""

    def __init__(
        self,
        dataset: DataSet,
        transforms: Transforms,
        tasks: int | Sequence[int],
        order: str | Sequence[int] = "natural",
        order_seed: int | None = None,
        seed: int = 0,
        workers: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.dataset, self.transforms, self.seed, self.workers = dataset, transforms, seed, workers
        self.class_order = class_order(order, len(dataset.class_names), order_seed)
        self.tasks = split_into_tasks(self.class_order, tasks)
        self._label = np.argsort(self.class_order)  # class number -> label
        self._train = [np.flatnonzero(np.isin(dataset.train.labels, task)) for task in self.tasks]
        self._test = [np.flatnonzero(np.isin(dataset.test.labels, task)) for task in self.tasks]
        device = torch.device(device)
        self._batched: BatchedTransforms | None = None
        if transforms.engine == "batched" or (transforms.engine == "auto" and device.type == "cuda"):
            self._batched, self._shelf = BatchedTransforms(transforms, device), Shelf(device)

    def first_label(self, task: int) -> int:
        return sum(len(classes) for classes in self.tasks[:task])

    def train_count(self, task: int) -> int:
        return len(self._train[task])

    def test_counts(self) -> list[int]:
        return [len(indices) for indices in self._test]

    def train_batches(self, task: int, epoch: int, batch_size: int, repeats: int = 1) -> Iterable[Batch]:
        """The task's images, shuffled and augmented; an epoch walks through them `repeats` times."""
        indices = self._train[task]
        positions = self._order(task, epoch, repeats * len(indices))
        if self._batched is not None:
            return self._train_blocks(task, positions % len(indices), batch_size, mixed(self.seed, task, epoch, 1))
        picks = [(int(indices[p % len(indices)]), mixed(self.seed, task, epoch, int(p))) for p in positions]
        return self._loader(self.dataset.train, picks, batch_size)

    def plain_batches(self, task: int, batch_size: int) -> Iterable[Batch]:
        """The task's training images as in evaluation, in the order of the data set: for the covariances."""
        if self._batched is not None:
            return self._train_blocks(task, np.arange(self.train_count(task)), batch_size, None)
        return self._loader(self.dataset.train, [(int(i), None) for i in self._train[task]], batch_size)

    def some_images(self, task: int, count: int) -> torch.Tensor:
        """So many of the task's training images, from all over it, as in evaluation."""
        indices = self._train[task]
        chosen = np.unique(np.linspace(0, len(indices) - 1, min(count, len(indices))).round().astype(int))
        if self._batched is not None:
            [(images, _)] = self._train_blocks(task, chosen, len(chosen), None)
            return images
        [(images, _)] = self._loader(self.dataset.train, [(int(i), None) for i in indices[chosen]], len(chosen))
        return images

    def test_batches(self, task: int, batch_size: int) -> Iterable[Batch]:
        if self._batched is not None:
            images, indices = self.dataset.test, self._test[task]
            decoded = self._shelf.test(task, images, indices)
            labels = self._label[images.labels[indices]]
            return BatchedBatches(self._batched, decoded, np.arange(len(indices)), labels, batch_size, None)
        return self._loader(self.dataset.test, [(int(i), None) for i in self._test[task]], batch_size)

    def _train_blocks(self, task: int, places: NDArray[np.int64], batch_size: int, seed: int | None) -> BatchedBatches:
        """Of the task's training images those at `places`, in blocks on the device."""
        assert self._batched is not None
        images, indices = self.dataset.train, self._train[task]
        labels = self._label[images.labels[indices[places]]]
        decoded = self._shelf.train(task, images, indices)
        return BatchedBatches(self._batched, decoded, places, labels, batch_size, seed)

    def _order(self, task: int, epoch: int, count: int) -> NDArray[np.int64]:
        return np.random.Generator(np.random.PCG64([self.seed, task, epoch])).permutation(count)

    def _loader(self, images: Images, picks: Sequence["Pick"], batch_size: int) -> Iterable[Batch]:
        view = _View(images, self._label, self.transforms)
        batches = [list(picks[i : i + batch_size]) for i in range(0, len(picks), batch_size)]
        if self.workers == 0:
            return _Direct(view, batches)
        return _WithWorkers(view, batches, self.workers)

    def describe(self) -> dict[str, Any]:
        """What identifies the stream, for stream.json and results.json."""
        names = self.dataset.class_names
        return {
            "dataset": self.dataset.name,
            "class_names": names,
            "class_order": self.class_order,
            "tasks": self.tasks,
            "train": [self.train_count(t) for t in range(len(self.tasks))],
            "test": self.test_counts(),
            "fingerprint": self.dataset.fingerprint(),
        }


Pick = tuple[int, int | None]  # an image's index, and its augmentation's seed (None: as in evaluation)


class _View(Dataset[Any]):
    """Batches by picks, in whichever process the loader runs."""

    def __init__(self, images: Images, label: NDArray[np.int64], transforms: Transforms) -> None:
        self.images, self.label, self.transforms = images, label, transforms

    def __getitems__(self, picks: Sequence[Pick]) -> Batch:
        transforms = self.transforms
        pixels = []
        for index, seed in picks:
            image = self.images.image(index)
            pixels.append(transforms.evaluate(image) if seed is None else transforms.train(image, seed))
        labels = self.label[self.images.labels[[index for index, _ in picks]]]
        return transforms.normalize(torch.stack(pixels)), torch.from_numpy(labels)


@dataclass(frozen=True)
class _Direct:
    """The loader without workers: no processes, no queues."""

    view: _View
    batches: list[list[Pick]]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return (self.view.__getitems__(batch) for batch in self.batches)


@dataclass(frozen=True)
class _WithWorkers:
    """PyTorch's loader: other processes prepare the batches."""

    view: _View
    batches: list[list[Pick]]
    workers: int

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        loader: DataLoader[Any] = DataLoader(
            self.view,
            batch_sampler=self.batches,
            num_workers=self.workers,
            collate_fn=_already_collated,
            pin_memory=torch.cuda.is_available(),
        )
        try:
            yield from loader
        except UserError as error:  # comes with the worker's whole traceback; its last line is ours
            sentence = str(error).strip().splitlines()[-1]
            raise UserError(sentence.removeprefix(f"{UserError.__module__}.UserError: ")) from None


def _already_collated(batch: Any) -> Any:
    return batch


def mixed(*numbers: int) -> int:
    """One seed out of several numbers, each of which matters."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


def open_stream(
    config: StreamConfig,
    image_size: int,
    mean: list[float],
    std: list[float],
    seed: int,
    workers: int,
    device: torch.device | str = "cpu",
) -> Stream:
    """The stream that a configuration names; `image_size`, `mean`, `std` and `device` are the backbone's."""
    dataset = open_dataset(config.dataset, config.root).limited(config.train_per_class)
    if seed < 0:
        raise UserError(f"seed must not be negative, got {seed}.")
    return Stream(
        dataset,
        Transforms(config.transforms, image_size, mean, std),
        config.tasks,
        config.order,
        config.order_seed,
        seed,
        workers,
        device,
    )
