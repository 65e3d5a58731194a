"""The results of a benchmark: rows of named values, shown as a table and saved as JSON."""

import json
import logging
import os
import platform
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mambacl.errors import UserError
from mambacl.files import write_bytes
from mambacl.log import logger
from mambacl.reports.rendering import to_text
from mambacl.reports.tables import Column, Table
from mambacl.training.build import pick_device
from mambacl.training.provenance import commit, versions

Figure = str | bool | int | float | None
Row = dict[str, Any]  # of figures


@dataclass
class Result:
    title: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: tuple[str, ...] = ()
    """columns that the table does not show"""
    kind: str = ""
    """how a page shows the JSON file, if in a way of its own"""

    def as_dict(self) -> dict[str, Any]:
        kind = {"kind": self.kind} if self.kind else {}
        return {**kind, "title": self.title, "rows": self.rows, "notes": self.notes}


def text(result: Result) -> str:
    """The table, however wide, with its notes below. Leaves out columns without a value."""
    shown_names = dict.fromkeys(name for row in result.rows for name in row if name not in result.left_out)
    names = [name for name in shown_names if any(row.get(name) is not None for row in result.rows)]
    worded = {name for row in result.rows for name, figure in row.items() if isinstance(figure, (str, bool))}
    columns = tuple(Column(name.replace("_", " "), text=name in worded) for name in names)
    rows = tuple(tuple(shown(row.get(name)) for name in names) for row in result.rows)
    return to_text(Table(result.title, columns, rows, tuple(map(wrapped, result.notes))), sys.maxsize)


def wrapped(note: str) -> str:
    return textwrap.fill(note, 120, break_on_hyphens=False)


def shown(figure: Figure) -> str | None:
    """A value with three significant digits."""
    if isinstance(figure, bool):
        return "yes" if figure else "no"
    if isinstance(figure, float):
        return f"{figure:.0f}" if abs(figure) >= 1000 else f"{figure:.3g}"
    return None if figure is None else str(figure)


def publish(measure: Callable[..., Result], json_file: Path | None = None, **options: Any) -> dict[str, Any]:
    """Measures with these options and shows a table. Returns the contents of the JSON file."""
    device = pick_device(options.get("device", "cpu"))
    check_writable(json_file)
    result = measure(**options)
    print(text(result))
    made = {**header(device, options), **result.as_dict()}
    save(made, json_file)
    return made


@contextmanager
def quiet(level: int = logging.ERROR) -> Iterator[None]:
    """Hides the messages of models and runs below a level."""
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


def check_writable(path: Path | None) -> None:
    """Raises before anything is measured if the results cannot be written."""
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


def save(made: Mapping[str, Any], json_file: Path | None) -> None:
    if json_file is not None:
        write_bytes(json_file, (json.dumps(made, indent=1) + "\n").encode())


def header(device: torch.device, options: Mapping[str, Any]) -> dict[str, Any]:
    """Date, commit, machine, versions and options of a measurement."""
    return {
        "schema": 1,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(device),
        "versions": all_versions(),
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in options.items()},
    }


def machine(device: torch.device) -> dict[str, Figure]:
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "cpu": processor(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": load(),
        "system": platform.platform(),
    }


def machine_line(device: torch.device) -> str:
    words = {**machine(device), "torch": torch.__version__}
    return "; ".join(f"{key}: {value}" for key, value in words.items()) + "\n"


def load() -> float | None:
    """The machine's load in the last minute; None if unknown."""
    try:
        return round(os.getloadavg()[0], 1)
    except (AttributeError, OSError):
        return None


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not on Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def all_versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {**versions(), "cuda": torch.version.cuda}
    try:
        return {**found, "triton": version("triton")}
    except PackageNotFoundError:
        return found
