"""Shows a run's progress: a live bar on a terminal, plain lines elsewhere."""

import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mambacl.log import logger


class Display:
    """Plain lines through the logger: one per epoch, one per task."""

    def __init__(self, title: str, steps: int, done: int) -> None:
        self.title = title

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the display."""

    def step(self) -> None:
        """A training batch is done."""

    def phase(self, text: str) -> None:
        """A new phase begins."""

    def epoch(self, text: str) -> None:
        """An epoch, or a task, is done."""
        logger.info("%s: %s", self.title, text)

    task = epoch


class LiveDisplay(Display):
    """One bar over all tasks, with a line above it for each finished task."""

    def __init__(self, title: str, steps: int, done: int) -> None:
        super().__init__(title, steps, done)
        self.progress = Progress(
            TextColumn("{task.fields[title]}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=Console(stderr=True),
        )
        self.bar = self.progress.add_task("", total=steps, completed=done, title=title)

    def __enter__(self) -> "LiveDisplay":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def step(self) -> None:
        self.progress.advance(self.bar)

    def phase(self, text: str) -> None:
        self.progress.update(self.bar, description=text)

    epoch = phase

    def task(self, text: str) -> None:
        self.progress.console.print(f"{self.title}: {text}", markup=False, highlight=False)


def make_display(title: str, steps: int, done: int) -> Display:
    return (LiveDisplay if sys.stderr.isatty() else Display)(title, steps, done)
