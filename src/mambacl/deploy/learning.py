"""Adds classes to a finished run without its data, and takes them back.

Only methods in which nothing trains: the run keeps the sums that its classifier is computed from, and a new task adds
to them. The state after each task stays (`training.learned`), so that a rollback gives the same model, bit for bit.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mambacl.deploy.class_folders import ClassFolder, open_folder
from mambacl.deploy.loading import from_run
from mambacl.deploy.predictor import Predictor
from mambacl.errors import UserError
from mambacl.files import disk_error, expanded, require_space
from mambacl.methods import METHODS, Task
from mambacl.training import learned
from mambacl.training.api import arithmetic
from mambacl.training.build import pick_device
from mambacl.training.folder import RunFolder
from mambacl.training.learned import History, LearnedTask
from mambacl.training.step import autocast

TIMED = 16  # images that a dry run times
Show = Callable[[Iterable[Any], int], Iterable[Any]]


@dataclass(frozen=True)
class Count:
    """Test images of one class."""

    right: int
    total: int


@dataclass(frozen=True)
class Learning:
    """A task that was learned, or that a dry run would learn."""

    folder: Path
    task: int
    """its number, counting from 1 with the training's tasks"""
    new: list[str]
    """classes that it adds"""
    images: dict[str, int]
    """images by class"""
    classes: int
    """of the model after it"""
    state_bytes: int
    """size of the state after it, which stays on disk for each task"""
    seconds: float
    """taken; of a dry run, estimated"""
    dry_run: bool = False
    skipped: list[str] = field(default_factory=list)
    """images that cannot be read"""
    before: dict[str, Count] = field(default_factory=dict)
    """the user's test images by class; empty without --test"""
    after: dict[str, Count] = field(default_factory=dict)


def learn(
    run: str | Path,
    new: str | Path,
    *,
    more: bool = False,
    test: str | Path | None = None,
    unbalanced: bool = False,
    dry_run: bool = False,
    skip_bad: bool = False,
    device: str = "auto",
    show: Show = lambda items, total: items,
) -> Learning:
    """Adds the classes of NEW/CLASS/* to a finished run, as its next task. The run's own data are not needed.

        mambacl.learn("runs/photos-analytic-0", "new-photos", test="test-photos")

    `more`: the folder can also hold images of classes that the model knows. `test`: a folder TEST/CLASS/* of test
    images, to compare the model before and after. `unbalanced`: do not help classes with few images. `dry_run` changes
    nothing and estimates time and size. `show` gets the images and their number, and passes them on, to show progress.
    """
    folder = _checked(run)
    with nullcontext() if dry_run else folder.locked():
        stream = folder.stream()
        history = learned.read_history(folder, len(stream["tasks"]))
        known = learned.class_names(stream, history)
        given = open_folder(new, "--new", known, skip_bad)
        added = _new_classes(given, known, folder, more)
        names = [*known, *added]
        tests = None if test is None else _tests(test, names, skip_bad)
        model = from_run(folder, pick_device(device), with_task_state=True)
        require_space(folder.path, _state_bytes(model))
        plan = Learning(
            folder=folder.path, task=history.current + 1, new=added, images=given.counts(), classes=len(names),
            state_bytes=0, seconds=0.0, dry_run=dry_run,
        )  # fmt: skip
        if dry_run:
            seconds = _estimated(model, given, names, history.current)
            return dataclasses.replace(plan, state_bytes=_state_bytes(model), seconds=seconds)
        before = {} if tests is None else _counts(model, tests, show)
        began = time.perf_counter()
        _fit(model, show(given.prepared(model.transforms), len(given)), names, history.current)
        if not unbalanced:
            model.method.classifier.favour_rare(sum(len(task) for task in stream["tasks"][: history.own]))
        seconds = time.perf_counter() - began
        images = given.counts()
        if empty := [name for name, count in images.items() if not count]:
            raise UserError(f"No image of the class '{empty[0]}' can be read: repair them, or remove the folder.")
        description = dataclasses.replace(model.description, classes=names)
        model = Predictor(model.method, model.transforms, description, model.device)  # records new CUDA graphs
        after = {} if tests is None else _counts(model, tests, show)
        _commit(folder, history, LearnedTask(learned.new_file(folder), added, images), model)
    return dataclasses.replace(
        plan, images=images, state_bytes=_state_bytes(model), seconds=seconds, skipped=given.skipped, before=before,
        after=after,
    )  # fmt: skip


