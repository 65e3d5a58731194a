"""Sends a run's events to experiment trackers. `trackers` has the adapters, one class per library.

The trackers get what metrics.jsonl gets. A tracker that fails costs a warning, not the run. `tracking.json` keeps the
run's name in each tracker, so that a resumed run continues there.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from mambacl.config import RunConfig
from mambacl.errors import UserError
from mambacl.log import logger
from mambacl.training.folder import RunFolder
from mambacl.training.metrics import all_metrics

Event = Mapping[str, Any]


class Tracker(Protocol):
    """A run in a tracker."""

    name: str
    identity: dict[str, str]
    """what is needed to find the run again"""

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def summary(self, metrics: Mapping[str, float]) -> None:
        """The final metrics."""

    def attach(self, path: Path) -> None:
        """Adds a file, where the tracker keeps files."""

    def close(self, status: str) -> None:
        """`status` as in results.json."""


def check_trackers(names: Iterable[str]) -> None:
    """Refuses a tracker whose library is missing, before any work."""
    for name in names:
        if find_spec(name) is None:
            raise UserError(f"--track {name} needs the library {name}: pip install 'mambacl[{name}]'.")


def values_of(event: Event, correct: Sequence[Sequence[int]] = ()) -> dict[str, float]:
    """What a tracker logs of an event. `correct`: the counts after each task so far, this event's last."""
    if event["event"] == "epoch":
        return {
            "train/loss": event["loss"],
            "train/accuracy": event["accuracy"],
            "train/learning_rate": event["lr"],
            "train/images_per_second": event["images"] / event["seconds"] if event["seconds"] else 0.0,
            "train/task": event["task"] + 1,
        }
    if event["event"] != "task":
        return {}
    each = {
        f"accuracy/task_{j + 1:02d}": right / total
        for j, (right, total) in enumerate(zip(event["correct"], event["total"], strict=True))
        if total
    }
    found = all_metrics([list(row) for row in correct], event["total"])
    return {**each, **{f"metrics/{name}": value for name, value in found.items()}}


class Trackers:
    """The trackers of a run, and the events that they already have."""

    def __init__(self, trackers: Iterable[Tracker], epochs: int = 0, known: Iterable[Event] = ()) -> None:
        """`epochs` per task; 0 if nothing trains. Then a step is a task, otherwise an epoch."""
        self.trackers, self.epochs = list(trackers), max(1, epochs)
        self.rows: dict[int, list[int]] = {}
        self.known = {self._key(event) for event in known if self._note(event)}

    def event(self, event: Event) -> None:
        """Logs an event, unless the trackers have it from before an interruption."""
        if self.trackers and self._note(event) and self._key(event) not in self.known:
            self.send(event, self.trackers)

    def send(self, event: Event, to: Iterable[Tracker]) -> None:
        rows = [self.rows[task] for task in sorted(self.rows) if task <= event["task"]]
        values = values_of(event, rows)
        step = event["task"] * self.epochs + event.get("epoch", self.epochs - 1) + 1
        self._each(lambda tracker: tracker.log(values, step), to)

    def finish(self, results: Mapping[str, Any]) -> None:
        self._each(lambda tracker: tracker.summary(results["metrics"]))
        self.close(results["status"])

    def attach(self, path: Path) -> None:
        self._each(lambda tracker: tracker.attach(path))

    def close(self, status: str) -> None:
        self._each(lambda tracker: tracker.close(status))
        self.trackers = []

    def _note(self, event: Event) -> bool:
        """Keeps the counts of a task. Whether trackers log such an event."""
        if event["event"] == "task":
            self.rows[event["task"]] = event["correct"]
        return event["event"] in ("epoch", "task")

    def _key(self, event: Event) -> tuple[Any, ...]:
        return event["event"], event["task"], event.get("epoch")

    def _each(self, call: Callable[[Tracker], None], to: Iterable[Tracker] | None = None) -> None:
        """Calls each tracker. One that fails is left out from then on."""
        for tracker in list(self.trackers if to is None else to):
            try:
                call(tracker)
            except Exception as error:
                _warn(tracker.name, error)
                self.trackers = [other for other in self.trackers if other is not tracker]


def _warn(name: str, error: Exception) -> None:
    reason = (str(error).splitlines() or [""])[0]
    logger.warning("The tracker %s failed (%s: %s); the run goes on without it.", name, type(error).__name__, reason)


def open_trackers(config: RunConfig, folder: RunFolder, trains: bool = True) -> Trackers:
    """Opens the trackers that the configuration names. One that is new to the run gets all events so far."""
    if not config.track:
        return Trackers([])
    from mambacl.training.trackers import KINDS

    known = [*folder.events("epoch", "task"), *folder.events("task", "task")]
    known.sort(key=lambda event: (event["task"], event["event"] == "task"))
    identities, opened, new = dict(folder.tracking()), [], []
    for name in dict.fromkeys(config.track):
        try:
            tracker = KINDS[name](config, folder.path, identities.get(name))
        except Exception as error:
            _warn(name, error)
            continue
        opened.append(tracker)
        if name not in identities:
            new.append(tracker)
            identities[name] = tracker.identity
    folder.write_tracking(identities)
    made = Trackers(opened, config.training.epochs if trains else 0, known)
    for event in known if new else ():
        made.send(event, new)
    return made


def attach_report(folder: RunFolder, page: Path) -> None:
    """Adds the report to the run in each tracker that keeps files."""
    identities = folder.tracking()
    if not identities:
        return
    config = folder.config()
    from mambacl.training.trackers import KINDS

    for name in config.track:
        if name not in identities or not KINDS[name].keeps_files:
            continue
        try:
            tracker = KINDS[name](config, folder.path, identities[name])
        except Exception as error:
            _warn(name, error)
            continue
        made = Trackers([tracker])
        made.attach(page)
        made.close("finished")
