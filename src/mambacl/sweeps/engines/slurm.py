"""Jobs of SLURM, through submitit: all machines must see the working folder."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mambacl.errors import UserError
from mambacl.sweeps.engines.base import Ending, Handle, Task, execute, first_line

JOBS = ".jobs"  # submitit's files, in the sweep's folder
UNLIMITED = 10**6  # SLURM itself makes jobs wait for their turn
DAY = 24 * 60
COMMON = ("name", "timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node")
"""what submitit calls the same on every cluster; it puts the cluster's name before other options"""


class Job:
    def __init__(self, job: Any) -> None:
        self.job = job

    def ending(self) -> Ending | None:
        if not self.job.done():
            return None
        try:
            return Ending(self.job.result())
        except Exception as error:  # of submitit, or of the job's process
            return Ending(1, f"job {self.job.job_id}, {self.job.state}: {first_line(error)}")

    def stop(self) -> None:
        self.job.cancel(check=False)  # SLURM itself ends what does not end in time

    kill = stop


@dataclass(frozen=True)
class Refused:
    """A job that could not be submitted."""

    how: Ending

    def ending(self) -> Ending:
        return self.how

    def stop(self) -> None:
        """It does not run."""

    kill = stop


class Slurm:
    """`options` are submitit's and SLURM's, such as partition, timeout_min and gpus_per_node. `cluster: local` is
    submitit's own executor, which needs no SLURM."""

    def __init__(self, jobs: int | None, options: dict[str, Any], folder: Path, on_cpu: bool) -> None:
        import submitit

        cluster = options.pop("cluster", "slurm")
        if cluster == "slurm" and shutil.which("sbatch") is None:
            raise UserError(
                "There is no SLURM on this machine (no sbatch): start the sweep where there is, or use --engine local."
            )
        self.slots = jobs or (1 if cluster == "local" else UNLIMITED)
        defaults: dict[str, Any] = {"timeout_min": DAY, "gpus_per_node": 0 if on_cpu else 1, "name": "mambacl"}
        named = {name if name in COMMON else f"{cluster}_{name}": value for name, value in options.items()}
        try:
            self.executor = submitit.AutoExecutor(folder=folder / JOBS, cluster=cluster)
            self.executor.update_parameters(**{**defaults, **named})
        except (AssertionError, NameError, ValueError) as error:
            raise UserError(f"--slurm: {first_line(error)}") from None

    def start(self, task: Task) -> Handle:
        try:
            return Job(self.executor.submit(execute, task))
        except Exception as error:  # SLURM has refused it; maybe only for now
            return Refused(Ending(1, f"the job was refused: {first_line(error)}"))

    def close(self) -> None: ...


def open_engine(jobs: int | None, options: dict[str, Any], folder: Path, on_cpu: bool) -> Slurm:
    return Slurm(jobs, options, folder, on_cpu)
