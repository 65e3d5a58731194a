"""Where the wall time of a run goes, from the start of its process to its report.

`results.json` has seconds per phase: the phases of the work itself (`loop.PHASES`, and those a method adds) and those
`AROUND` it. They add up to the wall time of all processes that worked on the run.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

AROUND: dict[str, str] = {
    "start": "from the start of the process: Python, imports, the configuration",
    "data": "opening, checking and reading the images",
    "model": "building the model and loading its weights",
    "checkpoints": "waiting for checkpoints to be written",
    "audit": "keeping images for the audit, and the audit itself",
    "report": "writing the report",
    "other": "everything else",
}

_process_began: float | None = None  # set in a process for a single command, until a run has counted it


def count_from_process_start() -> None:
    """For commands: the first run also counts the time before it."""
    global _process_began
    _process_began = time.perf_counter() - _age()


def _age() -> float:
    """Seconds since this process began; 0 if unknown."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # seconds after boot
        return max(0.0, float(Path("/proc/uptime").read_text().split()[0]) - began)
    return 0.0


class Watch:
    """Counts the seconds that a process works on a run, by phase."""

    def __init__(self) -> None:
        global _process_began
        now = time.perf_counter()
        self.began, _process_began = now if _process_began is None else _process_began, None
        self.seconds = {"start": now - self.began}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - started)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def total(self) -> float:
        return time.perf_counter() - self.began


def with_other(seconds: dict[str, float], total: float) -> dict[str, float]:
    """The same seconds, with `other` set so that they add up to the total."""
    known = {name: value for name, value in seconds.items() if name != "other"}
    return {**known, "other": max(0.0, total - sum(known.values()))}
