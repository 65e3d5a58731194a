"""`mambacl bench`: how fast this machine does it, part by part, with the ratios taken within one run."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mambacl.bench import block, inference, nullspace, roofline, scan, step, whole
from mambacl.bench.options import check_writable, shape_named
from mambacl.bench.result import Result, machine, record, text
from mambacl.bench.shapes import SHAPES
from mambacl.bench.sizes import Sizes, default_sizes
from mambacl.bench.timing import Clock, copy_speed
from mambacl.errors import UserError
from mambacl.log import logger
from mambacl.registry import did_you_mean
from mambacl.tensorfile import write_bytes
from mambacl.training.build import pick_device

__all__ = ["PARTS", "SHAPES", "Result", "bench", "measure"]

PARTS = ("scan", "roofline", "block", "step", "projection", "decomposition", "inference", "run")


def bench(
    parts: Sequence[str] = (),
    device: str = "auto",
    json_file: Path | None = None,
    shapes: Sequence[str] = (),
    quick: bool = False,
    root: Path | None = None,
    show: Callable[[str], object] | None = None,
) -> dict[str, Any]:
    """Measures the parts named, or all, shows a table of each as it is done, and returns what the JSON file holds.

    `shapes`: scans by name, in place of those that suit the device; `root`: CIFAR-100's files, for the part run.
    """
    show = show or partial(print, flush=True)
    chosen = chosen_parts(parts)
    where, sizes = checked(chosen, device, shapes, quick, root)
    if json_file is not None:
        check_writable(json_file)
    options = {
        "parts": chosen,
        "device": device,
        "shapes": list(sizes.shapes),
        "quick": quick,
        "root": root and str(root),
    }
    show("; ".join(f"{key}: {value}" for key, value in machine(where).items()) + f"; torch: {torch.__version__}\n")
    with quiet():
        clock = Clock(where, sizes.repeats, sizes.budget)
        speed = copy_speed(clock, sizes.copy_bytes)
        made, found = record(where, options, speed, {}), {}
        for name in chosen:
            found[name] = measure(name, clock, sizes, speed, root)
            show(text(found[name]))
            made = record(where, options, speed, found)
            if json_file is not None:  # after each part, so that an interruption loses no figures
                write_bytes(json_file, (json.dumps(made, indent=1) + "\n").encode())
    return made


def measure(part: str, clock: Clock, sizes: Sizes, speed: float, root: Path | None = None) -> Result:
    """`speed`: of a copy, for the floor and the roofline of the scan."""
    ways: Mapping[str, Callable[[], Result]] = {
        "scan": lambda: scan.measure(clock, sizes, speed),
        "roofline": lambda: roofline.measure(clock, sizes, speed),
        "block": lambda: block.measure(clock, sizes),
        "step": lambda: step.measure(clock, sizes),
        "projection": lambda: nullspace.measure_projection(clock, sizes),
        "decomposition": lambda: nullspace.measure_decomposition(clock, sizes),
        "inference": lambda: inference.measure(clock, sizes),
        "run": lambda: whole.measure(clock, sizes, root),
    }
    return ways[part]()


def chosen_parts(names: Sequence[str]) -> list[str]:
    """In the order in which they are measured; all if none is named."""
    for name in names:
        if name not in PARTS:
            raise UserError(f"There is no part '{name}'.{did_you_mean(name, PARTS)} Known: {', '.join(PARTS)}.")
    return [part for part in PARTS if part in names or not names]


def checked(
    parts: Sequence[str], device: str, shapes: Sequence[str], quick: bool, root: Path | None
) -> tuple[torch.device, Sizes]:
    """The device and the sizes; mistakes are found before anything is measured."""
    where = pick_device(device)
    sizes = default_sizes(where, quick)
    if shapes:
        if "scan" not in parts and "roofline" not in parts:
            raise UserError("--shape names shapes of the parts scan and roofline, none of which is asked for.")
        sizes = replace(sizes, shapes={name: shape_named(name, PARTS) for name in shapes})
    if root is not None:
        if "run" not in parts:
            raise UserError("--root names the data of the part run, which is not among those asked for.")
        check_root(root)
    return where, sizes


def check_root(root: Path) -> None:
    from mambacl.streams.data import open_dataset

    open_dataset("cifar100", root)  # says itself what is missing


@contextmanager
def quiet() -> Iterator[None]:
    """Without the lines of models and runs."""
    before = logger.level
    logger.setLevel(logging.ERROR)  # an interrupted run would advise to resume it, but its folder is gone
    try:
        yield
    finally:
        logger.setLevel(before)
