"""Tasks that a finished run has learned since, by `mambacl learn`, and which of its states answers now.

    learned/NNNN.safetensors  what the method keeps after such a task; each file is complete and never changes
    learned/under-way/        checkpoints of a task that is being learned; see `training.next_task`
    learned.json              the tasks with their classes and files, and the number of the current task

Writing learned.json is the only step that changes the model: before it, the new state is a file that nothing names.
`rollback` writes only that file. The states that no task names any more are removed after it. The training's own files
stay as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mambacl.errors import UserError
from mambacl.files import read_tensors, remove_unfinished, write_tensors
from mambacl.methods import METHODS, Method
from mambacl.training.checkpoints import Checkpoint
from mambacl.training.folder import LEARNED, TASK_END, RunFolder

SCHEMA = 1
METHOD = "method/"  # prefix of what a method has trained; the other tensors are its state after finished tasks
UNDO = "restore the file, or remove it to have the model as training left it"


@dataclass(frozen=True)
class LearnedTask:
    file: str
    """in learned/"""
    classes: list[str]
    """new ones, in the order of their labels"""
    images: dict[str, int]
    """by class; with `--more`, also of classes that were known"""
    domain: str = ""
    """its name, if the run's tasks are domains"""


@dataclass(frozen=True)
class History:
    trained: int
    """tasks of the training that the others build on"""
    tasks: tuple[LearnedTask, ...]
    """learned after those"""
    current: int
    """the number of the task after which the model answers, counting from 1 with the training's"""

    @property
    def own(self) -> int:
        """The number of the training's tasks that the model knows."""
        return min(self.trained, self.current)

    @property
    def known(self) -> tuple[LearnedTask, ...]:
        """The learned tasks that the model knows."""
        return self.tasks[: max(0, self.current - self.trained)]

    def then(self, task: LearnedTask) -> History:
        """After another task. Tasks after the current one are forgotten."""
        tasks = (*self.known, task)
        return History(self.own, tasks, self.own + len(tasks))


def read_history(folder: RunFolder, trained: int) -> History:
    """`trained`: the number of tasks that the run has finished."""
    content, where = folder.learned(), folder.path / LEARNED
    if not content:
        return History(trained, (), trained)
    if content.get("schema") != SCHEMA:
        raise UserError(
            f"{where} has the schema {content.get('schema')!r}, but this version of mambacl reads schema {SCHEMA}: "
            "use the version that wrote it."
        )
    try:
        tasks = tuple(LearnedTask(**task) for task in content["tasks"])
        history = History(content["trained"], tasks, content["current"])
        sound = history.trained > 0 and 0 < history.current <= history.trained + len(tasks)
    except (KeyError, TypeError):
        sound = False
    if not sound:
        raise UserError(f"{where} is damaged: {UNDO}.")
    return history


def states(folder: RunFolder, history: History) -> dict[int, Path]:
    """The files with the states that exist, by the number of the task."""
    found = {index + 1: path for index, path in folder.task_files().items() if index < history.trained}
    if METHODS.get(folder.config().method).trains:  # what it trained is in the checkpoint of the last task only
        found = {history.trained: folder.checkpoints / TASK_END}
    for number, task in enumerate(history.tasks, start=history.trained + 1):
        path = folder.learned_states / task.file
        if path.exists():
            found[number] = path
    return found


def as_now(folder: RunFolder, checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint at the end of the training, with the state after the current task instead."""
    history = read_history(folder, checkpoint.position.task)
    if history.current == checkpoint.position.task and not history.known:
        return checkpoint
    path = states(folder, history).get(history.current)
    if path is None:
        raise UserError(
            f"The state after task {history.current} of {folder.path} is missing: restore the folder "
            f"{folder.learned_states}, or run `mambacl rollback {folder.path} --task {history.trained}`."
        )
    position = checkpoint.position
    position = dataclasses.replace(position, task=history.own, correct=position.correct[: history.own])
    tensors = read_tensors(path)[0]
    trained = {name.removeprefix(METHOD): t for name, t in tensors.items() if name.startswith(METHOD)}
    task_state = {name: t for name, t in tensors.items() if not name.startswith(METHOD)}
    state = trained or checkpoint.method_state  # a method that trains nothing has none
    return dataclasses.replace(checkpoint, position=position, method_state=state, task_state=task_state)


def class_names(stream: Mapping[str, Any], history: History) -> list[str]:
    """By label, of a run whose tasks have different classes."""
    own = [stream["class_names"][c] for task in stream["tasks"][: history.own] for c in task]
    return own + [name for task in history.known for name in task.classes]


def known_names(stream: Mapping[str, Any], history: History, by_domain: bool) -> list[str]:
    """By label, of the classes of finished tasks. If the tasks are domains, all have the same classes."""
    return [stream["class_names"][c] for c in stream["tasks"][0]] if by_domain else class_names(stream, history)


def widths(stream: Mapping[str, Any], history: History) -> list[int]:
    """The number of labels of each task that the model knows. A task with more images of known classes has none."""
    own = [len(task) for task in stream["tasks"]]
    return own[: history.own] + [own[0] if task.domain else len(task.classes) for task in history.known]


def new_file(folder: RunFolder) -> str:
    """A name that no state has."""
    numbers = [int(path.stem) for path in folder.learned_states.glob("*.safetensors") if path.stem.isdecimal()]
    return f"{max(numbers, default=0) + 1:04d}.safetensors"


def state_of(method: Method) -> dict[str, Tensor]:
    """What a state's file holds."""
    trained = {METHOD + name: t for name, t in method.state_dict().items()} if method.trains else {}
    return {**trained, **method.task_state_dict()}


def write_state(folder: RunFolder, file: str, tensors: Mapping[str, Tensor], text: Mapping[str, str]) -> None:
    folder.learned_states.mkdir(exist_ok=True)
    write_tensors(folder.learned_states / file, tensors, text)


def switch(folder: RunFolder, history: History) -> None:
    """Makes this the history, in one step."""
    folder.write_learned({"schema": SCHEMA, **dataclasses.asdict(history)})


def remove_unnamed(folder: RunFolder, history: History) -> None:
    """Removes states that no task names, and what a killed process left."""
    named = {task.file for task in history.tasks}
    for path in folder.learned_states.glob("*.safetensors"):
        if path.name not in named:
            path.unlink(missing_ok=True)
    remove_unfinished(folder.learned_states)
    folder.clear_under_way()
