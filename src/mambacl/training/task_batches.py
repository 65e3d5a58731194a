"""The batches of a task that a process of a run reads: all of them, or its share if there are several processes."""

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from mambacl import processes
from mambacl.data.loaders import Share
from mambacl.methods import Method
from mambacl.stored import StoredImages
from mambacl.training.recipe import Recipe

Batches = Iterable[tuple[Tensor, Tensor]]


class TaskStream(Protocol):
    """What the loop needs from a stream."""

    tasks: list[list[int]]

    def first_label(self, task: int) -> int: ...
    def train_count(self, task: int) -> int: ...
    def train_batches(
        self, task: int, epoch: int, batch_size: int, repeats: int = 1, stored: StoredImages | None = None
    ) -> Batches: ...
    def plain_batches(self, task: int, batch_size: int, stored: StoredImages | None = None) -> Batches: ...
    def some_images(self, task: int, count: int) -> Tensor: ...
    def train_image(self, task: int, position: int) -> Tensor: ...
    def test_batches(self, task: int, batch_size: int) -> Batches: ...
    def test_counts(self) -> list[int]: ...


class TaskBatches:
    def __init__(self, stream: TaskStream, method: Method, recipe: Recipe, sharded: bool = False) -> None:
        """`sharded`: whether the backbone's weights are cut among the processes, which then have to run it equally
        often."""
        self.stream, self.method, self.recipe, self.sharded = stream, method, recipe, sharded

    def count(self, task: int) -> int:
        """Images in one pass over a task."""
        return self.stream.train_count(task) + sum(map(len, self._stored().values()))

    def to_train(self, task: int, epoch: int) -> Batches:
        """All batches of an epoch."""
        size, passes = self.recipe.batch_size, self.recipe.passes_per_epoch
        return self.stream.train_batches(task, epoch, size, passes, **self._stored())

    def to_finish(self, task: int) -> Batches:
        """For the method, when the steps are done: whole batches in turns, if it adds up over the processes."""
        batches = self.stream.plain_batches(task, self.recipe.covariance_batch_size, **self._stored())
        if not self.method.adds_up:
            return batches
        return self._equally_often(batches, task) if self.sharded else share(batches, in_turns=True)

    def to_learn(self, task: int) -> Batches:
        """For a classifier that is computed from features. All processes meet in each batch."""
        size, images = self.recipe.eval_batch_size, self.stream.train_count(task)
        return self._parts(self.stream.plain_batches(task, size), images, size, all_batches=True)

    def to_test(self, task: int) -> Batches:
        size, images = self.recipe.eval_batch_size, self.stream.test_counts()[task]
        return self._parts(self.stream.test_batches(task, size), images, size, all_batches=self.sharded)

    def _stored(self) -> dict[str, StoredImages]:
        """Streams of methods that store no images need not know the word."""
        stored = self.method.stored()
        return {} if stored is None else {"stored": stored}

    def _parts(self, batches: Batches, images: int, size: int, all_batches: bool) -> Batches:
        """Parts of batches of `size` of so many `images`, with a label for each image that is this process's: none in a
        batch with too few images for all. Such batches are left out, unless all processes have to meet in each."""
        return batches if processes.count() == 1 else _labelled(batches, images, size, all_batches)

    def _equally_often(self, batches: Batches, task: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's turns, and an image without a label if others have one more."""
        own = share(batches, in_turns=True)
        yield from own
        turns = -(-len(batches) // processes.count())  # type: ignore[arg-type]
        if len(own) < turns:  # type: ignore[arg-type]
            yield self.stream.some_images(task, 1), torch.zeros(0, dtype=torch.int64)


def share(batches: Batches, in_turns: bool = False) -> Batches:
    """This process's part of each batch, and at least one image of it; or `in_turns`, every so many batches."""
    if processes.count() == 1:
        return batches
    return batches.shared(Share(processes.count(), processes.rank(), in_turns))  # type: ignore[attr-defined]


def _labelled(batches: Batches, images: int, size: int, all_batches: bool) -> Iterator[tuple[Tensor, Tensor]]:
    for number, (pixels, labels) in enumerate(share(batches)):
        part = processes.part(min(size, images - number * size))
        if part.stop > part.start:
            yield pixels, labels
        elif all_batches:
            yield pixels, labels[:0]
