"""The work of one further task, in memory: the classifier takes in the images, or the task trains."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mambacl.data.images import FileImages
from mambacl.data.stream import Stream
from mambacl.deploy.class_folders import ClassFolder
from mambacl.deploy.comparing import Show
from mambacl.deploy.predictor import Predictor
from mambacl.errors import UserError
from mambacl.files import disk_error
from mambacl.log import logger
from mambacl.methods import Method, Task
from mambacl.training import learned
from mambacl.training.api import arithmetic, task_end, terminable
from mambacl.training.display import show as show_progress
from mambacl.training.folder import RunFolder
from mambacl.training.learned import History
from mambacl.training.loop import TrainingError, task_seed
from mambacl.training.next_task import begin, next_task, stream_of
from mambacl.training.step import autocast

TIMED = 16  # images that a dry run times if nothing trains
FEW = 5  # images per class, up to which a classifier that is computed from features learns them without training
CHECKPOINTS = 3  # on disk while a task trains, each with two values per parameter of the optimizer


@dataclass
class TaskWork:
    """One task for one model. `names` are all classes after it, by label."""

    folder: RunFolder
    model: Predictor
    given: ClassFolder
    names: list[str]
    stream: dict[str, Any]
    history: History
    by_domain: bool
    unbalanced: bool

    def __post_init__(self) -> None:
        self.config = self.model.description.config
        self.method = self.model.method
        self.widths = learned.widths(self.stream, self.history)
        counts = self.given.counts()
        self.few = max(counts.values()) <= FEW
        known = [name for name in self.given.names if name in self.model.classes]
        self.only_sums = self.method.features_stay or (bool(known) and not self.by_domain)
        if not self.method.features_stay and known and not self.by_domain:
            self._check_more(known)
        self.seen = self.method.kept.seen
        self.trains = not self.only_sums and not (self.few and from_statistics(self.method))

    @property
    def domain(self) -> str:
        return self.given.images.root.resolve().name if self.by_domain else ""

    def _check_more(self, known: list[str]) -> None:
        """Refuses what a method that trains cannot do with more images of known classes."""
        if not self.method.classifier.updates or self.method.classifier.trains:
            raise UserError(
                f"The classifier of {self.folder.path} is trained task by task, so it cannot take more images of "
                f"'{known[0]}', which it knows: remove that folder, or use a run whose classifier is computed from "
                "features (--classifier lda)."
            )
        if len(known) < len(self.given.names):
            raise UserError(
                "This run trains on new classes, and only counts more images of known ones: put them into two folders, "
                "and learn the new classes first."
            )

    def notes(self) -> list[str]:
        """What is special in this case."""
        if self.method.features_stay:
            return []
        if not self.trains:
            why = "there are few images" if not self.only_sums else "the classes are known"
            return [f"Nothing is trained, because {why}: the classifier is computed from their features."]
        found = []
        if self.few:
            found.append(
                f"The run's classifier is trained, here on at most {FEW} images per class: expect it to recognise few "
                "others. A run whose classifier is computed from features (--classifier lda) learns them without "
                "training."
            )
        if not self.by_domain and len(self.given.names) == 1 and not from_statistics(self.method):
            found.append(
                "A task with a single class teaches the run's separate heads nothing, because its head has only one "
                "answer: learn several classes together."
            )
        return found

    def disk_bytes(self) -> int:
        state = nbytes(learned.state_of(self.method).values())
        trained = nbytes(self.method.state_dict().values()) if self.trains else 0
        return state + 3 * CHECKPOINTS * trained

    def missing_bytes(self) -> int:
        """How much larger the state is than a dry run leaves it, which has learned another number of images. How many
        directions the whole task would protect is not known, and not counted."""
        kept, each = self.method.kept, self.method.kept.image_nbytes
        each += 16 if self.method.calibration is not None else 0
        return (min(kept.room, self.seen + len(self.given)) - len(kept)) * each

    def do(self, show: Show) -> None:
        """Changes the model in memory."""
        try:
            if self.only_sums:
                self._fit(show(self.given.prepared(self.model.transforms), len(self.given)))
            else:
                self._train()
        except OSError as error:
            raise disk_error(error, self.folder.under_way) from None
        if self.method.classifier.updates:
            if not self.unbalanced:
                self.method.classifier.favour_rare(sum(self.widths[: self.history.own]))
            self.method.calibrate()
        self.images()

    def images(self) -> dict[str, int]:
        """By class, without those that were skipped."""
        found = self.given.counts()
        if empty := [name for name, count in found.items() if not count]:
            raise UserError(f"No image of the class '{empty[0]}' can be read: repair them, or remove the folder.")
        return found

    def _first(self) -> int:
        """The label from which on the classes of the folder count: a domain has its own labels."""
        return sum(self.widths) if self.by_domain else 0

    def _train(self) -> None:
        """Runs the task as a training does, with checkpoints in the folder of the task under way."""
        images = self._labelled()
        stream = self._next_stream(images)
        place = RunFolder(self.folder.under_way)
        identity = {
            "task": self.history.current + 1, "after": [task.file for task in self.history.known],
            "classes": self.names, "images": images.digest(), "trains": self.trains,
        }  # fmt: skip
        checkpoint = begin(place, identity, lambda: task_end(self.folder).task_state)
        done = 0 if checkpoint is None else checkpoint.position.epoch
        loop = next_task(self.method, stream, self.config, place, self.model.device, self.trains, done)
        if checkpoint is not None:
            logger.info("Continuing the task after epoch %d.", done)
            loop.restore(checkpoint)
        try:
            with terminable(), arithmetic(self.config), show_progress(loop.progress):
                loop.learn(self.trains)
        except KeyboardInterrupt:
            logger.warning("The run has its old model; the same command continues from the last checkpoint.")
            raise
        except TrainingError as error:
            self.folder.clear_under_way()
            raise TrainingError(f"{error} The run has its old model.") from error

    def _labelled(self) -> FileImages:
        """The images with the labels of the model, without those that cannot be read."""
        given, images = self.given, self.given.images
        kept = np.arange(len(images.labels))
        if given.skip_bad:
            bad = images.bad()
            for index, trouble in bad.items():
                given.skipped.append(images.name(index))
                logger.warning("%s %s and is skipped.", images.files[index], trouble)
            kept = np.setdiff1d(kept, np.array(list(bad), dtype=np.int64))
            self.images()
        else:
            images.check()
        place = {name: label for label, name in enumerate(self.names)}
        labels = np.array([self._first() + place[given.names[label]] for label in images.labels.tolist()])
        return FileImages(images.root, images.files, labels).subset(kept)

    def _next_stream(self, images: FileImages) -> Stream:
        new = len(self.names) if self.by_domain else len(self.names) - sum(self.widths)
        return stream_of(images, [*self.widths, new], self.model.transforms, self.config, self.model.device)

    def estimated(self) -> float:
        """Seconds that learning takes, from a few images. Afterwards the model in memory has learned these."""
        if not self.only_sums:
            stream = self._next_stream(self._labelled())
            place = RunFolder(self.folder.under_way)  # nothing is written
            loop = next_task(self.method, stream, self.config, place, self.model.device, self.trains)
            with arithmetic(self.config):
                return loop.estimated(self.trains)
        given, transforms = self.given, self.model.transforms
        some = list(given.prepared(transforms, 1))
        self._fit(some)  # the first one starts threads and compiles
        begun = time.perf_counter()
        self._fit(some)
        self.method.calibrate()
        fixed = time.perf_counter() - begun  # almost all of it solves for the classifier
        begun = time.perf_counter()
        count = sum(1 for _ in given.prepared(transforms, TIMED))
        self._fit(given.prepared(transforms, TIMED))
        self.method.calibrate()
        each = max(0.0, time.perf_counter() - begun - fixed) / max(1, count)
        return fixed + each * len(given)

    def _fit(self, images: Iterable[tuple[Tensor, str]]) -> None:
        """Updates the classifier with images from `ClassFolder.prepared`."""
        config, model, first = self.config, self.model, self._first()
        labels = {name: first + label for label, name in enumerate(self.names)}

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            waiting: list[tuple[Tensor, str]] = []
            for pair in images:
                waiting.append(pair)
                if len(waiting) == config.training.eval_batch_size:
                    yield together(waiting)
                    waiting.clear()
            if waiting:
                yield together(waiting)

        def together(pairs: list[tuple[Tensor, str]]) -> tuple[Tensor, Tensor]:
            inputs = model.transforms.normalize(torch.stack([image for image, _ in pairs]))
            return inputs, torch.tensor([labels[name] for _, name in pairs])

        known, index = sum(self.widths), self.history.current
        new = first + len(self.names) - known
        with arithmetic(config), autocast(model.device, config.precision == "bf16"):
            if self.method.features_stay:
                self.method.start_task(Task(index, new, known, task_seed(config.seed, index)))
            self.method.fit_classifier(batches())


def from_statistics(method: Method) -> bool:
    """Whether a method predicts from statistics of features, which need no training: the heads that it trains beside
    them serve only its backbone."""
    return not method.classifier.trains or method.answers_from_statistics


def nbytes(tensors: Iterable[Tensor]) -> int:
    """On disk, where tensors that share their memory are written once."""
    sizes = {(t.data_ptr(), t.shape, t.dtype) if t.numel() > 1 else place: t.nbytes for place, t in enumerate(tensors)}
    return sum(sizes.values())
