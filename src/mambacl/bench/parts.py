"""`mambacl bench`: measures the speed of this machine, part by part, with ratios computed within one run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mambacl.bench import classifiers, freed, memory, network, nullspace, roofline, runs, scan
from mambacl.bench.names import PARTS
from mambacl.bench.result import Result, check_writable, header, machine_line, quiet, save, text
from mambacl.bench.shapes import SHAPES, shape_named
from mambacl.bench.sizes import Sizes, default_sizes
from mambacl.bench.timing import Clock, copy_speed
from mambacl.data import open_dataset
from mambacl.errors import UserError
from mambacl.registry import did_you_mean
from mambacl.training.build import pick_device


def bench(
    parts: Sequence[str] = (),
    device: str = "auto",
    json_file: Path | None = None,
    shapes: Sequence[str] = (),
    quick: bool = False,
    root: Path | None = None,
) -> dict[str, Any]:
    """Measures the named parts, or all; shows each table when it is done. Returns the contents of the JSON file.

    `shapes`: scans by name, instead of those that suit the device; `root`: CIFAR-100's files, for the part run.
    """
    for name in parts:
        if name not in PARTS:
            raise UserError(f"There is no part '{name}'.{did_you_mean(name, PARTS)} Known: {', '.join(PARTS)}.")
    chosen = [part for part in PARTS if part in parts or not parts]
    where = pick_device(device)
    sizes = checked_sizes(chosen, default_sizes(where, quick), shapes, root)
    check_writable(json_file)
    options = {"parts": chosen, "device": device, "shapes": list(sizes.shapes), "quick": quick, "root": root}
    print(machine_line(where), flush=True)
    found: dict[str, Any] = {}
    with quiet():  # an interrupted run would suggest to resume it, but its folder is gone
        clock = Clock(where, sizes.repeats, sizes.budget)
        speed = copy_speed(clock, sizes.copy_bytes)
        for name in chosen:
            result = measure(name, clock, sizes, speed, root)
            print(text(result), flush=True)
            found[name] = result.as_dict()
            made = {**header(where, options), "copy_bytes_per_second": speed, "parts": found}
            save(made, json_file)  # after each part, so that an interruption loses no results
    return made


def measure(part: str, clock: Clock, sizes: Sizes, speed: float, root: Path | None = None) -> Result:
    """Measures a part. `speed` is that of a copy, for the floor and the roofline of the scan."""
    ways: Mapping[str, Callable[[], Result]] = {
        "scan": lambda: scan.measure(clock, sizes, speed),
        "roofline": lambda: roofline.measure(clock, sizes, speed),
        "block": lambda: network.measure_block(clock, sizes),
        "step": lambda: network.measure_step(clock, sizes),
        "memory": lambda: memory.measure(clock, sizes),
        "projection": lambda: nullspace.measure_projection(clock, sizes),
        "decomposition": lambda: nullspace.measure_decomposition(clock, sizes),
        "inference": lambda: network.measure_inference(clock, sizes),
        "freed": lambda: freed.measure(clock, sizes),
        "classifier": lambda: classifiers.measure(clock, sizes),
        "run": lambda: runs.measure(clock, sizes, root),
    }
    return ways[part]()


def checked_sizes(parts: Sequence[str], sizes: Sizes, shapes: Sequence[str], root: Path | None) -> Sizes:
    """The sizes with the named shapes. Raises for mistakes before anything is measured."""
    for name in shapes:
        if name in PARTS and name not in SHAPES:
            raise UserError(f"'{name}' is a part, not a shape: name parts before --shape.")
    if shapes and "scan" not in parts and "roofline" not in parts:
        raise UserError("--shape is for the parts scan and roofline: name one of them, or remove --shape.")
    if root is not None:
        if "run" not in parts:
            raise UserError("--root is for the part run: name that part, or remove --root.")
        open_dataset("cifar100", root)  # raises if files are missing
    return replace(sizes, shapes={name: shape_named(name) for name in shapes}) if shapes else sizes
