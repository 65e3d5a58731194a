"""What an engine does: it starts tasks, and says how each has ended. A task is a process, the same on every engine."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

GRACE = 60.0  # seconds that a run has to end by itself, e.g. to finish writing a checkpoint


@dataclass(frozen=True)
class Task:
    """A call of Python. It is sent to other machines, so paths are absolute."""

    name: str
    words: tuple[str, ...]
    """what follows the name of the program"""
    log: str
    """the file that gets all output, at its end"""
    folder: str
    """the working folder"""
    variables: Mapping[str, str] = field(default_factory=dict)
    """further environment variables"""


@dataclass(frozen=True)
class Ending:
    """How a task has ended."""

    code: int
    """exit code; negative after a signal"""
    words: str = ""
    """what the engine knows about it; empty if the log says it"""


class Handle(Protocol):
    """A task that was started."""

    def ending(self) -> Ending | None:
        """None as long as it runs, or waits for its turn."""

    def stop(self) -> None:
        """Asks it to end, as Ctrl-C does. Does not wait."""

    def kill(self) -> None:
        """Ends it at once."""


class Engine(Protocol):
    slots: int
    """tasks that can be started before one has ended"""

    def start(self, task: Task) -> Handle: ...

    def close(self) -> None:
        """Gives back what the engine holds. All tasks have ended."""


def launch(task: Task, variables: Mapping[str, str] | None = None) -> "subprocess.Popen[bytes]":
    """Starts the task here, in a session of its own, so that Ctrl-C reaches only the sweep, which then stops it."""
    Path(task.log).parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **task.variables, **(variables or {})}
    with open(task.log, "ab") as log:
        return subprocess.Popen(
            [sys.executable, *task.words], cwd=task.folder, env=environment, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def execute(task: Task) -> int:
    """Runs the task here and returns its exit code: what a process of Ray or of SLURM does."""
    process = launch(task)
    try:
        while process.poll() is None:  # Ray interrupts Python, but not a system call
            time.sleep(0.1)
        return process.returncode
    except BaseException:  # the engine ends this process
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        raise
    finally:
        kill_group(process)


def first_line(error: BaseException) -> str:
    """What an engine's library says, without its further lines."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Ends a task and the processes that it has started, at once."""
    if process.poll() is None:
        if hasattr(os, "killpg"):
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
