"""What a run's folder says about the run now: for `mambacl watch`, which another process runs. Imports no PyTorch."""

import dataclasses
import os
import platform
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mambacl.errors import UserError
from mambacl.status import duration
from mambacl.training.folder import PRETRAINING, PRETRAINING_RESULTS, RunFolder
from mambacl.training.progress import State

SILENT = 300.0  # seconds without news from another machine after which the process there may have ended
ENDED = ("finished", "interrupted", "failed", "killed")


@dataclass(frozen=True)
class News:
    """A run as seen from outside."""

    path: Path
    status: str
    """waiting (there is no run yet), starting, running, finished, interrupted, failed or killed"""
    state: State
    metrics: dict[str, float]
    accuracies: list[float]
    """of each task so far, after the last finished one"""
    epoch: dict[str, Any]
    """the last finished epoch, as in metrics.jsonl"""
    silent: float = 0.0
    """seconds since the last news"""
    pretrains: bool = False
    """whether it is `mambacl pretrain`, which has no tasks"""
    evaluation: dict[str, Any] = field(default_factory=dict)
    """the last one of pre-training, as in metrics.jsonl"""

    @property
    def over(self) -> bool:
        return self.status in ENDED

    def remedy(self) -> str:
        if self.pretrains and self.over and self.status != "finished":
            return "Its process has ended. The same command `mambacl pretrain` continues it."
        if self.status == "killed":
            return f"Its process has ended without a word. `mambacl resume {self.path}` continues it."
        if self.status in ("interrupted", "failed"):
            return f"`mambacl resume {self.path}` continues it."
        if self.status == "running" and self.silent > SILENT:
            return f"No news for {duration(self.silent)}: its machine may have stopped."
        return ""

    def lines(self) -> list[str]:
        """A few lines for a terminal."""
        state = self.state
        if self.status == "waiting":
            return [f"{self.path}: waiting for the run to begin"]
        head = f"{self.path}: {self.status}"
        if self.status == "running":
            left = "" if state.left is None else f", {duration(state.left)} left"
            head += f", {state.place()}, {duration(state.elapsed)}{left}"
        rows = [head]
        if figures := state.figures() if self.status == "running" else "":
            rows.append(f"this epoch: {figures}")
        elif self.epoch:
            place = f"{self.epoch['epoch']}" if self.pretrains else f"task {self.epoch['task'] + 1}"
            rows.append(f"last epoch ({place}): loss {self.epoch['loss']:.4f} accuracy {self.epoch['accuracy']:.1%}")
        if self.evaluation:
            rows.append(
                f"after epoch {self.evaluation['epoch']}: top-1 {self.evaluation['raw']:.1%}, of the average "
                f"{self.evaluation['ema']:.1%}"
            )
        if self.accuracies:
            each = " ".join(f"{value:.1%}" for value in self.accuracies[:12]) + (" ..." * (len(self.accuracies) > 12))
            rows.append(
                f"after task {len(self.accuracies)}: accuracy {self.metrics['final_accuracy_tasks']:.1%}, "
                f"forgetting {self.metrics['forgetting']:.1%}  (by task: {each})"
            )
        if state.memory:
            rows.append(f"memory {state.memory / 1e9:.2f} GB")
        return rows + ([self.remedy()] if self.remedy() else [])


def look(path: Path) -> News:
    """Reads the folder. A file that is being replaced, or is not there yet, is no error."""
    folder = RunFolder(path)
    written = folder.progress()
    notes = written.get("notes") or {}
    if (path / PRETRAINING).is_file():
        return _pretraining(folder, written, notes)
    if not folder.exists() or not folder.has_results():
        status = "waiting" if not folder.exists() else "killed" if notes and not _alive(notes) else "starting"
        return News(path, status, State(), {}, [], {})
    results = folder.results()
    status = str(results.get("status", "running"))
    if status == "running" and not _alive(notes):
        status = "killed"
    row = results["correct"][-1] if results["correct"] else []
    so_far = zip(row, results["total"], strict=False)  # later tasks have a total only
    accuracies = [right / total if total else 0.0 for right, total in so_far]
    epoch, metrics = _last(folder, "epoch", "task", "epoch"), results.get("metrics", {})
    return News(path, status, _state(written), metrics, accuracies, epoch, _silent(notes))


def _pretraining(folder: RunFolder, written: dict[str, Any], notes: dict[str, Any]) -> News:
    """An interrupted one looks like a killed one: both can be continued."""
    finished = (folder.path / PRETRAINING_RESULTS).is_file()
    status = "finished" if finished else "starting" if not notes else "running" if _alive(notes) else "killed"
    epoch, evaluation = _last(folder, "epoch", "epoch"), _last(folder, "evaluation", "epoch")
    return News(folder.path, status, _state(written), {}, [], epoch, _silent(notes), True, evaluation)


def _silent(notes: dict[str, Any]) -> float:
    return max(0.0, time.time() - float(notes.get("time", time.time())))


def _last(folder: RunFolder, kind: str, *needed: str) -> dict[str, Any]:
    """The last event of a kind; empty if there is none."""
    with suppress(UserError):
        if found := folder.events(kind, *needed):
            return found[-1]
    return {}


def _state(written: dict[str, Any]) -> State:
    """What progress.json holds; fields of another version are left out."""
    names = {field.name for field in dataclasses.fields(State)}
    return State(**{name: value for name, value in written.items() if name in names})


def _alive(notes: dict[str, Any]) -> bool:
    """Whether the process that trains may still run. On another machine nobody can tell."""
    if notes.get("host") != platform.node():
        return bool(notes)
    try:
        os.kill(int(notes["pid"]), 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's process
        return True
    return not _is_zombie(int(notes["pid"]))


def _is_zombie(pid: int) -> bool:
    """A killed process whose parent has not noticed yet."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return False
