"""Turns accuracy matrices of other tools into run records, to compare them with our runs. Files are parsed as text,
never executed. Row t, column j of a matrix is the accuracy on task j after task t. Values above the diagonal are
ignored.

Plain CSV and JSON: if any value is above one, all are per cent, unless the file names its unit.
PILOT and PyCIL: the log of a run, lines `CNN: {'total': 91.2, '00-09': 93.1, ..., 'old': ..., 'new': ...}`, per cent.
Mammoth: `class-il/DATASET/MODEL/logs.pyd`, one line per run with `'accuracy_J_taskT': ...`, per cent.
Avalanche: `eval_results.csv` of its CSVLogger, columns `eval_exp,training_exp,eval_accuracy,...`, fractions of one.
"""

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mambacl.errors import UserError
from mambacl.reports.runs import RunRecord
from mambacl.training.folder import SCHEMA
from mambacl.training.metrics import list_metrics, mean

PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".npy", ".npz", ".joblib")
COUNTED = ("cifar100", "imagenet-r", "domainnet-s200", "domainnet-345")
"""data sets whose benchmarks have the number of tasks in their name, as in cifar100-10"""
UNITS = {"percent": 100.0, "per cent": 100.0, "%": 100.0, "fraction": 1.0}
EMPTY = ("", "-", "nan", "none", "null")
NUMBER = r"(?:[\w.]+\()?(nan|-?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)"  # also as np.float64(91.2)
PILOT_ROW = re.compile(r"\bCNN: (\{.*\})")
PILOT_WORD = re.compile(r"=> (seed|model_name|dataset): (\S+)\s*$")
PILOT_VALUE = re.compile(rf"'([^']+)': {NUMBER}")
MAMMOTH_VALUE = re.compile(rf"'accuracy_(\d+)_task(\d+)': {NUMBER}")
AVALANCHE_HEAD = ("eval_exp", "training_exp", "eval_accuracy")

# Data sets of other tools with the same images and split as ours. PILOT's ImageNet-R has another split.
SAME_DATA = {
    "cifar224": "cifar100", "cifar100": "cifar100", "seq-cifar100": "cifar100", "seq-cifar100-224": "cifar100",
    "seq-imagenet-r": "imagenet-r",
}  # fmt: skip


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


def import_records(
    files: Sequence[str | Path], method: str | None = None, benchmark: str | None = None
) -> list[RunRecord]:
    """One record per matrix in the files; `method` and `benchmark` override what a file says."""
    records: list[RunRecord] = []
    seen: Counter[tuple[str, str]] = Counter()
    for path in dict.fromkeys(map(Path, files)):
        for matrix in read_matrices(path):
            name = method or matrix.method or path.stem
            where = _benchmark(path, matrix, benchmark)
            seed = matrix.seed if matrix.seed is not None else seen[name, where]
            seen[name, where] += 1
            records.append(_record(path, matrix, name, where, seed))
    return records


def read_matrices(path: Path) -> list[ImportedMatrix]:
    """Reads a file of PILOT, Mammoth or Avalanche, a JSON file, or else a CSV file."""
    if path.suffix.lower() in PICKLES:
        raise UserError(f"{path} may contain a pickle, which is never opened; save the matrix as CSV or JSON.")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"The file {path} to import does not exist; check the path.") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text; save the matrix as CSV or JSON.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); use a file of accuracies.") from None
    if "\0" in text:
        raise UserError(f"{path} is not text; save the matrix as CSV or JSON.")
    if path.suffix.lower() == ".json":
        return read_json(path, text)
    return (reader_of(text) or read_csv)(path, text)


def _benchmark(path: Path, matrix: ImportedMatrix, given: str | None) -> str:
    name, tasks = given or matrix.benchmark, len(matrix.rows)
    if name is None:
        raise UserError(f"{path} does not name its benchmark; add --import-benchmark, e.g. cifar100-{tasks}.")
    if name in COUNTED:
        return f"{name}-{tasks}"
    counted = re.fullmatch(rf"(?:{'|'.join(COUNTED)})-(\d+)", name)
    if counted and int(counted[1]) != tasks:
        raise UserError(f"{path} has {tasks} tasks, but {name} has {counted[1]}; name the right benchmark.")
    return name


def _record(path: Path, matrix: ImportedMatrix, method: str, benchmark: str, seed: int) -> RunRecord:
    """If the file does not say how many images a task has, R takes the place of the counts, with totals of one."""
    total = list(matrix.total or [1] * len(matrix.rows))
    correct = [[value * total[j] for j, value in enumerate(row)] for row in matrix.rows]
    metrics = {
        metric.name: metric.function(correct, total) for metric in list_metrics() if matrix.total or metric.needs == "R"
    }
    if matrix.over_images:
        metrics["final_accuracy_images"] = matrix.over_images[-1]
        metrics["average_incremental_accuracy"] = mean(matrix.over_images)
    results = {
        "schema": SCHEMA, "status": "finished", "benchmark": benchmark, "method": method, "seed": seed,
        "backbone": f"imported ({matrix.tool})", "imported": matrix.tool, "class_names": [], "class_order": [],
        "tasks": [[] for _ in total], "correct": correct, "total": total, "metrics": metrics,
    }  # fmt: skip
    return RunRecord(path, results)


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


