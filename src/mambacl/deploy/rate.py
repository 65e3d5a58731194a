"""Limits the requests per second of each client, also over several processes.

The generic cell rate algorithm: one number per client, the time at which its next request is due. A client may be ahead
of it by a second, so short bursts pass.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where workers count on their own
    fcntl = None  # type: ignore[assignment]

SLOTS = 1 << 16  # clients; the few that share a slot share their rate
TIME = struct.Struct("d")


class RateLimit:
    """`file`: where processes share their counts; None if there is only one. Times are seconds of a clock that these
    processes share, such as `time.monotonic`."""

    def __init__(self, rate: float, file: str | Path | None = None) -> None:
        self.interval = 1 / rate
        self.ahead = (max(1, math.floor(rate)) - 1) * self.interval
        self._thread = threading.Lock()
        self._file = None
        if file is None:
            self._times = mmap.mmap(-1, SLOTS * TIME.size)
            return
        self._file = open(file, "r+b")  # noqa: SIM115 - held as long as the server runs
        self._times = mmap.mmap(self._file.fileno(), SLOTS * TIME.size)

    @staticmethod
    def make_file(file: str | Path) -> None:
        Path(file).write_bytes(bytes(SLOTS * TIME.size))

    def wait(self, client: str, now: float) -> float:
        """Counts a request. Returns 0 if it is within the rate; otherwise the seconds after which the next one is, and
        this one does not count."""
        place = int.from_bytes(hashlib.blake2b(client.encode(), digest_size=4).digest(), "big") % SLOTS * TIME.size
        with self._locked():
            due = max(TIME.unpack_from(self._times, place)[0], now)
            if due - now > self.ahead + 1e-9:
                return due - now - self.ahead
            TIME.pack_into(self._times, place, due + self.interval)
        return 0.0

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._thread:
            if self._file is None or fcntl is None:
                yield
                return
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        self._times.close()
        if self._file is not None:
            self._file.close()
