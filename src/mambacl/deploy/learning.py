"""Adds a task to a finished run without its data, and takes it back.

If nothing trains in the run's method, it keeps the sums that its classifier is computed from, and a task adds to them.
Other methods train the task as the run's own tasks were trained (`training.next_task`). The state after each task stays
(`training.learned`), so that a rollback gives the same model, bit for bit.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from mambacl.deploy import adopting, gate
from mambacl.deploy.capacity import Capacity, capacity_of
from mambacl.deploy.class_folders import ClassFolder, open_folder
from mambacl.deploy.comparing import Show, TestImage
from mambacl.deploy.comparison import Comparison, Limits, read_limits
from mambacl.deploy.hub_files import refuse_address
from mambacl.deploy.loading import from_run
from mambacl.deploy.predictor import Predictor
from mambacl.deploy.task_work import TaskWork, nbytes
from mambacl.errors import UserError
from mambacl.files import disk_error, expanded, require_space
from mambacl.log import logger
from mambacl.methods import Method
from mambacl.options import build_config
from mambacl.training import learned
from mambacl.training.build import pick_device
from mambacl.training.folder import RunFolder
from mambacl.training.learned import History, LearnedTask
from mambacl.training.loop import peak_memory

WAIT = "wait for it"  # if another process changes the run


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
    trained: bool = False
    """whether anything trains; otherwise the classifier takes in the images"""
    state_bytes: int = 0
    """size of the state after it, which stays on disk for each task; of a dry run, estimated: how many directions
    `mamba-cl` protects, for one, is known when the task has ended"""
    disk_bytes: int = 0
    """needed on disk while it is learned"""
    memory_bytes: int = 0
    """peak memory of the GPU, or of this process on a CPU; of a dry run, that of a few steps"""
    seconds: float = 0.0
    """taken; of a dry run, estimated"""
    capacity: Capacity | None = None
    """room that the model has left, before the task"""
    dry_run: bool = False
    notes: list[str] = field(default_factory=list)
    """sentences about what is special in this case"""
    skipped: list[str] = field(default_factory=list)
    """images that cannot be read"""
    before: dict[str, Count] = field(default_factory=dict)
    """test images by class; empty without any"""
    after: dict[str, Count] = field(default_factory=dict)
    comparison: Comparison | None = None
    """as `mambacl.compare` makes it; None without test images of classes that the model knew before"""
    broken: list[str] = field(default_factory=list)
    """a sentence for each limit that the new model exceeds; if there is one, the run keeps the old model"""


def learn(
    run: str | Path,
    new: str | Path,
    *,
    more: bool = False,
    test: str | Path | None = None,
    limits: Limits | Mapping[str, Any] | str | Path | None = None,
    unbalanced: bool = False,
    dry_run: bool = False,
    skip_bad: bool = False,
    device: str = "auto",
    show: Show = lambda items, total: items,
    backbone: str | None = None,
    classes: str | Path | None = None,
    protect: str | Path | None = None,
    out: str | Path | None = None,
    **options: Any,
) -> Learning:
    """Adds the classes of NEW/CLASS/* to a finished run, as its next task. The run's own data are not needed.

        mambacl.learn("runs/photos-analytic-0", "new-photos", test="test-photos", limits={"max_drop": 0.5})

    If the run's tasks are domains, NEW/CLASS/* are images of its classes from another domain. `more`: the folder can
    also hold images of classes that the model knows. `test`: a folder TEST/CLASS/* of test images, to compare the model
    before and after; without it, the run's own test images if they are still there. `limits`: what the task may cost,
    as for `compare`, or a YAML file; past one of them the run keeps the old model. `unbalanced`: do not help classes
    with few images. `dry_run` changes nothing and estimates time, memory, disk and free capacity. `show` gets the
    images and their number, and passes them on, to show progress.

    `run` can be a checkpoint that was trained elsewhere. It needs the name of its `backbone`, a file with its `classes`
    (one per line), a folder with images of its kind to `protect`, and a folder `out` for the run that this makes;
    `options` are those of the run, as for `train`.
    """
    refuse_address(run)
    bounds = _bounds(limits)
    where = pick_device(device)
    own = _Options(more, test, bounds, unbalanced, dry_run, skip_bad, where, show)
    given = {"backbone": backbone, "classes": classes, "protect": protect, "out": out}
    if not adopting.is_foreign(run, {name: value for name, value in given.items() if value is not None}, options):
        return _learn(_checked(run), new, own)
    source = adopting.Source.of(run, given, options, skip_bad)
    adopting.check_new(source, new, more, skip_bad)
    if not dry_run:
        return _with_notes(_learn(adopting.adopt(source, where, show), new, own), source.notes)
    with TemporaryDirectory() as place:
        elsewhere = dataclasses.replace(source, out=Path(place) / "run")
        plan = _learn(adopting.adopt(elsewhere, where, show), new, own)
    return _with_notes(dataclasses.replace(plan, folder=source.out), elsewhere.notes)


@dataclass(frozen=True)
class _Options:
    """Of `learn`."""

    more: bool
    test: str | Path | None
    limits: Limits
    unbalanced: bool
    dry_run: bool
    skip_bad: bool
    device: torch.device
    show: Show


def _with_notes(done: Learning, notes: list[str]) -> Learning:
    return dataclasses.replace(done, notes=[*notes, *done.notes])


def _bounds(limits: Limits | Mapping[str, Any] | str | Path | None) -> Limits:
    if isinstance(limits, Limits):
        return limits
    values = read_limits(limits) if isinstance(limits, (str, Path)) else limits or {}
    return build_config(Limits, values, "limits")


def _measured(done: Learning, method: Method, device: torch.device) -> Learning:
    size = nbytes(learned.state_of(method).values())
    return dataclasses.replace(done, state_bytes=size, memory_bytes=peak_memory(device))


def _learn(folder: RunFolder, new: str | Path, own: _Options) -> Learning:
    by_domain = folder.config().stream.by_domain
    with nullcontext() if own.dry_run else folder.locked(WAIT):
        stream = folder.stream()
        history = learned.read_history(folder, len(stream["tasks"]))
        known = learned.known_names(stream, history, by_domain)
        given = open_folder(new, "--new", known, own.skip_bad)
        added = _new_classes(given, known, folder, own.more, by_domain)
        names = [*known, *added]
        tests = _tests(folder, known, names, own)
        model = from_run(folder, own.device, with_task_state=True)
        work = TaskWork(folder, model, given, names, stream, history, by_domain, own.unbalanced)
        plan = Learning(
            folder=folder.path, task=history.current + 1, new=added, images=given.counts(), classes=len(names),
            trained=work.trains, disk_bytes=work.disk_bytes(), capacity=capacity_of(model.method, len(names)),
            notes=work.notes(), dry_run=own.dry_run,
        )  # fmt: skip
        require_space(folder.path, plan.disk_bytes)
        if own.dry_run:
            seconds = work.estimated()
            measured = _measured(dataclasses.replace(plan, seconds=seconds), model.method, own.device)
            return dataclasses.replace(measured, state_bytes=measured.state_bytes + work.missing_bytes())
        for note in plan.notes if work.trains else ():
            logger.info("%s", note)
        began = time.perf_counter()
        work.do(own.show)
        seconds = time.perf_counter() - began
        images = work.images()
        description = dataclasses.replace(model.description, classes=names)
        after = Predictor(model.method, model.transforms, description, model.device)  # records new CUDA graphs
        judged = _judged(folder, after, tests, own)
        if judged.broken:
            folder.clear_under_way()
        else:
            task = LearnedTask(learned.new_file(folder), added, images, work.domain)
            _commit(folder, history, task, model.method)
    found = hardly_recognised(judged.after, added, len(names), model.method.classifier.trains)
    done = dataclasses.replace(
        plan, images=images, seconds=seconds, skipped=given.skipped, before=judged.before, after=judged.after,
        comparison=judged.comparison, broken=judged.broken, notes=[*plan.notes, *found],
    )  # fmt: skip
    return _measured(done, model.method, own.device)


def hardly_recognised(after: Mapping[str, Count], new: list[str], classes: int, heads: bool) -> list[str]:
    """A warning if the new classes are recognised less often than by guessing. `heads`: the classifier is trained."""
    right, total = (sum(getattr(after[name], key) for name in new if name in after) for key in ("right", "total"))
    if right * classes >= total:
        return []
    remedy = (
        "heads that were trained apart have scores that do not compare, so use a run whose classifier is computed from "
        "features (--classifier lda)"
        if heads
        else "check that --test has images of the same kind as --new, under the same names"
    )
    return [
        f"Warning: {right} of {total} test images of the new classes are recognised, fewer than by guessing among all "
        f"{classes} classes: {remedy}."
    ]


def rollback(run: str | Path, task: int) -> list[str]:
    """Makes a run answer again as it did after this task, counting from 1, bit for bit. Returns its classes.

    It deletes nothing: a rollback to a later task undoes it, until the run learns the next one."""
    folder = _checked(run)
    with folder.locked(WAIT):
        stream = folder.stream()
        history = learned.read_history(folder, len(stream["tasks"]))
        possible = learned.states(folder, history)
        if task not in possible:
            kept = ", ".join(map(str, possible))
            raise UserError(
                f"{folder.path} has no state after task {task}; it has those after the tasks {kept} (of its training, "
                "a run keeps the last two, or the last one if it trained its model): choose one of them."
            )
        then = dataclasses.replace(history, current=task)
        try:
            learned.switch(folder, then)
        except OSError as error:
            raise disk_error(error, folder.path) from None
    return learned.known_names(stream, then, folder.config().stream.by_domain)


def _checked(run: str | Path) -> RunFolder:
    """A finished run."""
    place = expanded(run)
    if place.is_file():
        raise UserError(
            f"{run} is a file; an exported model lacks the sums that it would need to learn: give the run folder, or "
            "for a checkpoint also --backbone, --classes, --protect and --out."
        )
    folder = RunFolder.existing(place)
    if not folder.finished():
        raise UserError(f"{run} is not finished: run `mambacl resume {run}` first.")
    return folder


def _new_classes(given: ClassFolder, known: list[str], folder: RunFolder, more: bool, by_domain: bool) -> list[str]:
    added = [name for name in given.names if name not in known]
    if by_domain:
        if added:
            raise UserError(
                f"The tasks of {folder.path} are domains with the same classes, and '{added[0]}' is not one of them: "
                f"--new takes images of its classes, such as {', '.join(known[:3])}, from another domain."
            )
        return []
    if not more and (both := [name for name in given.names if name in known]):
        raise UserError(
            f"{folder.path} already has the class '{both[0]}': add --more to give it more images, or rename the folder."
        )
    return added


# The gate


@dataclass(frozen=True)
class _Judged:
    before: dict[str, Count]
    after: dict[str, Count]
    comparison: Comparison | None
    broken: list[str]


def _tests(folder: RunFolder, known: list[str], names: list[str], own: _Options) -> list[TestImage]:
    """Test images, checked before anything is learned."""
    if own.test is not None:
        found = gate.in_folder(own.test, names, own.skip_bad)
    else:
        found = [] if own.dry_run else gate.own_tests(folder, known)
    if own.limits != Limits() and not own.dry_run and not any(image.truth in known for image in found):
        raise UserError(
            "Limits need test images of classes that the model knows: give a folder that holds CLASS/* with --test."
        )
    return found


def _judged(folder: RunFolder, model: Predictor, tests: list[TestImage], own: _Options) -> _Judged:
    if not tests:
        return _Judged({}, {}, None, [])
    name = f"the test images of {folder.path}" if own.test is None else str(own.test)
    found = gate.compared(folder, model, tests, name, own.device, own.show)
    if found is None:  # there are only new classes
        right = dict.fromkeys([image.truth for image in tests], 0)
        total = dict(right)
        answers = model.predict_each([image.source for image in tests if isinstance(image.source, Path)], top=1)
        for image, answer in zip(tests, answers, strict=True):
            if not isinstance(answer, UserError):
                total[image.truth] += 1
                right[image.truth] += answer.name == image.truth
        return _Judged(
            {name: Count(0, total[name]) for name in right}, {name: Count(right[name], total[name]) for name in right},
            None, [],
        )  # fmt: skip
    rows = [(row.name, row.pairs) for row in found.classes]
    return _Judged(
        {name: Count(pairs.both + pairs.lost, pairs.images) for name, pairs in rows},
        {name: Count(pairs.both + pairs.gained, pairs.images) for name, pairs in rows},
        found,
        found.broken(own.limits),
    )


def _commit(folder: RunFolder, history: History, task: LearnedTask, method: Method) -> None:
    """Writes the state, then switches to it. Whatever stops this process, the run has either model, complete."""
    then = history.then(task)
    try:
        learned.write_state(folder, task.file, learned.state_of(method), method.task_text())
        learned.switch(folder, then)
    except OSError as error:
        raise disk_error(error, folder.learned_states) from None
    learned.remove_unnamed(folder, then)
