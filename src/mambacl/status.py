"""One temporary line on a terminal while the user waits: what is being done, for how long, and the time left.

Nothing is shown elsewhere, such as in a log file. A thread draws the line, so that time passes while a single call
computes.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
ERASE = "\r\x1b[2K"
AFTER = 2.0  # seconds until the time is shown: before, nobody wonders
EVERY = 0.2  # seconds between two drawings

_lock = threading.RLock()
_texts: list[Callable[[], str]] = []  # the last one is shown
_drawn = False


@contextmanager
def status(words: str) -> Iterator[None]:
    """Shows these words while the work inside is done; after a moment also for how long."""
    began = time.monotonic()

    def text() -> str:
        passed = time.monotonic() - began
        return f"{words} ... {duration(passed)}" if passed > AFTER else f"{words} ..."

    with _shown(text):
        yield


def counted(items: Iterable[T], total: int, noun: str = "images") -> Iterator[T]:
    """The same items. Shows how many are done, and the time left, if it takes more than a moment. 0 is an unknown
    total."""
    began, done = time.monotonic(), 0

    def text() -> str:
        passed = time.monotonic() - began
        if passed <= AFTER or not done:
            return ""
        if not total:
            return f"{done} {noun}, {duration(passed)}"
        return f"{done} of {total} {noun}, {duration(passed / done * max(0, total - done))} left"

    with _shown(text):
        for item in items:
            yield item
            done += 1


@contextmanager
def working(first: str, then: str) -> Iterator[Callable[[Iterable[Any], int], Iterator[Any]]]:
    """Shows `first` until images pass through the function that it returns, which counts them, and `then` after
    them."""
    with ExitStack() as shown:
        shown.enter_context(status(first))

        def show(items: Iterable[Any], total: int) -> Iterator[Any]:
            shown.close()
            yield from counted(items, total)
            shown.enter_context(status(then))

        yield show


@contextmanager
def hidden() -> Iterator[None]:
    """Leaves the terminal to somebody else, such as a bar."""
    with _shown(lambda: ""):
        yield


def erase() -> None:
    """Removes the line, before something else is printed. It comes back at the next drawing."""
    global _drawn
    with _lock:
        if _drawn:
            print(ERASE, end="", file=sys.stderr, flush=True)
            _drawn = False


def draw() -> None:
    global _drawn
    with _lock:
        text = _texts[-1]() if _texts else ""
        if not text:
            return erase()
        print(ERASE + text, end="", file=sys.stderr, flush=True)
        _drawn = True


def duration(seconds: float) -> str:
    """As in 0:42, 12:05 or 3:07:00."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def _shown(text: Callable[[], str]) -> Iterator[None]:
    if not (sys.stderr.isatty() and logging.getLogger("mambacl").isEnabledFor(logging.INFO)):
        yield
        return
    with _lock:
        _texts.append(text)
        if len(_texts) == 1:
            threading.Thread(target=_keep_drawing, args=(_texts[0],), name="status", daemon=True).start()
    draw()
    try:
        yield
    finally:
        with _lock:
            _texts.remove(text)
        draw()


def _keep_drawing(first: Callable[[], str]) -> None:
    """As long as the first text is there: the next first one has its own thread."""
    while True:
        time.sleep(EVERY)
        with _lock:
            if not _texts or _texts[0] is not first:
                return
            draw()
