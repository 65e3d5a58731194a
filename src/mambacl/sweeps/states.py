"""The runs of a sweep with their states: what their folders hold, and how far they have come."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mambacl.config import RunConfig
from mambacl.errors import UserError
from mambacl.sweeps.engines.base import Handle
from mambacl.sweeps.plan import PlannedRun
from mambacl.training.folder import RunFolder
from mambacl.training.identity import differences
from mambacl.training.watching import News

FINISHED, INTERRUPTED, NOT_STARTED = "finished", "interrupted", "not started"  # of a folder
WAITING, QUEUED, RUNNING, ELSEWHERE, FAILED = "waiting", "queued", "running", "running elsewhere", "failed"
LOG = "train.log"  # in a run's folder: what its processes print


def state_of(config: RunConfig, same_root: bool = True) -> str:
    """finished, interrupted, not started, or what is wrong with the folder. Without `same_root`, also accepts runs
    whose data were in another folder, as on another machine."""
    folder = RunFolder(config.folder)
    if not folder.exists():
        return NOT_STARTED
    differing = [key for key in differences(folder.config(), config) if same_root or key != "stream.root"]
    if differing:
        return f"another run (differs in {', '.join(differing[:4])})"
    return FINISHED if folder.finished() else INTERRUPTED


def is_finished(run: PlannedRun) -> bool:
    with suppress(UserError):  # damaged files are no end
        return RunFolder(run.folder).finished()
    return False


def is_busy(run: PlannedRun) -> bool:
    """Whether another process trains the run now. Takes the run's lock for a moment, so ask only before starting it."""
    folder = RunFolder(run.folder)
    if not folder.exists():
        return False
    try:
        with folder.locked():
            return False
    except UserError:
        return True


@dataclass
class Entry:
    """A run, and how far it has come."""

    run: PlannedRun
    state: str
    attempts: int = 0
    reason: str = ""
    """why it failed"""
    seconds: float = 0.0
    """of all attempts"""
    news: News | None = None
    handle: Handle | None = field(default=None, repr=False)
    began: float = 0.0
    log_start: int = 0
    """where the latest attempt begins in the log"""

    @property
    def log(self) -> Path:
        return self.run.folder / LOG

    @property
    def open(self) -> bool:
        """Whether there is something left to do."""
        return self.state not in (FINISHED, FAILED)

    def log_size(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def as_json(self) -> dict[str, object]:
        found: dict[str, object] = {"run": self.run.key, "state": self.state, "attempts": self.attempts}
        found["seconds"] = round(self.seconds, 1)
        return found | ({"reason": self.reason, "log": str(self.log)} if self.reason else {})


def entries_of(runs: Sequence[PlannedRun]) -> list[Entry]:
    """The runs with what their folders hold. Refuses a folder with another run."""
    found = []
    for run in runs:
        state = state_of(run.config)
        if state not in (FINISHED, INTERRUPTED, NOT_STARTED):
            raise UserError(f"{run.folder} holds {state}: choose another --out, or remove that folder.")
        found.append(Entry(run, state))
    return found
