"""Shows how far a command has come."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from mambacl.cli.training import ERASE

PROGRESS_AFTER = 2.0  # seconds


def with_progress(items: Iterable[Any], total: int) -> Iterator[Any]:
    """Shows on a terminal how many images are done, and the time left, if it takes more than a moment."""
    started = time.perf_counter()
    shown = started
    live = sys.stderr.isatty()
    for done, item in enumerate(items):
        now = time.perf_counter()
        if live and now - started > PROGRESS_AFTER and now - shown > 0.2:
            left = (now - started) / max(1, done) * (total - done)
            print(f"{ERASE}{done} of {total} images, {left:.0f} s left", end="", file=sys.stderr, flush=True)
            shown = now
        yield item
    if shown != started:
        print(ERASE, end="", file=sys.stderr, flush=True)
