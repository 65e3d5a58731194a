"""Measures how long a call takes, and how fast this machine copies memory.

On a GPU, there are two times. `on_device`: how long the GPU works. Calls are queued behind a short sleep of the GPU, so
that Python has launched them before the first begins. `wall`: how long a caller waits for the result. On the CPU, both
are the same. Every time is the median of several repeats, after a warm-up that compiles kernels.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

MOST_CALLS = 20  # queued at once: a GPU's queue holds about a thousand launches
BATCH_SECONDS = 0.02  # short calls are timed in batches of about this length
CYCLES = 2e9  # approximate cycles of a GPU per second
LONGEST_SLEEP = 0.25  # calls that take longer to launch cannot be queued
ROW_SECONDS = 1.0  # at most, of calls in a row before waiting for them
FEWEST = 3  # repeats, even if they take long


@dataclass(frozen=True)
class Timing:
    seconds: float
    alone: float
    """seconds of a single call until its result is ready"""
    queued: bool
    """whether all calls waited for the GPU; if not, the GPU sometimes waited for Python"""


@dataclass(frozen=True)
class Clock:
    device: torch.device
    repeats: int = 15
    """maximum number of repeats"""
    budget: float = 1.5
    """approximate seconds per measurement; a slow call gets fewer repeats"""

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def once(self, call: Callable[[], object], calls: int = 1) -> float:
        """Seconds per call, for several calls in a row."""
        self.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        self.synchronize()
        return (time.perf_counter() - started) / calls

    def memory(self, call: Callable[[], object]) -> tuple[int, int]:
        """Bytes on the GPU before a call, and the most during it."""
        self.synchronize()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.once(call)
        return before, torch.cuda.max_memory_allocated(self.device)

    def wall(self, call: Callable[[], object]) -> float:
        self.once(call)
        first = self.once(call)
        return statistics.median([first, *(self.once(call) for _ in range(self.more(first)))])

    def in_turn(self, calls: Mapping[str, Callable[[], object]], most_in_a_row: int = 1) -> dict[str, float]:
        """Wall times of several calls. All are in every round, so that a busy moment affects all of them. Short ones
        run several times in a row before waiting for them."""
        for call in calls.values():
            self.once(call)
        first = {name: self.once(call) for name, call in calls.items()}
        in_a_row = max(1, min(most_in_a_row, int(ROW_SECONDS / max(first.values()))))
        rounds = 1 + self.more(in_a_row * sum(first.values()))
        times = [{name: self.once(call, in_a_row) for name, call in calls.items()} for _ in range(rounds)]
        return {name: statistics.median(each[name] for each in times) for name in calls}

    def on_device(self, call: Callable[[], object]) -> Timing:
        if self.device.type != "cuda":
            seconds = self.wall(call)
            return Timing(seconds, seconds, False)
        calls, sleep, alone = self._batch(call)
        batches = [self._queued(call, calls, sleep) for _ in range(1 + self.more(alone * calls + sleep))]
        return Timing(statistics.median(seconds for seconds, _ in batches), alone, all(ahead for _, ahead in batches))

    def in_rounds(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
        """Seconds per call in each round. All calls are in every round, so that a busy moment affects all of them. On a
        GPU it is the GPU's time, as in `on_device`."""
        plans = {name: self._batch(call) for name, call in calls.items()}
        rounds = 1 + self.more(sum(alone * count + sleep for count, sleep, alone in plans.values()))
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                count, sleep, _ = plans[name]
                on_gpu = self.device.type == "cuda"
                times[name].append(self._queued(call, count, sleep)[0] if on_gpu else self.once(call, count))
        return times

    def _batch(self, call: Callable[[], object]) -> tuple[int, float, float]:
        """How many calls to time at once (several if they are short), how long the GPU sleeps before them, and the
        seconds of a single call."""
        self.once(call)
        alone = statistics.median(self.once(call) for _ in range(FEWEST))
        calls = max(1, min(MOST_CALLS, int(BATCH_SECONDS / alone)))
        if self.device.type != "cuda":
            return calls, 0.0, alone
        started = time.perf_counter()
        call()
        launching = time.perf_counter() - started
        while calls > 1 and not self._queued(call, calls, _sleep(launching * calls))[1]:
            calls //= 2  # the launches have filled the queue
        return calls, _sleep(launching * calls), alone

    def _queued(self, call: Callable[[], object], calls: int, sleep: float) -> tuple[float, bool]:
        """Seconds per call by the GPU's clock, and whether all calls waited for the GPU."""
        self.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(self.device):
            torch.cuda._sleep(int(CYCLES * sleep))
            begin.record()
            for _ in range(calls):
                call()
            ahead = not begin.query()
            end.record()
        self.synchronize()
        return begin.elapsed_time(end) / 1e3 / calls, ahead

    def more(self, seconds: float) -> int:
        """The number of repeats after the first, if each takes `seconds`."""
        return max(FEWEST, min(self.repeats, int(self.budget / max(seconds, 1e-9)))) - 1


def _sleep(launching: float) -> float:
    """How long the GPU must sleep while launching takes `launching` seconds."""
    wanted = 1e-3 + 2 * launching
    return wanted if wanted <= LONGEST_SLEEP else 1e-3


def copy_speed(clock: Clock, size: int) -> float:
    """Bytes per second that a copy of this size reads and writes."""
    source = torch.zeros(max(1, size // 4), device=clock.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / clock.on_device(lambda: target.copy_(source)).seconds