def rollback(run: str | Path, task: int) -> list[str]:
    """Makes a run answer again as it did after this task, counting from 1, bit for bit. Returns its classes.

    It deletes nothing: a rollback to a later task undoes it, until the run learns the next one."""
    folder = _checked(run)
    with folder.locked():
        stream = folder.stream()
        history = learned.read_history(folder, len(stream["tasks"]))
        possible = learned.states(folder, history)
        if task not in possible:
            kept = ", ".join(map(str, possible))
            raise UserError(
                f"{folder.path} has no state after task {task}; it has those after the tasks {kept} (of its training, "
                "a run keeps the last two): choose one of them."
            )
        then = dataclasses.replace(history, current=task)
        try:
            learned.switch(folder, then)
        except OSError as error:
            raise disk_error(error, folder.path) from None
    return learned.class_names(stream, then)


def _checked(run: str | Path) -> RunFolder:
    """A finished run that can learn from sums."""
    place = expanded(run)
    if place.is_file():
        raise UserError(
            f"{run} is a file; an exported model lacks the sums that it would need to learn: give the run folder."
        )
    folder = RunFolder.existing(place)
    config = folder.config()
    if METHODS.get(config.method).trains:
        raise UserError(
            f"{run} was trained with the method {config.method}, and `learn` and `rollback` work with runs of the "
            "method analytic for now: train such a run, or one with all classes."
        )
    if config.stream.by_domain:
        raise UserError(f"The tasks of {run} are domains with the same classes, to which `learn` cannot add others.")
    if not folder.finished():
        raise UserError(f"{run} is not finished: run `mambacl resume {run}` first.")
    return folder


def _new_classes(given: ClassFolder, known: list[str], folder: RunFolder, more: bool) -> list[str]:
    if not more and (both := [name for name in given.names if name in known]):
        raise UserError(
            f"{folder.path} already has the class '{both[0]}': add --more to give it more images, or rename the folder."
        )
    return [name for name in given.names if name not in known]


def _tests(test: str | Path, names: list[str], skip_bad: bool) -> ClassFolder:
    tests = open_folder(test, "--test", names, skip_bad)
    if others := [name for name in tests.names if name not in names]:
        raise UserError(
            f"{test} has the class '{others[0]}', which neither the model nor the new images have: remove it."
        )
    return tests


def _fit(model: Predictor, images: Iterable[tuple[Tensor, str]], names: list[str], task: int) -> None:
    """Updates the classifier with images from `ClassFolder.prepared`. `names` are all classes, by label."""
    config, known = model.description.config, len(model.classes)
    labels = {name: label for label, name in enumerate(names)}
    seed = int(np.random.SeedSequence([config.seed, task]).generate_state(1)[0])  # as in training

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

    with arithmetic(config), autocast(model.device, config.precision == "bf16"):
        model.method.start_task(Task(task, len(names) - known, known, seed))
        model.method.fit_classifier(batches())


def _estimated(model: Predictor, given: ClassFolder, names: list[str], task: int) -> float:
    """Seconds that learning takes, from a few images. Afterwards the model in memory has learned these."""
    some = list(given.prepared(model.transforms, 1))
    _fit(model, some, names, task)  # the first one starts threads and compiles
    begun = time.perf_counter()
    _fit(model, some, names, task)
    fixed = time.perf_counter() - begun  # almost all of it solves for the classifier
    begun = time.perf_counter()
    count = sum(1 for _ in given.prepared(model.transforms, TIMED))
    _fit(model, given.prepared(model.transforms, TIMED), names, task)
    each = max(0.0, time.perf_counter() - begun - fixed) / max(1, count)
    return fixed + each * len(given)


def _state_bytes(model: Predictor) -> int:
    return sum(tensor.nbytes for tensor in model.method.task_state_dict().values())


def _counts(model: Predictor, tests: ClassFolder, show: Show) -> dict[str, Count]:
    """Test images by class. A class that the model does not know yet has none right."""
    right, total = dict.fromkeys(tests.names, 0), dict.fromkeys(tests.names, 0)
    labels = tests.images.labels.tolist()
    answers = show(model.predict_each(tests.images.files, top=1), len(tests))
    for index, (label, answer) in enumerate(zip(labels, answers, strict=True)):
        name = tests.names[label]
        if isinstance(answer, UserError):
            if not tests.skip_bad:
                raise tests.images.refusal(index, str(tests.images.try_image(index)))
            continue
        total[name] += 1
        right[name] += answer.name == name
    return {name: Count(right[name], total[name]) for name in tests.names}


def _commit(folder: RunFolder, history: History, task: LearnedTask, model: Predictor) -> None:
    """Writes the state, then switches to it. Whatever stops this process, the run has either model, complete."""
    then = history.then(task)
    try:
        learned.write_state(folder, task.file, model.method.task_state_dict())
        learned.switch(folder, then)
    except OSError as error:
        raise disk_error(error, folder.learned_states) from None
    learned.remove_unnamed(folder, then)
