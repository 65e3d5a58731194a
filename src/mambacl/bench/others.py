"""How much of the machine other programs use, to know which times to trust."""

import time
from pathlib import Path

STAT = Path("/proc/stat")
TICKS = 100  # per second, in this file
IDLE = (3, 4)  # idle, and waiting for a disk
COUNTED = 8  # the fields after these are parts of earlier ones


class Others:
    """`cores()` says how many cores other programs have used since the last call; None if the system does not tell."""

    def __init__(self) -> None:
        self._before = self._now()

    def cores(self) -> float | None:
        before, self._before = self._before, self._now()
        (started, busy_before, own_before), (ended, busy, own) = before, self._before
        if busy is None or busy_before is None or ended == started:
            return None
        return max(0.0, (busy - busy_before) - (own - own_before)) / (ended - started)

    @staticmethod
    def _now() -> tuple[float, float | None, float]:
        """Seconds: on the clock, of all cores at work, and of this process."""
        try:
            fields = [int(word) for word in STAT.read_text(encoding="ascii").split("\n", 1)[0].split()[1 : COUNTED + 1]]
        except (OSError, ValueError):  # not on Linux
            return time.perf_counter(), None, 0.0
        busy = sum(ticks for place, ticks in enumerate(fields) if place not in IDLE) / TICKS
        return time.perf_counter(), busy, time.process_time()
