"""Compares two models on the same images, to check an update before it is shipped."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mambacl.data.images import in_threads
from mambacl.data.sets.folders import images_under, subfolders
from mambacl.deploy.comparison import ClassPairs, Comparison, Flip, Side
from mambacl.deploy.drift import Drift
from mambacl.deploy.inputs import pixels
from mambacl.deploy.loading import load
from mambacl.deploy.model_file import tensors_of
from mambacl.deploy.paired import Pairs, calibration_error
from mambacl.deploy.predictor import BATCH, Predictor
from mambacl.errors import UserError
from mambacl.files import expanded

WARM_UP = 2  # calls: on a GPU the second is recorded
FEWEST, MOST = 3, 15  # timed calls per model
SECONDS = 2.0  # after which no further pair of calls is timed

Show = Callable[[Iterable[Any], int], Iterable[Any]]


@dataclass(frozen=True)
class TestImage:
    __test__ = False  # for pytest

    name: str
    truth: str
    """its class"""
    source: Path | Callable[[], Tensor]
    """its file, or a function that reads it"""

    def pixels(self) -> Tensor:
        return pixels(self.source if isinstance(self.source, Path) else self.source())


def compare(
    old: str | Path | Predictor,
    new: str | Path | Predictor,
    test: str | Path,
    *,
    device: str = "auto",
    batch_size: int = BATCH,
    show: Show = lambda images, _: images,
) -> Comparison:
    """Compares an old and a new model on the images of TEST/CLASS/*. A model is a run folder, an exported file or a
    `Predictor`. `show` gets the images and their number, and can show progress while it passes them on."""
    if batch_size < 1:
        raise UserError(f"batch_size must be at least 1, got {batch_size}.")
    folder = expanded(test)
    paths = _images(folder)
    models = [model if isinstance(model, Predictor) else load(model, device) for model in (old, new)]
    known = [set(model.classes) for model in models]
    images = []
    for path in paths:
        place = path.relative_to(folder)
        images.append(TestImage(place.as_posix(), class_of(place, known[0] | known[1]), path))
    _check_classes(folder, {image.truth for image in images}, *known)
    names = [str(path) if not isinstance(path, Predictor) else "" for path in (old, new)]
    return compare_on(images, models, names, str(test), batch_size, show)


def compare_on(
    images: list[TestImage],
    models: list[Predictor],
    paths: list[str],
    test: str,
    batch_size: int = BATCH,
    show: Show = lambda images, _: images,
) -> Comparison:
    """Compares two models, the old one first, on these images. `paths` and `test` name the models and the images."""
    known = [set(model.classes) for model in models]
    answers, first, drift = _answers(images, models, batch_size, show)
    by_class: dict[str, list[Row]] = {image.truth: [] for image in images}
    for row in answers.rows:
        by_class[row.truth].append(row)
    shared = [row for row in answers.rows if row.truth in known[0]]
    if not shared:
        raise UserError(f"No image in {test} of a class that both models know can be read: add some.")
    seconds = _seconds(models, first)
    sides = [
        Side(
            path=path,
            method=model.description.config.method,
            backbone=model.description.config.backbone,
            classes=len(model.classes),
            confidence=statistics.fmean(row.confidences[i] for row in shared),
            calibration_error=calibration_error(
                [row.confidences[i] for row in shared], [row.right[i] for row in shared]
            ),
            images_per_second=len(first[i]) / seconds[i],
            bytes=_bytes(model),
        )
        for i, (path, model) in enumerate(zip(paths, models, strict=True))
    ]
    return Comparison(
        old=sides[0],
        new=sides[1],
        test=test,
        shared=Pairs.of(row.right for row in shared),
        all=Pairs.of(row.right for row in answers.rows),
        classes=tuple(
            ClassPairs(name, name not in known[0], Pairs.of(row.right for row in rows))
            for name, rows in by_class.items()
        ),
        flips=tuple(Flip(row.name, row.truth, row.predicted[1]) for row in shared if row.right == (True, False)),
        drift=drift,
        unreadable=tuple(answers.unreadable),
        untested=tuple(name for name in models[0].classes if not by_class.get(name)),
    )


def _images(folder: Path) -> list[Path]:
    """The images in subfolders."""
    if not folder.is_dir():
        raise UserError(f"The test folder {folder} does not exist: give a folder with one folder of images per class.")
    found = [path for name in subfolders(folder) for path in images_under(folder / name)]
    if not found:
        raise UserError(f"{folder} has no images in class folders; it must hold CLASS/*, with the models' class names.")
    return found


def class_of(place: Path, known: Collection[str]) -> str:
    """The class of an image by its path below the test folder. The class 'T-shirt/top' is a folder in a folder; other
    folders below that of a class belong to it."""
    parts = place.parent.parts
    names = ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((name for name in names if name in known), parts[0])


def _check_classes(folder: Path, tested: set[str], old: set[str], new: set[str]) -> None:
    if not old & new:
        raise UserError("The two models have no class in common, so neither is an update of the other.")
    if not tested & old & new:
        some = ", ".join(sorted(old & new)[:3])
        raise UserError(
            f"No class of {folder} is known to both models: name its folders as the models' classes, such as {some}."
        )
    if unknown := sorted(tested - old - new):
        raise UserError(f"Neither model knows the class '{unknown[0]}' of {folder}: rename or remove that folder.")
    if gone := sorted(tested - new):
        raise UserError(
            f"The new model does not know the class '{gone[0]}' of {folder}, which the old one knows: remove that "
            "folder if the class was given up, or check that the models are in the right order."
        )


@dataclass(frozen=True)
class Row:
    """What both models say about an image, the old one first."""

    name: str
    truth: str
    predicted: tuple[str, str]
    confidences: tuple[float, float]

    @property
    def right(self) -> tuple[bool, bool]:
        return self.predicted[0] == self.truth, self.predicted[1] == self.truth


@dataclass
class Answers:
    rows: list[Row] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)


def _answers(
    images: list[TestImage], models: list[Predictor], batch_size: int, show: Show
) -> tuple[Answers, list[Tensor], dict[str, float] | None]:
    """The rows of all images, the first batch of each model's inputs, and the drift on images of old classes."""
    answers, drift, known = Answers(), Drift.of(*models), set(models[0].classes)
    first: list[Tensor] = []
    for batch in _batches(images, models, batch_size, show, answers.unreadable):
        inputs = [
            model.transforms.normalize(torch.stack([made[i] for _, made in batch])) for i, model in enumerate(models)
        ]
        first = first or inputs
        best = [model.probabilities(x).max(1) for model, x in zip(models, inputs, strict=True)]
        values, labels = [b.values.tolist() for b in best], [b.indices.tolist() for b in best]
        for k, (image, _) in enumerate(batch):
            predicted = (models[0].classes[labels[0][k]], models[1].classes[labels[1][k]])
            answers.rows.append(Row(image.name, image.truth, predicted, (values[0][k], values[1][k])))
        if drift is not None:
            drift.add(inputs[0][[image.truth in known for image, _ in batch]])
    return answers, first, None if drift is None else drift.relative()


Prepared = tuple[TestImage, list[Tensor]]


def _batches(
    images: list[TestImage], models: list[Predictor], batch_size: int, show: Show, unreadable: list[str]
) -> Iterator[list[Prepared]]:
    """Batches of images, each read once and prepared for both models."""

    def prepared(image: TestImage) -> Prepared | UserError:
        try:
            found = image.pixels()
        except UserError as error:
            return error
        return image, [model.transforms.evaluate(found) for model in models]

    batch: list[Prepared] = []
    for made in show(in_threads(prepared, images, ahead=2 * batch_size), len(images)):
        if isinstance(made, UserError):
            unreadable.append(str(made))
            continue
        batch.append(made)
        if len(batch) == batch_size:
            yield batch
            batch = []
    if batch:
        yield batch


def _seconds(models: list[Predictor], inputs: list[Tensor]) -> list[float]:
    """Seconds per batch of each model, the median of calls in turn: both see the same load of the machine."""
    for model, x in zip(models, inputs, strict=True):
        for _ in range(WARM_UP):
            model.scores(x)
    found: list[list[float]] = [[], []]
    started = time.perf_counter()
    while len(found[0]) < FEWEST or (len(found[0]) < MOST and time.perf_counter() - started < SECONDS):
        for model, x, times in zip(models, inputs, found, strict=True):
            begun = time.perf_counter()
            model.scores(x).cpu()  # waits for the GPU
            times.append(time.perf_counter() - begun)
    return [statistics.median(times) for times in found]


def _bytes(model: Predictor) -> int:
    """Of the tensors in an exported file; tensors that share their memory count once."""
    tensors = tensors_of(model.method).values()
    unique = {(t.data_ptr(), t.shape, t.stride(), t.dtype): t.numel() * t.element_size() for t in tensors if t.numel()}
    return sum(unique.values())
