"""The command watch."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mambacl.errors import UserError
from mambacl.options import Must

if TYPE_CHECKING:
    from mambacl.training.watching import News

Seconds = Annotated[float, "seconds between two looks", Must("be at least 0.1", lambda value: value >= 0.1)]


def watch(
    *runs: Annotated[Path, "a run folder; it may not exist yet"],
    every: Seconds = 1.0,
    once: Annotated[bool, "print the state now and end"] = False,
) -> int:
    """follow runs that train in other processes, until they end: `mambacl watch runs/demo-mamba-cl-0`

    Reads the run folders only, so it can run on any machine that sees them. Exits with 1 if a run did not finish.
    """
    from mambacl.training.watching import look

    if not runs:
        raise UserError("mambacl watch needs a run folder: give the folder that `mambacl train` names.")
    for run in runs:
        if run.is_file():
            raise UserError(f"{run} is a file: give the run folder, such as {run.parent}.")
    if once:
        news = [look(run) for run in runs]
        print("\n".join(_text(news)))
    else:
        news = _follow(runs, every)
    return int(any(one.over and one.status != "finished" for one in news))


def _text(news: list[News]) -> list[str]:
    """The lines of each run; those after the first are indented."""
    return [line for one in news for line in (one.lines()[0], *(f"  {line}" for line in one.lines()[1:]))]


def _follow(runs: tuple[Path, ...], every: float) -> list[News]:
    from mambacl.training.watching import look

    if not sys.stdout.isatty():
        return _follow_in_lines(runs, every)
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(), auto_refresh=False) as live:
        while True:
            news = [look(run) for run in runs]
            live.update(Text("\n".join(_text(news))), refresh=True)
            if all(one.over for one in news):
                return news
            time.sleep(every)


def _follow_in_lines(runs: tuple[Path, ...], every: float) -> list[News]:
    """For a pipe or a log: prints a run's lines when its status, task or epoch changes."""
    from mambacl.training.watching import look

    shown: dict[Path, object] = {}
    while True:
        news = [look(run) for run in runs]
        for one in news:
            now = (one.status, one.state.task, one.state.epoch, len(one.accuracies))
            if shown.get(one.path) != now:
                shown[one.path] = now
                print("\n".join(_text([one])), flush=True)
        if all(one.over for one in news):
            return news
        time.sleep(every)
