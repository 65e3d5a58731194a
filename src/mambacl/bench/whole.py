"""Part `run`: a whole run of Mamba-CL, from the files to the last evaluation."""

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mambacl.bench.result import Result, Row
from mambacl.bench.sizes import Sizes
from mambacl.bench.timing import Clock
from mambacl.config import RunConfig, resolve
from mambacl.training.api import train
from mambacl.training.folder import RunFolder
from mambacl.training.loop import PHASES

PACKAGED, CIFAR = "demo", "cifar100-10-nano"
NOTES = (
    "{preset} in {precision}: {tasks} tasks, {images} training images, passes: {passes}. rest: model, data, "
    "checkpoints, results. images a second: while training.",
)
GPU_NOTE = "A short run went before it, in which kernels were compiled."
SHORT: dict[str, Any] = {"stream": {"tasks": 2, "train_per_class": 50}, "training": {"passes": 1}}


def configuration(
    sizes: Sizes, root: Path | None, device: str, folder: Path, changes: Mapping[str, Any] | None = None
) -> RunConfig:
    """CIFAR-100 where its files are given, else the images in the package."""
    overrides: dict[str, Any] = {**sizes.run, "device": device, "out": str(folder)}
    for group, values in (changes or {}).items():
        overrides[group] = {**overrides.get(group, {}), **values}
    if root is None:
        return resolve(PACKAGED, overrides)
    return resolve(CIFAR, {**overrides, "stream": {**overrides.get("stream", {}), "root": str(root)}})


def measure(clock: Clock, sizes: Sizes, root: Path | None = None) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        if clock.device.type == "cuda":
            train(configuration(sizes, root, str(clock.device), Path(folder) / "short", SHORT))
        config = configuration(sizes, root, str(clock.device), Path(folder) / "run")
        started = time.perf_counter()
        run = train(config)
        seconds = time.perf_counter() - started
        trained = _images(run.folder)
    phases = run.results["seconds"]
    row: Row = {"preset": config.name, "seconds": seconds}
    row |= {f"{phase}_s": phases[phase] for phase in PHASES}
    row["rest_s"] = seconds - sum(phases[phase] for phase in PHASES)
    row["images_a_second"] = run.results["images_per_second"]
    row["final_accuracy_per_cent"] = 100 * run.metrics["final_accuracy_tasks"]
    words = {
        "preset": config.name,
        "precision": config.precision,
        "tasks": len(run.results["tasks"]),
        "passes": config.training.passes,
    }
    notes = [note.format(**words, images=trained) for note in NOTES]
    notes += [GPU_NOTE] if clock.device.type == "cuda" else []
    return Result(f"A whole run on {clock.device.type}", [row], notes)


def _images(folder: Path) -> int:
    """Training images of all tasks."""
    return sum(RunFolder(folder).stream()["train"])
