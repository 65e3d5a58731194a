"""Trains the runs of a sweep on an engine: skips finished runs, continues interrupted ones, tries failed ones again."""

import contextlib
import json
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mambacl.errors import UserError
from mambacl.files import locked, write_bytes, write_json
from mambacl.sweeps.engines.base import GRACE, Ending, Engine, Handle, Task
from mambacl.sweeps.plan import SWEEP, Plan, PlannedRun
from mambacl.sweeps.states import (
    ELSEWHERE,
    FAILED,
    FINISHED,
    INTERRUPTED,
    QUEUED,
    RUNNING,
    WAITING,
    Entry,
    entries_of,
    is_busy,
    is_finished,
)
from mambacl.sweeps.view import View
from mambacl.training.folder import RunFolder
from mambacl.training.watching import look

STATES = "sweep.json"  # in the sweep's folder
OPTIONS = "options.yaml"  # in a run's folder: what `mambacl train` is given
EVERY = 0.5  # seconds between two looks at the runs
MISTAKE = 2  # the exit code of a run whose options or data are wrong: trying again does not help


class Elsewhere:
    """A run that another process trains, such as one that a killed sweep has left."""

    def __init__(self, run: PlannedRun) -> None:
        self.run = run

    def ending(self) -> Ending | None:
        if is_busy(self.run):
            return None
        return Ending(0 if is_finished(self.run) else 1)

    def stop(self) -> None:
        """It is not this sweep's to stop."""

    kill = stop


