"""How far a run has come, and how long the rest takes. Terminal, log file and `mambacl watch` show the same `State`.

Work is counted in images, by phase, because an image costs more in training than in evaluation. The time left is the
work left in each phase, at the speed measured in that phase.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from mambacl.status import duration

COST = {"train": 3.0, "covariance": 1.5, "classifier": 1.0, "evaluate": 1.0}
"""guessed cost of an image relative to a forward pass, until a phase has been measured"""
SOLVING = {"covariance": "decomposing", "classifier": "solving"}  # what follows the last image of a phase
EVERY = 0.5  # seconds between updates of what is shown

T = TypeVar("T")


@dataclass
class State:
    """What is shown of a run. Counts start from 1; 0 means that there is none."""

    title: str = ""
    phase: str = "starting"
    task: int = 0
    tasks: int = 0
    epoch: int = 0
    epochs: int = 0
    done: int = 0
    """images done in this phase, of `of`"""
    of: int = 0
    loss: float | None = None
    """mean over the images of this epoch so far"""
    accuracy: float | None = None
    """of the training images of this epoch so far"""
    test_accuracy: float | None = None
    """after the last finished task, over all tasks so far"""
    elapsed: float = 0.0
    left: float | None = None
    memory: int = 0
    notes: dict[str, Any] = field(default_factory=dict)
    """pid, host and time of the process that writes this to a file"""

    def place(self) -> str:
        """Where the run is: task, epoch, phase and images."""
        words = [f"task {self.task}/{self.tasks}"] if self.tasks else []
        if self.epoch:
            words.append(f"epoch {self.epoch}/{self.epochs}" if self.epochs else f"epoch {self.epoch}")
        words.append(self.phase)
        if self.of:
            words.append(f"{min(self.done, self.of)}/{self.of}")
        return " ".join(words)

    def figures(self) -> str:
        """Loss and accuracy of the current epoch; empty if nothing trains."""
        if self.loss is None or self.accuracy is None:
            return ""
        return f"loss {self.loss:.4f} accuracy {self.accuracy:.1%}"

    def share(self) -> float:
        """The part of the run that is done, from 0 to 1."""
        total = self.elapsed + (self.left or 0.0)
        return self.elapsed / total if total and self.left is not None else 0.0


def seconds_left(
    left: Mapping[str, float], done: Mapping[str, float], seconds: Mapping[str, float], cost: Mapping[str, float] = COST
) -> float | None:
    """The seconds that the images `left` take, by phase, if `done` images took `seconds`. A phase that has not been
    measured is estimated from the others by its relative cost. None if nothing has been measured."""
    measured = [phase for phase in done if done[phase] > 0 and seconds.get(phase, 0.0) > 0]
    weight = sum(done[phase] * cost.get(phase, 1.0) for phase in measured)
    if not weight:
        return None
    unit = sum(seconds[phase] for phase in measured) / weight
    rates = {phase: seconds[phase] / done[phase] for phase in measured}
    return sum(max(0.0, n) * rates.get(phase, unit * cost.get(phase, 1.0)) for phase, n in left.items())


class View(Protocol):
    """Shows the progress somewhere."""

    def show(self, state: State) -> None:
        """Called a few times per second at most, and when a phase begins."""

    def line(self, text: str, task: bool) -> None:
        """A sentence about a finished epoch, or `task`."""

    def close(self) -> None:
        """The run has ended."""


class Progress:
    """Follows a run and tells its views. `left`: the images that the run still has to process, by phase."""

    def __init__(
        self, title: str = "", left: Mapping[str, float] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.state, self.left, self.clock = State(title), dict(left or {}), clock
        self.views: list[View] = []
        self.done: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self.began = self.since = self.shown = clock()
        self.counted = ""  # the phase that the current seconds belong to
        self.figures: Callable[[], tuple[float, float]] | None = None
        """the loss and accuracy of the epoch so far; on a GPU, asking for them waits for it"""
        self.memory: Callable[[], int] | None = None
        self.deadline: Callable[[], float] | None = None
        """the seconds left of work that ends at a certain time, whatever its speed"""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        self._count()
        for view in self.views:
            view.close()

    def phase(self, counted: str, text: str = "", of: int = 0, **places: int) -> None:
        """A phase begins: `counted` is its name for the estimate, `text` the words for the reader."""
        self._count()
        self.counted = counted
        state = self.state
        state.phase, state.done, state.of = text, 0, of
        for name, value in places.items():
            setattr(state, name, value)
        state.loss = state.accuracy = None
        self._show()

    def text(self, text: str) -> None:
        """The phase continues with other work."""
        self.state.phase = text
        self._show()

    def step(self, images: int) -> None:
        """A batch of this many images is done."""
        self.state.done += images
        self.done[self.counted] = self.done.get(self.counted, 0.0) + images
        if self.counted in self.left:
            self.left[self.counted] -= images
        if self.clock() - self.shown >= EVERY:
            self._show()

    def skip(self, counted: str, images: int) -> None:
        """This many images of a phase need no work after all."""
        self.left[counted] = self.left.get(counted, 0.0) - images

    def over(self, batches: Iterable[T], parts: int = 1) -> "Counted[T]":
        """The same batches of (images, labels), counted as the current phase; `parts`: of how many processes this is
        one. What follows the last is shown as solving."""
        return Counted(self, batches, parts)

    def epoch(self, text: str) -> None:
        self.line(text, task=False)

    def line(self, text: str, task: bool = True) -> None:
        self._count()
        left = self._seconds_left() or 0.0
        for view in self.views:
            view.line(f"{text}  {duration(left)} left" if left >= 1 else text, task)

    def _count(self) -> None:
        now = self.clock()
        if self.counted:
            self.seconds[self.counted] = self.seconds.get(self.counted, 0.0) + now - self.since
        self.since = now

    def _seconds_left(self) -> float | None:
        if self.deadline is not None:
            return self.deadline()
        return seconds_left(self.left, self.done, self.seconds)

    def _show(self) -> None:
        if not self.views:
            return
        self._count()
        state = self.state
        state.elapsed = self.since - self.began
        state.left = self._seconds_left()
        if self.figures is not None and state.done and self.counted == "train":
            state.loss, state.accuracy = self.figures()
        if self.memory is not None:
            state.memory = self.memory()
        for view in self.views:
            view.show(state)
        self.shown = self.clock()


class Counted(Generic[T]):
    def __init__(self, progress: Progress, batches: Iterable[T], parts: int) -> None:
        self.progress, self.batches, self.parts = progress, batches, parts

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        progress = self.progress
        for batch in self.batches:
            yield batch
            progress.step(self.parts * len(batch[1]))  # type: ignore[index]
        if progress.counted in SOLVING:
            progress.text(SOLVING[progress.counted])
