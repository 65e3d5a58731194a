"""A stream of tasks, the classes of a data set in an order and cut into tasks or its domains one after another, as
batches for training and evaluation."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mambacl.datasets.base import DataSet, Images, open_dataset
from mambacl.errors import UserError
from mambacl.scenarios import Scenario
from mambacl.streams.batched import BatchedBatches, BatchedTransforms, Shelf
from mambacl.streams.config import StreamConfig
from mambacl.streams.domains import domains_in_order, in_several
from mambacl.streams.orders import class_order, split_into_tasks
from mambacl.streams.transforms import Transforms

Batch = tuple[Tensor, Tensor]
COVARIANCE_PASS = 1 << 32  # in place of an epoch, where a seed is mixed for the covariances


class Stream:
    """Labels are positions: class c of the data set has the label `class_order.index(c)`, so that task after task the
    classifier grows at its end. Where the tasks are domains, each has labels of its own for all classes: the classes'
    positions, after those of the tasks before. `seed` fixes the order of the images and their augmentation. Batches lie
    on `device` where the transforms' engine is the batched one (on a GPU, unless the other is named), else on the CPU.
    """

    def __init__(
        self,
        dataset: DataSet,
        transforms: Transforms,
        tasks: int | Sequence[int] | Literal["own"],
        order: str | Sequence[int] = "natural",
        order_seed: int | None = None,
        seed: int = 0,
        workers: int = 0,
        device: torch.device | str = "cpu",
        first_task: int | None = None,
        validation: float | None = None,
        scenario: Scenario = "class",
    ) -> None:
        self.dataset, self.transforms, self.seed, self.workers = dataset, transforms, seed, workers
        self.validation = validation  # said in stream.json; the data set has been split already
        self.scenario, self.domains = scenario, None
        if scenario == "domain":
            self.domains = domains_in_order(dataset, order, order_seed)
            self.class_order = list(range(len(dataset.class_names)))
            self.tasks = [list(self.class_order) for _ in self.domains.names]
        else:
            self.class_order, self.tasks = tasks_of(dataset, tasks, order, order_seed, first_task)
        place = np.argsort(self.class_order)  # of each class
        self._train_labels, self._test_labels = place[dataset.train.labels], place[dataset.test.labels]
        if self.domains is not None:
            self._train_labels = self._train_labels + len(place) * self.domains.train
            self._test_labels = self._test_labels + len(place) * self.domains.test
        self._train, self._test = (_by_task(part, self.tasks) for part in (self._train_labels, self._test_labels))
        device = torch.device(device)
        self._batched: BatchedTransforms | None = None
        if transforms.engine == "batched" or (transforms.engine == "auto" and device.type == "cuda"):
            self._batched, self._shelf = BatchedTransforms(transforms, device), Shelf(device)
        else:
            _ = transforms.augment  # loads torchvision here, and not in each worker

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
        return self._loader(self.dataset.train, self._train_labels, picks, batch_size)

    def plain_batches(self, task: int, batch_size: int) -> Iterable[Batch]:
        """The task's training images in the order of the data set, as in evaluation unless the configuration has
        another transform for the covariances, whose images these are."""
        transforms = self.transforms.covariance
        chance = transforms.augments
        if self._batched is not None:
            seed = mixed(self.seed, task, COVARIANCE_PASS) if chance else None
            blocks = self._train_blocks(task, np.arange(self.train_count(task)), batch_size, seed)
            return replace(blocks, transforms=BatchedTransforms(transforms, self._batched.device))
        picks = [
            (int(i), mixed(self.seed, task, COVARIANCE_PASS, place) if chance else None)
            for place, i in enumerate(self._train[task])
        ]
        return self._loader(self.dataset.train, self._train_labels, picks, batch_size, transforms)

    def some_images(self, task: int, count: int) -> torch.Tensor:
        """So many of the task's training images, from all over it, as in evaluation."""
        indices = self._train[task]
        chosen = np.unique(np.linspace(0, len(indices) - 1, min(count, len(indices))).round().astype(int))
        if self._batched is not None:
            [(images, _)] = self._train_blocks(task, chosen, len(chosen), None)
            return images
        picks = [(int(i), None) for i in indices[chosen]]
        [(images, _)] = self._loader(self.dataset.train, self._train_labels, picks, len(chosen))
        return images

    def test_batches(self, task: int, batch_size: int) -> Iterable[Batch]:
        if self._batched is not None:
            indices = self._test[task]
            decoded = self._shelf.test(task, self.dataset.test, indices)
            labels = self._test_labels[indices]
            return BatchedBatches(self._batched, decoded, np.arange(len(indices)), labels, batch_size, None)
        picks = [(int(i), None) for i in self._test[task]]
        return self._loader(self.dataset.test, self._test_labels, picks, batch_size)

    def _train_blocks(self, task: int, places: NDArray[np.int64], batch_size: int, seed: int | None) -> BatchedBatches:
        """Of the task's training images those at `places`, in blocks on the device."""
        assert self._batched is not None
        indices = self._train[task]
        decoded = self._shelf.train(task, self.dataset.train, indices)
        return BatchedBatches(self._batched, decoded, places, self._train_labels[indices[places]], batch_size, seed)

    def _order(self, task: int, epoch: int, count: int) -> NDArray[np.int64]:
        return np.random.Generator(np.random.PCG64([self.seed, task, epoch])).permutation(count)

    def _loader(
        self,
        images: Images,
        labels: NDArray[np.int64],
        picks: Sequence["Pick"],
        batch_size: int,
        transforms: Transforms | None = None,
    ) -> Iterable[Batch]:
        view = _View(images, labels, transforms or self.transforms)
        batches = [list(picks[i : i + batch_size]) for i in range(0, len(picks), batch_size)]
        if self.workers == 0:
            return _Direct(view, batches)
        return _WithWorkers(view, batches, self.workers)

    def describe(self) -> dict[str, Any]:
        """What identifies the stream, for stream.json and results.json."""
        names = self.dataset.class_names
        said: dict[str, Any] = {}
        if self.scenario != "class":
            said["scenario"] = self.scenario
        if self.domains is not None:
            said["domains"] = self.domains.names
        if self.validation is not None:
            said["validation"] = self.validation
        if self.dataset.skipped:
            said["skipped"] = list(self.dataset.skipped)
        return {
            "dataset": self.dataset.name,
            "class_names": names,
            "class_order": self.class_order,
            "tasks": self.tasks,
            "train": [self.train_count(t) for t in range(len(self.tasks))],
            "test": self.test_counts(),
            "fingerprint": self._fingerprint(),
            "transforms": self.transforms.describe(),
            **said,
        }

    def _fingerprint(self) -> str:
        """The data set's; where the tasks are domains, it changes with them as well."""
        fingerprint = self.dataset.fingerprint()
        if self.domains is None:
            return fingerprint
        content = hashlib.sha256(fingerprint.encode())
        for numbers in (self.domains.train, self.domains.test):
            content.update(numbers.astype("<i8").tobytes())
        return content.hexdigest()


