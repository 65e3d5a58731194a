"""Checks the options of benchmarks before anything is measured."""

from collections.abc import Collection
from pathlib import Path

from mambacl.bench.shapes import SHAPES, Shape
from mambacl.errors import UserError
from mambacl.registry import did_you_mean


def shape_named(name: str, parts: Collection[str] = ()) -> Shape:
    if name in parts and name not in SHAPES:
        raise UserError(f"'{name}' is a part, not a shape: name parts before --shape.")
    if name not in SHAPES:
        raise UserError(f"There is no shape '{name}'.{did_you_mean(name, SHAPES)} Known: {', '.join(SHAPES)}.")
    return SHAPES[name]


def check_at_least_one(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise UserError(f"--{name} must be at least 1, got {count}.")


def check_writable(path: Path | None) -> None:
    if path is None:
        return
    new = not path.exists()
    try:
        with open(path, "ab"):
            pass
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): choose another --json FILE.") from None
    if new:
        path.unlink()