# Plain files


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


# Logs of other tools


def read_pilot(path: Path, text: str) -> list[ImportedMatrix]:
    words: dict[str, str] = {}
    found: list[ImportedMatrix] = []
    rows: list[list[float | None]] = []
    totals: list[float] = []

    def close() -> None:
        if rows:
            benchmark = _same_benchmark(words.get("dataset"), "pilot", len(rows))
            seed = int(words["seed"]) if words.get("seed", "").isdigit() else None
            over = tuple(total / 100 for total in totals) if len(totals) == len(rows) else None
            lower = lower_rows(path, rows, 100.0)
            found.append(ImportedMatrix("PILOT", lower, words.get("model_name"), benchmark, seed, over_images=over))
        rows.clear()
        totals.clear()

    for line in text.splitlines():
        if match := PILOT_WORD.search(line):
            close()  # a run begins with its arguments
            words[match[1]] = match[2]
        elif match := PILOT_ROW.search(line):
            values = {key: float(value) for key, value in PILOT_VALUE.findall(match[1])}
            groups = [key for key in values if re.fullmatch(r"\d+-\d+", key)]
            groups.sort(key=lambda group: int(group.partition("-")[0]))  # "100-109" comes after "20-29"
            if len(groups) == 1 and rows:
                close()
            rows.append([values[group] for group in groups])
            if len(groups) != len(rows):
                raise UserError(
                    f"{path}: PILOT reports {len(groups)} groups of classes after task {len(rows)}; it groups classes "
                    "by its increment, so only equal tasks with at least two classes can be imported."
                )
            if "total" in values:
                totals.append(values["total"])
    close()
    return found


def read_mammoth(path: Path, text: str) -> list[ImportedMatrix]:
    if "task-il" in path.parts:
        raise UserError(f"{path} is from a task-incremental evaluation; use the logs.pyd under class-il instead.")
    found = []
    for line in text.splitlines():
        values = {(int(t) - 1, int(j) - 1): float(value) for j, t, value in MAMMOTH_VALUE.findall(line)}
        if not values:
            continue
        tasks = 1 + max(t for t, _ in values)
        rows = [[values.get((t, j)) for j in range(tasks)] for t in range(tasks)]
        benchmark = _same_benchmark(_setting(line, "dataset"), "mammoth", tasks)
        seed = re.search(r"'seed': (\d+)", line)
        lower = lower_rows(path, rows, 100.0)
        found.append(
            ImportedMatrix("Mammoth", lower, _setting(line, "model"), benchmark, int(seed[1]) if seed else None)
        )
    return found


def read_avalanche(path: Path, text: str) -> list[ImportedMatrix]:
    values: dict[tuple[int, int], float] = {}
    for number, entry in enumerate(csv.DictReader(text.splitlines()), start=2):
        after, on, accuracy = (str(entry.get(key)).strip() for key in ("training_exp", "eval_exp", "eval_accuracy"))
        if after == "None":  # evaluated before any training
            continue
        try:
            values[int(after), int(on)] = float(accuracy)
        except ValueError:
            raise UserError(
                f"{path}, line {number}: '{accuracy}' on '{on}' after '{after}' is not a result; correct the line."
            ) from None
    tasks = 1 + max((t for t, _ in values), default=-1)
    rows = [[values.get((t, j)) for j in range(tasks)] for t in range(tasks)]
    return [ImportedMatrix("Avalanche", lower_rows(path, rows, 1.0))]


def reader_of(text: str) -> Callable[[Path, str], list[ImportedMatrix]] | None:
    """The reader for a file with this text; None if none of the three tools wrote it."""
    if PILOT_ROW.search(text):
        return read_pilot
    if MAMMOTH_VALUE.search(text):
        return read_mammoth
    head: Sequence[str] = [field.strip() for field in text.lstrip().partition("\n")[0].split(",")]
    return read_avalanche if all(word in head for word in AVALANCHE_HEAD) else None


def _setting(line: str, key: str) -> str | None:
    match = re.search(rf"'{key}': '([^']*)'", line)
    return match[1] if match else None


def _same_benchmark(dataset: str | None, tool: str, tasks: int) -> str | None:
    if dataset is None:
        return None
    return f"{SAME_DATA.get(dataset, f'{tool}-{dataset}')}-{tasks}"
