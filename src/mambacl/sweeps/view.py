"""Shows a sweep: a table on a terminal, lines elsewhere. What a run does comes from its folder, as in `watch`."""

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from mambacl.status import duration, hidden
from mambacl.sweeps.states import ELSEWHERE, FAILED, FINISHED, INTERRUPTED, NOT_STARTED, QUEUED, RUNNING, WAITING, Entry

ROOM = 8  # lines of a terminal that the table leaves free
FIRST = (RUNNING, ELSEWHERE, QUEUED, FAILED, WAITING, INTERRUPTED, NOT_STARTED, FINISHED)
"""which states are shown first if there is no room for all"""
COLORS = {RUNNING: "cyan", ELSEWHERE: "cyan", FAILED: "red", FINISHED: "green", QUEUED: "yellow"}


def cells(entry: Entry) -> tuple[str, str, str, str, str]:
    """A row: the run, its state, where it is, its accuracy, the time left."""
    news, shown = entry.news, entry.state
    place = accuracy = left = ""
    if news is not None and news.accuracies:
        accuracy = f"{news.metrics.get('final_accuracy_tasks', 0.0):.1%}"
    if news is not None and entry.state in (RUNNING, ELSEWHERE):
        other = "writing the report" if news.status == FINISHED else "starting"
        place = news.state.place() if news.status == "running" else other
        left = "" if news.state.left is None or news.status != "running" else duration(news.state.left)
    if entry.state == FAILED:
        place = entry.reason
    elif entry.attempts > 1 and entry.state != FINISHED:
        shown = f"{shown}, try {entry.attempts}"
    return entry.run.key, shown, place, accuracy, left


def summary(entries: Sequence[Entry], began: float) -> str:
    counts = {state: sum(entry.state == state for entry in entries) for state in (FINISHED, RUNNING, FAILED)}
    words = ", ".join(f"{count} {state}" for state, count in counts.items() if count or state == FINISHED)
    return f"{words} of {len(entries)} runs, {duration(time.monotonic() - began)}"


class View:
    """Lines on standard error, when a run begins, finishes a task or ends."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet, self.began = quiet, time.monotonic()
        self.shown: dict[str, object] = {}

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def say(self, words: str) -> None:
        if not self.quiet:
            print(words, file=sys.stderr, flush=True)

    def failed(self, entry: Entry, again: bool) -> None:
        self.say(f"{entry.run.key}: failed{', trying again' if again else ''}: {entry.reason}")

    def show(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            task = len(entry.news.accuracies) if entry.news is not None else 0
            now = (entry.state, entry.attempts, task)
            known = self.shown.get(entry.run.key)
            self.shown[entry.run.key] = now
            silent = entry.state in (WAITING, NOT_STARTED, INTERRUPTED, QUEUED, FAILED)
            if known == now or silent or (known is None and entry.state == FINISHED):
                continue
            _, state, place, accuracy, left = cells(entry)
            words = [state, place, f"accuracy {accuracy}" if accuracy else "", f"{left} left" if left else ""]
            self.say(f"{entry.run.key}: {', '.join(filter(None, words))}")


class LiveView(View):
    """A table that is drawn again and again."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.live import Live

        self.console = Console(stderr=True)
        self.live = Live(console=self.console, auto_refresh=False, transient=False)
        self.alone = ExitStack()

    def __enter__(self) -> None:
        self.alone.enter_context(hidden())
        self.live.start()

    def __exit__(self, *error: object) -> None:
        self.live.stop()
        self.alone.close()

    def say(self, words: str) -> None:
        self.console.print(words, markup=False, highlight=False)

    def show(self, entries: Sequence[Entry]) -> None:
        self.live.update(self.table(entries), refresh=True)

    def table(self, entries: Sequence[Entry]) -> Any:
        from rich.table import Table
        from rich.text import Text

        room = max(3, self.console.height - ROOM)
        order = sorted(range(len(entries)), key=lambda i: (FIRST.index(entries[i].state), i))
        chosen = sorted(order[:room])
        table = Table(box=None, pad_edge=False, caption=summary(entries, self.began), caption_justify="left")
        for title, side in (("run", "left"), ("state", "left"), ("", "left"), ("accuracy", "right"), ("left", "right")):
            table.add_column(title, justify=side, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
        for i in chosen:
            words = [Text(word) for word in cells(entries[i])]
            words[1].stylize(COLORS.get(entries[i].state, "dim"))
            table.add_row(*words)
        if len(chosen) < len(entries):
            table.add_row(f"... and {len(entries) - len(chosen)} more", "", "", "", "")
        return table


def make_view(quiet: bool = False) -> View:
    return LiveView() if sys.stderr.isatty() and not quiet else View(quiet)
