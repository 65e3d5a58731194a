"""A stream of tasks, as batches for training and evaluation. The tasks are groups of a data set's classes, in some
order, or its domains one after another."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from mambacl.data.batched_transforms import BatchedTransforms
from mambacl.data.config import StreamConfig
from mambacl.data.dataset import DataSet, indices_by_group
from mambacl.data.few_shot import with_sessions
from mambacl.data.image_cache import ImageCache
from mambacl.data.images import Readable, WithPixels
from mambacl.data.loaders import Batch, BatchedLoader, CpuLoader
from mambacl.data.sets import open_dataset
from mambacl.data.tasks import Tasks, domains_in_order, tasks_or_domains
from mambacl.data.transforms import Transforms
from mambacl.errors import UserError
from mambacl.scenarios import Scenario
from mambacl.stored import StoredImages

COVARIANCE_PASS = 1 << 32  # stands for the epoch in the seeds of the covariances' images


class Stream:
    """A label is a position: class c of the data set has the label `class_order.index(c)`, so that the classifier grows
    at its end with each task. If the tasks are domains, each task has its own labels for all classes, after those of
    the tasks before. `seed` fixes the order of the images and their augmentation. Batches are on `device` with the
    batched engine (the default on a GPU), else on the CPU.
    """

    def __init__(
        self,
        dataset: DataSet,
        transforms: Transforms,
        tasks: Tasks,
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
        self.validation = validation  # for stream.json only: the data set is already split
        self.scenario = scenario
        found = tasks_or_domains(dataset, scenario, tasks, order, order_seed, first_task)
        self.class_order, self.tasks, self.domains = found
        place = np.argsort(self.class_order)  # of each class
        self._train_labels, self._test_labels = place[dataset.train.labels], place[dataset.test.labels]
        if self.domains is not None:
            self._train_labels = self._train_labels + len(place) * self.domains.train
            self._test_labels = self._test_labels + len(place) * self.domains.test
        self._train, self._test = (_by_task(part, self.tasks) for part in (self._train_labels, self._test_labels))
        self._with_pixels: tuple[StoredImages, WithPixels] | None = None
        device = torch.device(device)
        self._batched: BatchedTransforms | None = None
        if transforms.engine == "batched" or (transforms.engine == "auto" and device.type == "cuda"):
            self._batched, self._cache = BatchedTransforms(transforms, device), ImageCache(device)
        else:
            _ = transforms.augment  # imports torchvision here instead of in each worker

    def first_label(self, task: int) -> int:
        return sum(len(classes) for classes in self.tasks[:task])

    def train_count(self, task: int) -> int:
        return len(self._train[task])

    def test_counts(self) -> list[int]:
        return [len(indices) for indices in self._test]

    def train_image(self, task: int, position: int) -> torch.Tensor:
        """One of the task's images in the order of the data set, as uint8 (3, h, w)."""
        return self.dataset.train.image(int(self._train[task][position]))

    def train_batches(
        self, task: int, epoch: int, batch_size: int, repeats: int = 1, stored: StoredImages | None = None
    ) -> Iterable[Batch]:
        """The task's images and the stored ones, shuffled and augmented. An epoch has each image `repeats` times."""
        numbers = (self.seed, task, epoch)
        count = self.train_count(task) + (0 if stored is None else len(stored))
        order = np.random.Generator(np.random.PCG64(numbers)).permutation(repeats * count)

        def seed(position: int | None) -> int:
            return mix_seeds(*numbers, 1 if position is None else position)

        return self._batches("train", task, order, batch_size, self.transforms, seed, stored)

    def plain_batches(self, task: int, batch_size: int, stored: StoredImages | None = None) -> Iterable[Batch]:
        """The images for the covariances: the task's training images in the order of the data set, then the stored
        ones, transformed as in evaluation unless the configuration has another transform for the covariances."""
        transforms = self.transforms.covariance
        numbers = (self.seed, task, COVARIANCE_PASS)

        def seed(position: int | None) -> int:
            return mix_seeds(*numbers) if position is None else mix_seeds(*numbers, position)

        places = np.arange(self.train_count(task) + (0 if stored is None else len(stored)))
        own = seed if transforms.augments else None
        return self._batches("train", task, places, batch_size, transforms, own, stored)

    def some_images(self, task: int, count: int) -> torch.Tensor:
        """Up to `count` training images, spread evenly over the task, transformed as in evaluation."""
        last = self.train_count(task) - 1
        chosen = np.unique(np.linspace(0, last, min(count, last + 1)).round().astype(int))
        [(images, _)] = self._batches("train", task, chosen, len(chosen), self.transforms)
        return images

    def test_batches(self, task: int, batch_size: int) -> Iterable[Batch]:
        return self._batches("test", task, np.arange(len(self._test[task])), batch_size, self.transforms)

    def _batches(
        self,
        split: Literal["train", "test"],
        task: int,
        positions: NDArray[np.int64],
        batch_size: int,
        transforms: Transforms,
        seed: Callable[[int | None], int] | None = None,
        stored: StoredImages | None = None,
    ) -> Iterable[Batch]:
        """The task's images and then the stored ones at these positions, which wrap around after the last image. `seed`
        returns the augmentation's seed for a position, or for all of them given None. Without it, images are as in
        evaluation."""
        training = split == "train"
        images: Readable = self.dataset.train if training else self.dataset.test
        labels = self._train_labels if training else self._test_labels
        indices = self._train[task] if training else self._test[task]
        if stored is not None:
            images, labels, indices = self._joined(images, labels, indices, stored)
        places = positions % len(indices)
        if self._batched is None:
            seeds = (None if seed is None else seed(int(position)) for position in positions)
            samples = list(zip(indices[places].tolist(), seeds, strict=True))
            return CpuLoader(images, labels, transforms, samples, batch_size, self.workers)
        cached = (self._cache.train if training else self._cache.test)(task, images, indices)
        batched = self._batched
        if transforms is not self.transforms:
            batched = BatchedTransforms(transforms, batched.device)
        common = None if seed is None else seed(None)
        return BatchedLoader(batched, cached, places, labels[indices[places]], batch_size, common)

    def _joined(
        self, images: Readable, labels: NDArray[np.int64], indices: NDArray[np.int64], stored: StoredImages
    ) -> tuple[Readable, NDArray[np.int64], NDArray[np.int64]]:
        """Training images by index, their labels, and the indices of a task's images with the stored ones behind."""
        if stored.pixels is None:
            places = zip(stored.tasks.tolist(), stored.positions.tolist(), strict=True)
            found = [self._stored_index(task, position) for task, position in places]
            return images, labels, np.concatenate((indices, np.array(found, dtype=np.int64)))
        if self._with_pixels is None or self._with_pixels[0] is not stored:  # the cache knows images by their object
            self._with_pixels = (stored, WithPixels(images, len(labels), stored.pixels))
        further = len(labels) + np.arange(len(stored))
        return self._with_pixels[1], np.concatenate((labels, stored.labels.numpy())), np.append(indices, further)

    def _stored_index(self, task: int, position: int) -> int:
        if task >= len(self._train) or position >= len(self._train[task]):
            raise UserError(
                "The run stores images as positions in its data set, and those of earlier tasks are not here: train a "
                "run with --options.memory pixels, which keeps the images themselves."
            )
        return int(self._train[task][position])

    def describe(self) -> dict[str, Any]:
        """The facts that identify the stream, for stream.json and results.json."""
        optional = {
            "scenario": None if self.scenario == "class" else self.scenario,
            "domains": self.domains and self.domains.names,
            "validation": self.validation,
            "test_share": self.dataset.test_share,
            "skipped": list(self.dataset.skipped) or None,
        }
        return {
            "dataset": self.dataset.name,
            "class_names": self.dataset.class_names,
            "class_order": self.class_order,
            "tasks": self.tasks,
            "train": [self.train_count(t) for t in range(len(self.tasks))],
            "test": self.test_counts(),
            "fingerprint": self._fingerprint(),
            "transforms": self.transforms.describe(),
            **{key: value for key, value in optional.items() if value is not None},
        }

    def _fingerprint(self) -> str:
        """The data set's fingerprint. If the tasks are domains, it also covers the domain of each image."""
        fingerprint = self.dataset.fingerprint()
        if self.domains is None:
            return fingerprint
        content = hashlib.sha256(fingerprint.encode())
        for numbers in (self.domains.train, self.domains.test):
            content.update(numbers.astype("<i8").tobytes())
        return content.hexdigest()