def tasks_of(
    dataset: DataSet,
    tasks: int | Sequence[int] | Literal["own"],
    order: str | Sequence[int] = "natural",
    order_seed: int | None = None,
    first_task: int | None = None,
) -> tuple[list[int], list[list[int]]]:
    """The order of the classes, and those of each task."""
    if isinstance(tasks, str):
        if dataset.tasks is None:
            if dataset.domains is not None and (found := in_several(dataset, dataset.domains)):
                raise UserError(f"{found}: give each class one task, or set stream.scenario to domain.")
            raise UserError(f"The data set {dataset.name} names no tasks of its own: give stream.tasks a number.")
        if order != "natural" or first_task is not None:
            raise UserError("The data set's own tasks keep their order: leave stream.order and first_task out.")
        return [c for task in dataset.tasks for c in task], [list(task) for task in dataset.tasks]
    classes = class_order(order, len(dataset.class_names), order_seed, dataset.class_names)
    return classes, split_into_tasks(classes, tasks, first_task)


def _by_task(labels: NDArray[np.int64], tasks: Sequence[Sequence[int]]) -> list[NDArray[np.int64]]:
    """Numbers of each task's images, in the order of the data set."""
    ends = np.cumsum([len(task) for task in tasks])
    which = np.searchsorted(ends, labels, side="right")
    counts = np.bincount(which, minlength=len(tasks))
    return np.split(np.argsort(which, kind="stable"), np.cumsum(counts)[:-1])


Pick = tuple[int, int | None]  # an image's index, and its augmentation's seed (None: as in evaluation)


class _View(Dataset[Any]):
    """Batches by picks, in whichever process the loader runs."""

    def __init__(self, images: Images, labels: NDArray[np.int64], transforms: Transforms) -> None:
        self.images, self.labels, self.transforms = images, labels, transforms

    def __getitems__(self, picks: Sequence[Pick]) -> Batch:
        transforms = self.transforms
        pixels = []
        for index, seed in picks:
            image = self.images.image(index)
            pixels.append(transforms.evaluate(image) if seed is None else transforms.train(image, seed))
        labels = self.labels[[index for index, _ in picks]]
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


def open_data(config: StreamConfig) -> DataSet:
    """The images that a configuration names: those to train with and those to evaluate on."""
    dataset = open_dataset(config.dataset, config.root, config.skip_bad)
    if config.by_domain:
        domains_in_order(dataset)  # says what is wrong with them before anything is held back
    if config.validation is not None:
        dataset = dataset.with_validation(config.validation, config.by_domain)
    return dataset.limited(config.train_per_class, config.by_domain)


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
    if seed < 0:
        raise UserError(f"seed must not be negative, got {seed}.")
    return Stream(
        open_data(config),
        Transforms(config.transforms, image_size, mean, std),
        "own" if config.own_tasks else config.tasks,
        config.order,
        config.order_seed,
        seed,
        workers,
        device,
        config.first_task,
        config.validation,
        config.scenario,
    )