class Sweep:
    """`retries`: how often a failed run is tried again. `imports`: files that runs import first. `keep_checkpoints`:
    whether finished runs keep theirs."""

    def __init__(
        self,
        plan: Plan,
        view: View,
        retries: int = 1,
        imports: Sequence[Path] = (),
        keep_checkpoints: bool = True,
    ) -> None:
        self.plan, self.view, self.retries, self.imports = plan, view, retries, imports
        self.keep_checkpoints = keep_checkpoints
        self.entries = entries_of(plan.runs)
        self._remember()

    def run(self, engine: Engine) -> list[Entry]:
        """Trains all runs. Returns those that failed. After Ctrl-C, first stops those that run."""
        folder = self.plan.folder
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".lock", f"works on {folder}: wait for it, or choose another --out."):
            if self.plan.text:
                write_bytes(folder / SWEEP, self.plan.text.encode())
            self._record()
            with self.view, _interruptible():
                try:
                    self._run(engine)
                except BaseException:
                    self._stop()
                    raise
                finally:
                    self._record()
        return [entry for entry in self.entries if entry.state == FAILED]

    def _run(self, engine: Engine) -> None:
        while any(entry.open for entry in self.entries):
            for entry in self.entries:
                if entry.handle is not None:
                    self._follow(entry)
            taken = sum(entry.handle is not None for entry in self.entries)
            startable = [entry for entry in self.entries if entry.open and entry.handle is None]
            for entry in startable[: max(0, engine.slots - taken)]:
                self._start(entry, engine)
            self.view.show(self.entries)
            if any(entry.handle is not None for entry in self.entries):
                time.sleep(EVERY)
        self.view.show(self.entries)

    def _start(self, entry: Entry, engine: Engine) -> None:
        run = entry.run
        entry.began, entry.news = time.monotonic(), None
        if is_busy(run):
            entry.handle, entry.state = Elsewhere(run), ELSEWHERE
        else:
            run.folder.mkdir(parents=True, exist_ok=True)
            write_bytes(run.folder / OPTIONS, run.config.as_yaml().encode())
            entry.log_start, entry.attempts, entry.state = entry.log_size(), entry.attempts + 1, QUEUED
            entry.handle = engine.start(task_of(entry, self.imports))
        self._record()

    def _follow(self, entry: Entry) -> None:
        """Sees how a run goes on, and what is to be done if it has ended."""
        assert entry.handle is not None
        ending = entry.handle.ending()
        if entry.state == QUEUED and entry.log_size() > entry.log_start:
            entry.state = RUNNING
        if entry.state != QUEUED:
            with contextlib.suppress(UserError):  # a damaged file is the run's trouble
                entry.news = look(entry.run.folder)
        if ending is None:
            return
        elsewhere, entry.handle = entry.state == ELSEWHERE, None
        if ending.code == 0 and is_finished(entry.run):
            entry.state, entry.reason = FINISHED, ""
            if not self.keep_checkpoints:
                RunFolder(entry.run.folder).clear_checkpoints()
        elif elsewhere:  # from now on this sweep's
            entry.state = WAITING
        else:
            entry.reason = reason_of(ending, entry.log, entry.log_start)
            again = entry.attempts <= self.retries and ending.code != MISTAKE
            entry.state = WAITING if again else FAILED
            self.view.failed(entry, again)
        if not elsewhere:
            entry.seconds += time.monotonic() - entry.began
        self._record()

    def _stop(self) -> None:
        """Stops what runs. A second Ctrl-C does not wait."""
        active = [entry for entry in self.entries if entry.handle is not None and entry.state != ELSEWHERE]
        handles = [entry.handle for entry in active if entry.handle is not None]
        if handles:
            self.view.say(f"Stopping {len(handles)} run{'s' * (len(handles) > 1)}; Ctrl-C again does not wait.")
        try:
            for handle in handles:
                handle.stop()
            until = time.monotonic() + GRACE
            while time.monotonic() < until and _still(handles):
                time.sleep(0.1)
        except KeyboardInterrupt:
            pass
        for handle in _still(handles):
            handle.kill()
        for entry in active:
            entry.handle = None
            entry.state = FINISHED if is_finished(entry.run) else INTERRUPTED

    def _remember(self) -> None:
        """What it took to finish runs before, as sweep.json has it. Never an error: it is only told."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            content = json.loads((self.plan.folder / STATES).read_text(encoding="utf-8"))
            known = {run["run"]: run for run in content["runs"]}
            for entry in self.entries:
                if entry.state == FINISHED and entry.run.key in known:
                    before = known[entry.run.key]
                    entry.attempts, entry.seconds = int(before["attempts"]), float(before["seconds"])

    def _record(self) -> None:
        counts = {state: sum(entry.state == state for entry in self.entries) for state in (FINISHED, FAILED)}
        content = {"schema": 1, "name": self.plan.name, "count": len(self.entries), **counts}
        write_json(self.plan.folder / STATES, {**content, "runs": [entry.as_json() for entry in self.entries]})


def _still(handles: Iterable[Handle]) -> list[Handle]:
    return [handle for handle in handles if handle.ending() is None]


def task_of(entry: Entry, imports: Sequence[Path] = ()) -> Task:
    """`mambacl train` with the run's options: it also continues the run."""
    given = [word for path in imports for word in ("--import", str(path.absolute()))]
    words = ("-m", "mambacl", "train", str((entry.run.folder / OPTIONS).absolute()), *given)
    return Task(entry.run.key, words, str(entry.log.absolute()), str(Path.cwd()))


def reason_of(ending: Ending, log: Path, start: int) -> str:
    """Why a task failed, in one line: the sentence of `mambacl train`, the last line of its output, or its signal."""
    if ending.words:
        return ending.words
    if ending.code < 0:
        name = signal.Signals(-ending.code).name
        return f"killed by {name}" + (", as when memory runs out" if name == "SIGKILL" else "")
    with contextlib.suppress(OSError):
        with open(log, "rb") as file:
            file.seek(start)
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        said = [line.removeprefix("mambacl: ") for line in lines if line.startswith("mambacl: ")]
        if said or lines:
            return (said or lines)[-1]
    return f"exit code {ending.code}, without a word"


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM, which batch systems send, ends a sweep as Ctrl-C does."""
    from mambacl.training.api import terminable  # late, because it imports PyTorch

    with terminable():
        yield
