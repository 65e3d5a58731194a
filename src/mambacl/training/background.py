"""Writes files in the background: flushing to disk is slow, and a GPU need not wait for it."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """Does one job at a time in a thread; the next job waits for it. The next call raises the error of a failed job.

    If `on` is false, jobs run in the calling thread.
    """

    def __init__(self, on: bool) -> None:
        self.on = on
        self._pending: Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None

    def do(self, job: Callable[[], None]) -> None:
        self.wait()
        if not self.on:
            job()
            return
        self._thread = self._thread or ThreadPoolExecutor(1, "mambacl-writer")
        self._pending = self._thread.submit(job)

    @property
    def busy(self) -> bool:
        """Whether a job is still running."""
        return self._pending is not None and not self._pending.done()

    def wait(self) -> None:
        """Waits for the running job."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
