"""`mambacl bench`: measures the speed of this machine, part by part, with ratios computed within one run."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mambacl.bench import network, nullspace, roofline, runs, scan
from mambacl.bench.options import check_writable, shape_named
from mambacl.bench.result import Result, machine_line, record, save, text
from mambacl.bench.shapes import SHAPES
from mambacl.bench.sizes import Sizes, default_sizes
from mambacl.bench.timing import Clock, copy_speed
from mambacl.errors import UserError
from mambacl.log import logger
from mambacl.registry import did_you_mean
from mambacl.training.build import pick_device

__all__ = ["PARTS", "SHAPES", "Result", "bench", "measure"]

PARTS = {
    "scan": "the recurrence alone, forward and backward, by each backend",
    "roofline": "the least work of a scan, and how much longer the scan takes",
    "block": "one block, forward and backward, with and without the kernels",
    "step": "a training step: plain fine-tuning and Mamba-CL",
    "projection": "projecting a step, compared with a loop over dense matrices",
    "decomposition": "decomposing after a task, compared with an SVD per parameter",
    "inference": "predicting one image at a time, and many",
    "run": "a complete run, from the files to the last evaluation",
}


def bench(
    parts: Sequence[str] = (),
    device: str = "auto",
    json_file: Path | None = None,
    shapes: Sequence[str] = (),
    quick: bool = False,
    root: Path | None = None,
    show: Callable[[str], object] | None = None,
) -> dict[str, Any]:
    """Measures the named parts, or all; shows each table when it is done. Returns the contents of the JSON file.

    `shapes`: scans by name, instead of those that suit the device; `root`: CIFAR-100's files, for the part run.
    """
    show = show or partial(print, flush=True)
    chosen = chosen_parts(parts)
    where, sizes = checked(chosen, device, shapes, quick, root)
    check_writable(json_file)
    options = {
        "parts": chosen,
        "device": device,
        "shapes": list(sizes.shapes),
        "quick": quick,
        "root": root and str(root),
    }
    show(machine_line(where))
    with quiet():
        clock = Clock(where, sizes.repeats, sizes.budget)
        speed = copy_speed(clock, sizes.copy_bytes)
        made, found = record(where, options, speed, {}), {}
        for name in chosen:
            found[name] = measure(name, clock, sizes, speed, root)
            show(text(found[name]))
            made = record(where, options, speed, found)
            save(made, json_file)  # after each part, so that an interruption loses no results
    return made


def measure(part: str, clock: Clock, sizes: Sizes, speed: float, root: Path | None = None) -> Result:
    """Measures a part. `speed` is that of a copy, for the floor and the roofline of the scan."""
    ways: Mapping[str, Callable[[], Result]] = {
        "scan": lambda: scan.measure(clock, sizes, speed),
        "roofline": lambda: roofline.measure(clock, sizes, speed),
        "block": lambda: network.measure_block(clock, sizes),
        "step": lambda: network.measure_step(clock, sizes),
        "projection": lambda: nullspace.measure_projection(clock, sizes),
        "decomposition": lambda: nullspace.measure_decomposition(clock, sizes),
        "inference": lambda: network.measure_inference(clock, sizes),
        "run": lambda: runs.measure(clock, sizes, root),
    }
    return ways[part]()


def chosen_parts(names: Sequence[str]) -> list[str]:
    """The named parts in the order of measurement; all if none is named."""
    for name in names:
        if name not in PARTS:
            raise UserError(f"There is no part '{name}'.{did_you_mean(name, PARTS)} Known: {', '.join(PARTS)}.")
    return [part for part in PARTS if part in names or not names]


def checked(
    parts: Sequence[str], device: str, shapes: Sequence[str], quick: bool, root: Path | None
) -> tuple[torch.device, Sizes]:
    """The device and the sizes. Raises for mistakes before anything is measured."""
    where = pick_device(device)
    sizes = default_sizes(where, quick)
    if shapes:
        if "scan" not in parts and "roofline" not in parts:
            raise UserError("--shape is for the parts scan and roofline: name one of them, or remove --shape.")
        sizes = replace(sizes, shapes={name: shape_named(name, PARTS) for name in shapes})
    if root is not None:
        if "run" not in parts:
            raise UserError("--root is for the part run: name that part, or remove --root.")
        check_root(root)
    return where, sizes


def check_root(root: Path) -> None:
    from mambacl.data import open_dataset

    open_dataset("cifar100", root)  # raises if files are missing


@contextmanager
def quiet() -> Iterator[None]:
    """Hides the messages of models and runs."""
    before = logger.level
    logger.setLevel(logging.ERROR)  # an interrupted run would suggest to resume it, but its folder is gone
    try:
        yield
    finally:
        logger.setLevel(before)