def _by_task(labels: NDArray[np.int64], tasks: Sequence[Sequence[int]]) -> list[NDArray[np.int64]]:
    """The indices of each task's images, in the order of the data set."""
    ends = np.cumsum([len(task) for task in tasks])
    return indices_by_group(np.searchsorted(ends, labels, side="right"), len(tasks))


def mix_seeds(*numbers: int) -> int:
    """One seed from several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


def open_data(config: StreamConfig) -> DataSet:
    """The configured data set: images to train on and images to evaluate on."""
    dataset = open_dataset(config.dataset, config.root, config.skip_bad, config.test_share)
    if config.by_domain:
        domains_in_order(dataset)  # raises for unusable domains before images are held back
    if config.validation is not None:
        dataset = dataset.with_validation(config.validation, config.by_domain)
    dataset = dataset.limited(config.train_per_class, config.by_domain)
    return with_sessions(dataset, config) if config.few_shot else dataset


def open_stream(
    config: StreamConfig,
    image_size: int,
    mean: list[float],
    std: list[float],
    seed: int,
    workers: int,
    device: torch.device | str = "cpu",
) -> Stream:
    """The configured stream; `image_size`, `mean`, `std` and `device` are the backbone's."""
    if seed < 0:
        raise UserError(f"seed must not be negative, got {seed}.")
    tasks, order, order_seed, first_task = config.cut
    return Stream(
        open_data(config),
        Transforms(config.transforms, image_size, mean, std),
        tasks,
        order,
        order_seed,
        seed,
        workers,
        device,
        first_task,
        config.validation,
        config.scenario,
    )
