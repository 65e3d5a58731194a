"""Processes on this machine: one per GPU, or a few that share the cores."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mambacl.sweeps.engines.base import Ending, Handle, Task, kill_group, launch


@dataclass
class Process:
    """A task on this machine, and the place that it takes."""

    process: "subprocess.Popen[bytes]"
    place: int
    free: set[int] = field(repr=False)
    """places without a task"""

    def ending(self) -> Ending | None:
        code = self.process.poll()
        if code is None:
            return None
        self.free.add(self.place)
        return Ending(code)

    def stop(self) -> None:
        self.process.terminate()

    def kill(self) -> None:
        kill_group(self.process)


class Local:
    """`gpus`: what CUDA_VISIBLE_DEVICES calls those that tasks can have; none for tasks on the CPU. With more slots
    than GPUs, tasks share them."""

    def __init__(self, slots: int, gpus: Sequence[str], cores: int) -> None:
        self.slots, self.gpus, self.cores = slots, gpus, cores
        self.free = set(range(slots))

    def start(self, task: Task) -> Handle:
        place = min(self.free)
        self.free.remove(place)
        return Process(launch(task, self.variables(place)), place, self.free)

    def variables(self, place: int) -> dict[str, str]:
        """The environment of the task in this place: its GPU, and its share of the cores."""
        found = {"CUDA_VISIBLE_DEVICES": self.gpus[place % len(self.gpus)]} if self.gpus else {}
        if self.slots > 1 and "OMP_NUM_THREADS" not in os.environ:
            found["OMP_NUM_THREADS"] = str(max(1, self.cores // self.slots))
        return found

    def close(self) -> None: ...


def open_engine(jobs: int | None, options: dict[str, Any], folder: Path, on_cpu: bool) -> Local:
    gpus = [] if on_cpu else visible_gpus()
    return Local(jobs or len(gpus) or 1, gpus, cores())


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, by the names in CUDA_VISIBLE_DEVICES if it is set."""
    import torch

    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(number) for number in range(count)]
