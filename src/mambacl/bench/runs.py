"""Part `run`: a complete run of Mamba-CL, from the files to the last evaluation. `mambacl bench precision`: whether a
lower precision costs more accuracy than seeds differ."""

import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mambacl.bench.result import Result, Row
from mambacl.bench.sizes import Sizes
from mambacl.bench.timing import Clock
from mambacl.config import RunConfig, resolve
from mambacl.options import merge
from mambacl.training.api import Run, train
from mambacl.training.folder import RunFolder
from mambacl.training.loop import PHASES

PACKAGED, CIFAR = "demo", "cifar100-10-nano"
NOTES = (
    "{preset} in {precision}: {tasks} tasks, {images} training images, passes: {passes}. rest: model, data, "
    "checkpoints, results. images per second: during training.",
)
GPU_NOTE = "A short run before it compiled the kernels."
SHORT: dict[str, Any] = {"stream": {"tasks": 2, "train_per_class": 50}, "training": {"passes": 1}}
PRECISIONS = ("float32", "tf32", "bf16")
PRECISION_NOTES = (
    "One run per precision and seed; finished runs in the folder are not trained again, an interrupted one is "
    "continued. train s: may include compiling kernels.",
)


def configuration(
    sizes: Sizes, root: Path | None, device: str, folder: Path, changes: Mapping[str, Any] | None = None
) -> RunConfig:
    """The configuration: CIFAR-100 if `root` has its files, else the packaged images."""
    fixed = {"method": "mamba-cl", "device": device, "out": str(folder)}
    overrides = merge(merge(sizes.run, fixed), changes or {})
    if root is None:
        return resolve(PACKAGED, overrides)
    return resolve(CIFAR, merge(overrides, {"stream": {"root": str(root)}}))


def measure(clock: Clock, sizes: Sizes, root: Path | None = None) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        if clock.device.type == "cuda":
            train(configuration(sizes, root, str(clock.device), Path(folder) / "short", SHORT))
        config = configuration(sizes, root, str(clock.device), Path(folder) / "run")
        started = time.perf_counter()
        run = train(config)
        seconds = time.perf_counter() - started
        trained = sum(RunFolder(run.folder).stream()["train"])  # images of all tasks
    phases = run.results["seconds"]
    row: Row = {"preset": config.name, "seconds": seconds}
    row |= {f"{phase}_s": phases[phase] for phase in PHASES}
    row["rest_s"] = seconds - sum(phases[phase] for phase in PHASES)
    row["images_per_second"] = run.results["images_per_second"]
    row["final_accuracy_per_cent"] = 100 * run.metrics["final_accuracy_tasks"]
    tasks, passes = len(run.results["tasks"]), config.training.passes
    words = {"preset": config.name, "precision": config.precision, "tasks": tasks, "passes": passes, "images": trained}
    notes = [note.format(**words) for note in NOTES]
    notes += [GPU_NOTE] if clock.device.type == "cuda" else []
    return Result(f"A complete run on {clock.device.type}", [row], notes)


def compare_precisions(
    preset: str | Mapping[str, Any], root: Path | None, out: Path, seeds: int, device: str
) -> Result:
    """Trains a preset by Mamba-CL with each precision and seed. `root` has the data set's files."""
    changes: dict[str, Any] = {"method": "mamba-cl", "device": device} | (
        {} if root is None else {"stream": {"root": str(root)}}
    )
    found: dict[str, list[Run]] = {name: [] for name in PRECISIONS}
    for seed in range(seeds):
        for name, runs in found.items():
            runs.append(train(preset, seed=seed, precision=name, out=str(out / f"{name}-{seed}"), **changes))
    result = Result("Accuracy by precision", notes=list(PRECISION_NOTES))
    for name, runs in found.items():
        figures = {
            "accuracy, %": [100 * run.metrics["final_accuracy_images"] for run in runs],
            "forgetting, %": [100 * run.metrics["forgetting"] for run in runs],
            "train s": [run.results["seconds"]["train"] for run in runs],
        }
        for words, values in figures.items():
            row: Row = {"precision": name, "figure": words}
            row |= {f"seed_{seed}": value for seed, value in enumerate(values)}
            row |= {"mean": statistics.mean(values), "deviation": statistics.stdev(values) if seeds > 1 else None}
            result.rows.append(row)
    return result
