"""Tasks of Ray: on this machine, or on a cluster whose machines all see the working folder."""

import os
from pathlib import Path
from typing import Any

from mambacl.errors import UserError
from mambacl.sweeps.engines.base import Ending, Handle, Task, execute, first_line

UNLIMITED = 10**6  # Ray itself makes tasks wait for their turn


class RayTask:
    def __init__(self, ray: Any, reference: Any) -> None:
        self.ray, self.reference = ray, reference

    def ending(self) -> Ending | None:
        ready, _ = self.ray.wait([self.reference], timeout=0)
        if not ready:
            return None
        try:
            return Ending(self.ray.get(self.reference))
        except (self.ray.exceptions.RayError, KeyboardInterrupt) as error:  # its process was ended
            return Ending(1, f"Ray: {first_line(error)}")

    def stop(self) -> None:
        self.ray.cancel(self.reference, force=False)

    def kill(self) -> None:
        self.ray.cancel(self.reference, force=True)


class RayEngine:
    """`options` are those of `ray.remote`, such as num_gpus, and `address`, that of a cluster."""

    def __init__(self, jobs: int | None, options: dict[str, Any], on_cpu: bool) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        self.ray, self.slots = ray, jobs or UNLIMITED
        address = options.pop("address", None)
        self.own = not ray.is_initialized()
        if self.own:
            try:
                ray.init(address=address, log_to_driver=False, logging_level="ERROR")
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise UserError(f"Ray cannot be started or reached ({error}): check --ray address.") from None
        options.setdefault("num_cpus", 1)
        options.setdefault("num_gpus", 0 if on_cpu or not ray.cluster_resources().get("GPU") else 1)
        try:
            self.remote = ray.remote(max_retries=0, **options)(execute)
        except (TypeError, ValueError) as error:
            self.close()
            raise UserError(f"--ray: {error}") from None

    def start(self, task: Task) -> Handle:
        return RayTask(self.ray, self.remote.remote(task))

    def close(self) -> None:
        if self.own:
            self.ray.shutdown()


def open_engine(jobs: int | None, options: dict[str, Any], folder: Path, on_cpu: bool) -> RayEngine:
    return RayEngine(jobs, options, on_cpu)
