"""The next task of a finished run, trained as its own tasks were.

`learned/under-way` in the run's folder looks like a run: it has checkpoints, events and results of this task alone. A
process that is killed leaves the model untouched, and the next call with the same images continues there.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from mambacl.config import RunConfig
from mambacl.data.dataset import DataSet
from mambacl.data.images import FileImages
from mambacl.data.stream import Stream
from mambacl.data.transforms import Transforms
from mambacl.files import write_json
from mambacl.methods import Method
from mambacl.training import checkpoints
from mambacl.training.checkpoints import Checkpoint, Position, TaskState
from mambacl.training.folder import RunFolder, task_file
from mambacl.training.loop import Loop
from mambacl.training.progress import Progress
from mambacl.training.step import autocast

IDENTITY = "task.json"
TIMED = 2  # steps that a dry run times, after a first one that compiles


def stream_of(
    images: FileImages, widths: Sequence[int], transforms: Transforms, config: RunConfig, device: torch.device
) -> Stream:
    """A stream in which only one task has images: `images`, with the labels of the model. `widths`: labels per task."""
    labels = sum(widths)
    none = images.subset(np.zeros(0, dtype=np.int64))
    dataset = DataSet(images.root.name, [str(label) for label in range(labels)], images, none)
    tasks = [width for width in widths if width]  # a task that added images to known classes has no labels
    where = device if config.fast else torch.device("cpu")
    return Stream(dataset, transforms, tasks, seed=config.seed, workers=config.training.workers, device=where)


class NextTask(Loop):
    """Trains the last task of a stream, whose other tasks the method knows already. Evaluates nothing."""

    def learn(self, trains: bool) -> None:
        """From the start of the task or from a checkpoint within it. `trains`: otherwise the method and its classifier
        only take in the images."""
        task = self.position.task
        if trains:
            self._train_task(task)
        elif self.position.epoch == 0:
            self._start_task(task)
        self._consolidate(task)
        self.background.wait()

    def restore(self, checkpoint: Checkpoint) -> None:
        self._restore(checkpoint)

    def keep(self) -> None:
        """Makes the folder that of a finished run, with this as its only task."""
        tensors, task = self.method.task_state_dict(), self.position.task
        state = TaskState(task_file(task), tensors, self.method.task_text()) if tensors else None
        self.position.task_file = None if state is None else state.name
        self.position.task, self.position.epoch = task + 1, 0
        self._save(state)
        self.write_results("finished")

    def estimated(self, trains: bool) -> float:
        """Seconds that `learn` takes, from a few batches. Afterwards the method has learned these."""
        task, recipe = self.position.task, self.recipe
        images = self.batches.count(task)
        self._start_task(task)
        seconds = 0.0
        if trains:
            steps = -(-images * recipe.passes_per_epoch // recipe.batch_size)
            self._enter_phase(0)
            assert self.step is not None
            batches = self.batches.to_train(task, 0)
            times = []
            for number, (pixels, labels) in enumerate(batches):
                begun = time.perf_counter()
                self.step(pixels, labels, 1.0)
                self.step.take_sums()  # waits for the GPU
                times.append(time.perf_counter() - begun)
                if number == TIMED:
                    break
            each = sum(times[1:]) / len(times[1:]) if len(times) > 1 else times[0]
            seconds += each * steps * recipe.epochs
            self.optimizer = self.step = None
        batches = self.batches.to_finish(task)
        count = len(batches)  # type: ignore[arg-type]
        first = [next(iter(batches))]
        begun = time.perf_counter()
        done = self.method.finish_task(first)
        fixed = done.get("decomposition", 0.0)
        seconds += fixed + count * max(0.0, time.perf_counter() - begun - fixed)
        if self.method.classifier.updates:
            begun = time.perf_counter()
            with autocast(self.device, self.bf16):
                self.method.fit_classifier(first)
            seconds += count * (time.perf_counter() - begun)
            begun = time.perf_counter()
            self.method.calibrate()
            seconds += time.perf_counter() - begun
        return seconds


def next_task(
    method: Method, stream: Stream, config: RunConfig, folder: RunFolder, device: torch.device, trains: bool,
    done: int = 0,
) -> NextTask:  # fmt: skip
    """The loop for the last task of the stream, at its start. `done`: epochs of an earlier process."""
    task, recipe = len(stream.tasks) - 1, config.training
    images = stream.train_count(task)
    left = {"covariance": images, "classifier": images}
    if trains:
        left["train"] = images * recipe.passes_per_epoch * (recipe.epochs - done)
    progress = Progress(config.method, left)
    header = {"benchmark": config.name, "method": config.method, "seed": config.seed, "tasks": stream.tasks}
    loop = NextTask(
        method,
        stream,
        recipe,
        folder,
        progress,
        header,
        device,
        config.precision == "bf16",
        config.seed,
        0,
        config.fast,
    )
    loop.position = Position(task=task)
    return loop


def begin(folder: RunFolder, identity: dict[str, Any], task_state: Callable[[], dict[str, Any]]) -> Checkpoint | None:
    """Prepares `folder`, that of a task under way. Returns the last checkpoint of an earlier process that learned the
    same, with the state of the finished tasks that `task_state` returns; otherwise clears the folder."""
    same = _identity(folder) == identity
    checkpoint = checkpoints.load(folder) if same else None
    if checkpoint is None:
        folder.clear()
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        write_json(folder.path / IDENTITY, identity)
        return None
    return dataclasses.replace(checkpoint, task_state=task_state())


def _identity(folder: RunFolder) -> Any:
    try:
        return json.loads((folder.path / IDENTITY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
