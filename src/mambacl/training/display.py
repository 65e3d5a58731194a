"""Shows a run's progress: a bar on a terminal, a few lines in a log file, and `progress.json` for `mambacl watch`."""

import dataclasses
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from mambacl.log import logger
from mambacl.status import duration, hidden
from mambacl.training.progress import Progress, State, View

if TYPE_CHECKING:
    from mambacl.training.folder import RunFolder

FIRST, LATER = 10.0, 60.0  # seconds without a line in a log file before one about the work under way
WRITTEN = 1.0  # seconds between two versions of progress.json


class Lines:
    """Lines through the logger: one per epoch and task, and now and then one within a long epoch or phase."""

    def __init__(self, title: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.title, self.clock, self.wait = title, clock, FIRST
        self.last = clock()

    def show(self, state: State) -> None:
        if self.clock() - self.last < self.wait:
            return
        self.wait = LATER
        left = "" if state.left is None else f"{duration(state.left)} left"
        self.line("  ".join(filter(None, (state.place(), state.figures(), left))), task=False)

    def line(self, text: str, task: bool) -> None:
        self.last = self.clock()
        logger.info("%s: %s", self.title, text)

    def close(self) -> None:
        """Nothing stays open."""


class Live:
    """One bar over the whole run, with a line above it for each finished task."""

    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, ProgressColumn, TextColumn
        from rich.progress import Progress as Bars
        from rich.text import Text

        self.title, self.share, self.state, self.at = title, 0.0, State(), time.monotonic()
        times = self.times

        class Times(ProgressColumn):
            def render(self, task: object) -> Text:
                return Text(times())

        console = Console(stderr=True)
        self.wide = 20 if console.width > 100 else 8
        self.bars = Bars(
            TextColumn("{task.fields[title]}", markup=False),
            BarColumn(bar_width=self.wide),
            TextColumn("{task.percentage:3.0f}%"),
            Times(),
            TextColumn("{task.description}", markup=False),
            console=console,
        )
        self.bar = self.bars.add_task("", total=1.0, title=title)
        self.alone = ExitStack()
        self.alone.enter_context(hidden())
        self.bars.start()

    def show(self, state: State) -> None:
        self.share = max(self.share, state.share())  # an estimate that grows must not move the bar back
        self.state, self.at = dataclasses.replace(state), time.monotonic()
        words = f"{state.place()} {state.figures()}".strip()
        columns = (self.title, " " * self.wide, "100%", self.times(), "")
        room = max(0, self.bars.console.width - len(" ".join(columns)) - 1)  # rich would break the line
        self.bars.update(self.bar, completed=self.share, description=words[:room])

    def times(self) -> str:
        """Time passes while a single call computes, too."""
        since = time.monotonic() - self.at
        left = "" if self.state.left is None else f", {duration(self.state.left - since)} left"
        return duration(self.state.elapsed + since) + left

    def line(self, text: str, task: bool) -> None:
        if task:
            self.bars.console.print(f"{self.title}: {text}", markup=False, highlight=False)

    def close(self) -> None:
        self.bars.stop()
        self.alone.close()


class ProgressFile:
    """Replaces `progress.json` at most once per second. If it cannot be written, the run goes on without it."""

    def __init__(self, write: Callable[[Mapping[str, Any]], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.write, self.clock, self.last = write, clock, -WRITTEN

    def show(self, state: State) -> None:
        if self.clock() - self.last < WRITTEN:
            return
        self.last = self.clock()
        notes = {"pid": os.getpid(), "host": platform.node(), "time": time.time()}
        with suppress(OSError):
            self.write({**dataclasses.asdict(state), "notes": notes})

    def line(self, text: str, task: bool) -> None:
        """metrics.jsonl has it."""

    def close(self) -> None:
        """Nothing stays open."""


def make_view(title: str) -> View | None:
    """A bar on a terminal, lines elsewhere; None if the log is set to warnings only."""
    if not logger.isEnabledFor(logging.INFO):
        return None
    return Live(title) if sys.stderr.isatty() else Lines(title)


def show(progress: Progress, folder: "RunFolder | None" = None) -> Progress:
    """Opens the views of a run that begins now; `folder` gets its progress.json."""
    view = make_view(progress.state.title)
    progress.views = [] if view is None else [view]
    if folder is not None:
        progress.views.append(ProgressFile(folder.write_progress))
    progress.began = progress.since = progress.clock()
    progress.phase("", "starting")
    return progress
