"""How far the training has come, from 0 to 1, by epochs or by the clock; and the learning rate that follows from it."""

import math
from collections.abc import Callable
from typing import Protocol

LEAST = 1e-3  # factor of the learning rate in the first step


def lr_factor(progress: float, warmup: float, final: float) -> float:
    """Rises linearly to 1 until `warmup`, then falls as a cosine to `final`."""
    if progress < warmup:
        return max(LEAST, progress / warmup)
    along = min(1.0, (progress - warmup) / (1 - warmup))
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * along))


class Schedule(Protocol):
    def progress(self, epochs: float) -> float:
        """After this many epochs, which need not be a whole number; 1 ends the training."""
        ...

    def settled(self) -> None:
        """From now on steps take their usual time."""

    def spent(self) -> float:
        """Seconds, with those before a resume."""
        ...

    @property
    def deadline(self) -> Callable[[], float] | None:
        """The seconds left; None if they depend on the speed."""
        ...


class ByEpochs:
    deadline = None

    def __init__(self, epochs: int, clock: Callable[[], float], spent: float = 0.0) -> None:
        self.epochs, self._clock, self._began = epochs, clock, clock() - spent

    def progress(self, epochs: float) -> float:
        return min(1.0, epochs / self.epochs)

    def settled(self) -> None:
        """Makes no difference."""

    def spent(self) -> float:
        return self._clock() - self._began


class ByClock:
    """Ends `seconds` after the start, those before a resume included.

    The first steps compile kernels and can take as long as a thousand others. Progress stands still until `settled`,
    and the rest of the time is the rest of the schedule; otherwise there would be no warm-up.

    A GPU runs behind the program, so `wait` lets it catch up before the clock is read, in every `every`th call.
    """

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float],
        spent: float = 0.0,
        done: float = 0.0,
        every: int = 1,
        wait: Callable[[], object] = lambda: None,
    ) -> None:
        self._clock, self._began, self._end = clock, clock() - spent, clock() - spent + seconds
        self._now = self._end - seconds + spent
        self._done, self._settled_at, self._every, self._wait = done, math.inf, every, wait
        self._calls, self._read = 0, done

    def progress(self, epochs: float) -> float:
        if self._calls % self._every == 0:
            self._wait()
            self._now = self._clock()
            self._read = self._from(self._now)
        self._calls += 1
        return self._read

    def _from(self, now: float) -> float:
        if now >= self._end:
            return 1.0
        if now < self._settled_at:
            return self._done
        return self._done + (1 - self._done) * (now - self._settled_at) / (self._end - self._settled_at)

    def settled(self) -> None:
        self._wait()
        self._settled_at = self._clock()

    def spent(self) -> float:
        return self._clock() - self._began

    def deadline(self) -> float:
        """As of the last reading of the clock: on a GPU, another one would wait for it."""
        return max(0.0, self._end - self._now)
