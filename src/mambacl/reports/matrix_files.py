"""Accuracy matrices in plain CSV and JSON: row t, column j is the accuracy on task j after task t.

Values above the diagonal are ignored. If any value is above one, all are per cent, unless the file names its unit.
"""

import csv
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mambacl.errors import UserError

WORDS = ("method", "benchmark", "seed", "unit", "total")
UNITS = {"percent": 100.0, "per cent": 100.0, "%": 100.0, "fraction": 1.0}
EMPTY = ("", "-", "nan", "none", "null")


@dataclass(frozen=True)
class ImportedMatrix:
    """The matrix of one run, as fractions of one; row t has the tasks up to t."""

    tool: str
    rows: tuple[tuple[float, ...], ...]
    method: str | None = None
    benchmark: str | None = None
    seed: int | None = None
    total: tuple[int, ...] | None = None
    """test images of each task, if the file has them"""
    over_images: tuple[float, ...] | None = None
    """accuracy over all images seen, after each task, if the file has it"""


def lower_rows(path: Path, rows: Sequence[Sequence[float | None]], scale: float) -> tuple[tuple[float, ...], ...]:
    """The rows up to the diagonal, divided by `scale`. Missing or invalid accuracies are an error."""
    count = len(rows)
    if not count:
        raise UserError(f"{path} has no accuracies; a matrix needs one row per task learned.")
    below = [value for t, row in enumerate(rows) for value in row[:t]]
    above = [value for t, row in enumerate(rows) for value in row[t + 1 : count]]
    if count > 1 and not any(below) and any(above):
        raise UserError(f"{path} seems to be transposed; row t must hold the accuracies after task t.")
    checked = []
    for t, row in enumerate(rows):
        known = [value for value in row[: t + 1] if value is not None and math.isfinite(value)]
        if len(known) <= t:
            lacking = next(j for j in range(t + 1) if j >= len(row) or row[j] is None or not math.isfinite(row[j] or 0))
            raise UserError(f"{path} lacks the accuracy on task {lacking + 1} after task {t + 1}; add it.")
        wrong = [value for value in known if not 0 <= value <= scale]
        if wrong:
            raise UserError(f"{path}: {wrong[0]:g} after task {t + 1} is not an accuracy between 0 and {scale:g}.")
        checked.append(tuple(value / scale for value in known))
    return tuple(checked)


def read_csv(path: Path, text: str) -> list[ImportedMatrix]:
    """Reads a matrix of numbers, with or without a header and a column of names, and comments `# method: NAME`."""
    words: dict[str, Any] = {}
    lines: list[tuple[int, list[str]]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("#"):
            key, _, value = line.lstrip("# \t").partition(":")
            words[key.strip().lower()] = value.strip()
        elif line.strip(" \t,;"):
            lines.append((number, _fields(line)))
    indexed = bool(lines) and _is_index(lines[0][1])
    if lines and (indexed or _is_head(lines[0][1])):
        del lines[0]
    if lines and (indexed or not any(_is_number(fields[0]) for _, fields in lines)):
        lines = [(number, fields[1:]) for number, fields in lines]
    rows = [[_number(path, f"line {number}", field) for field in fields] for number, fields in lines]
    total = words.get("total")
    if total is not None:
        words["total"] = [_number(path, "total", field) for field in _fields(total)]
    return [_matrix(path, "CSV", rows, words)]


def read_json(path: Path, text: str) -> list[ImportedMatrix]:
    """Reads a list of rows, or {"accuracy": rows, "method": ..., "benchmark": ..., "seed": ...}, or a list of these."""
    try:
        contents = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); restore the file.") from None
    entries = contents if isinstance(contents, list) and contents and isinstance(contents[0], Mapping) else [contents]
    found = []
    for entry in entries:
        rows = entry.get("accuracy", entry.get("matrix")) if isinstance(entry, Mapping) else entry
        if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
            raise UserError(f'{path} has no matrix; it must be a list of rows, or {{"accuracy": [[...], ...]}}.')
        numbers = [[_number(path, f"row {t + 1}", value) for value in row] for t, row in enumerate(rows)]
        found.append(_matrix(path, "JSON", numbers, entry if isinstance(entry, Mapping) else {}))
    return found


def _matrix(path: Path, tool: str, rows: list[list[float | None]], words: Mapping[str, Any]) -> ImportedMatrix:
    unit = words.get("unit")
    if unit is not None and unit not in UNITS:
        raise UserError(f"{path}: the unit must be percent or fraction, got '{unit}'.")
    values = [value for t, row in enumerate(rows) for value in row[: t + 1] if value is not None]
    scale = UNITS[unit] if unit is not None else 100.0 if any(value > 1 for value in values) else 1.0
    method, benchmark = (None if words.get(key) in (None, "") else str(words[key]) for key in ("method", "benchmark"))
    checked = lower_rows(path, rows, scale)
    total = _totals(path, words.get("total"), len(checked))
    return ImportedMatrix(tool, checked, method, benchmark, _seed(path, words.get("seed")), total)


def _totals(path: Path, values: Any, tasks: int) -> tuple[int, ...] | None:
    if values is None:
        return None
    counts = values if isinstance(values, Iterable) and not isinstance(values, str) else [values]
    known = [int(count) for count in counts if isinstance(count, int | float) and count >= 1 and count == int(count)]
    if len(known) != tasks:
        raise UserError(f"{path}: total must be the number of test images of each of the {tasks} tasks, got {values}.")
    return tuple(known)


def _seed(path: Path, value: Any) -> int | None:
    if value in (None, ""):
        return None
    try:
        return int(value)
    except (TypeError, ValueError):
        raise UserError(f"{path}: the seed must be a whole number, got '{value}'.") from None


def _fields(line: str) -> list[str]:
    for mark in ",;\t":
        if mark in line:
            return [field.strip() for field in next(csv.reader([line], delimiter=mark))]
    return re.split(r"\s+", line.strip())


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_head(fields: Sequence[str]) -> bool:
    """Whether these are column names: words without a number among them."""
    words = [field for field in fields if field.lower() not in EMPTY]
    return bool(words) and not any(_is_number(field) for field in words)


def _is_index(fields: Sequence[str]) -> bool:
    """Whether this is the header that pandas writes: an empty field, then 0, 1, 2, ..."""
    return fields[0] == "" and len(fields) > 1 and fields[1:] == [str(j) for j in range(len(fields) - 1)]


def _number(path: Path, where: str, value: Any) -> float | None:
    if value is None or (isinstance(value, str) and value.lower() in EMPTY):
        return None
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (TypeError, ValueError):
        raise UserError(f"{path}, {where}: '{value}' is not a number; correct it.") from None
