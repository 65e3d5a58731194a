"""Sweeps of small runs, in this process or in their own."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from small_run import CONFIG

from mambacl.cli import main
from mambacl.sweeps.engines.base import Ending, Task

QUICK: dict[str, Any] = {  # the smallest run whose accuracy is not chance
    **CONFIG,
    "method": "analytic",
    "device": "cpu",
    "for_method": {"analytic": {"classifier_options": {"width": 20}}},
    "stream": {"tasks": [5, 5], "train_per_class": 8, "transforms": {"image_size": 16}},
    "training": {"passes": 1, "batch_size": 8, "lr": 5e-3, "head_lr": 5e-2},
}

FLAKY = """
import os, signal
from pathlib import Path
from mambacl.methods.registry import METHODS
from mambacl.methods.sequential import Sequential

MARK = Path(__file__).with_suffix(".mark")

class Flaky(Sequential):
    name = "flaky"
    summary = "fails in its second task, HOW_OFTEN times"

    def finish_task(self, batches):
        with open(MARK, "a") as file:
            file.write("x")
        if 2 <= len(MARK.read_text()) < 2 + HOW_OFTEN:
            HOW
        return super().finish_task(batches)

METHODS.add(Flaky.name, Flaky)
"""
KILL, RAISE = "os.kill(os.getpid(), signal.SIGKILL)", 'raise RuntimeError("the disk has gone")'


def flaky(folder: Path, how: str, how_often: int, name: str = "flaky_method") -> Path:
    """A file with the method `flaky`, which fails in its second task as often as said."""
    path = folder / f"{name}.py"
    path.write_text(FLAKY.replace("HOW_OFTEN", str(how_often)).replace("HOW\n", f"{how}\n"))
    return path


def write_sweep(folder: Path, **content: Any) -> Path:
    """small.yaml, the smallest preset, and a sweep of it."""
    (folder / "small.yaml").write_text(yaml.safe_dump(QUICK))
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({"name": "few", "presets": ["small.yaml"], **content}, sort_keys=False))
    return path


@dataclass
class Done:
    code: int

    def ending(self) -> Ending:
        return Ending(self.code)

    def stop(self) -> None: ...

    def kill(self) -> None: ...


class InProcess:
    """An engine that trains each run in this process when it starts it: no seconds to load PyTorch."""

    slots = 1

    def __init__(self) -> None:
        self.started: list[str] = []

    def start(self, task: Task) -> Done:
        self.started.append(task.name)
        Path(task.log).parent.mkdir(parents=True, exist_ok=True)
        with open(task.log, "a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            return Done(main(task.words[2:]))

    def close(self) -> None: ...
