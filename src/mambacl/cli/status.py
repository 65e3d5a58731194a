"""Shows a temporary line on a terminal while the user waits. Prints nothing elsewhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

ERASE = "\r\x1b[2K"


@contextmanager
def status(words: str) -> Iterator[None]:
    live = sys.stderr.isatty()
    if live:
        print(f"{ERASE}{words} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if live:
            print(ERASE, end="", file=sys.stderr, flush=True)
