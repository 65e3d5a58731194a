"""Users' own images in a CSV or Parquet file with the columns path, label, split (train or test) and, optionally, task.

`stream.root` is the file. Paths are relative to its folder. Labels are class names; if all are numbers, they are sorted
as numbers. Tasks are names or numbers, too. If each class belongs to one task, `stream.own_tasks` uses them. If classes
appear in several tasks, the tasks are domains.
"""

import csv
from collections.abc import Iterable
from importlib import import_module
from math import isfinite, isnan
from pathlib import Path
from typing import Any

import numpy as np

from mambacl.data.dataset import DataSet, Domains
from mambacl.data.images import FileImages
from mambacl.data.sets import DATASETS, SOURCES, Source
from mambacl.errors import UserError

COLUMNS = ("path", "label", "split")
Row = tuple[int, str, str, str]  # line, path, label, task


def manifest(root: Path | None) -> DataSet:
    if root is None or root.is_dir():
        raise UserError("The data set 'manifest' needs stream.root: a CSV or Parquet file with path, label and split.")
    if not root.is_file():
        raise UserError(f"The file {root} does not exist: set stream.root to the manifest itself.")
    rows = _parquet(root) if root.suffix.lower() in (".parquet", ".pq") else _csv(root)
    return from_rows(root, rows)


def from_rows(file: Path, rows: Iterable[tuple[int, dict[str, str]]]) -> DataSet:
    kept: dict[str, list[Row]] = {"train": [], "test": []}
    for line, row in rows:
        path, label, split, task = (row.get(name, "").strip() for name in (*COLUMNS, "task"))
        if split not in kept:
            raise UserError(f"{file}, line {line}: the split is '{split}'; it must be train or test.")
        if not path or not label:
            raise UserError(f"{file}, line {line}: the {'label' if path else 'path'} is empty; fill it in.")
        kept[split].append((line, path, label, task))
    names = in_order({label for part in kept.values() for _, _, label, _ in part})
    if not names:
        raise UserError(f"{file} lists no images: add lines 'path,label,split'.")
    number = {name: position for position, name in enumerate(names)}

    def images(part: list[Row]) -> FileImages:
        labels = np.array([number[label] for _, _, label, _ in part], dtype=np.int64)
        return FileImages(file.parent, [file.parent / path for _, path, _, _ in part], labels)

    own, domains = _tasks(file, names, kept["train"], kept["test"])
    return DataSet(file.stem, names, images(kept["train"]), images(kept["test"]), own, domains=domains)


def _tasks(
    file: Path, names: list[str], train: list[Row], test: list[Row]
) -> tuple[list[list[int]] | None, Domains | None]:
    """The classes of each task, if no class is in two tasks, and the task of each image. An image without a task gets
    the task of its class."""
    tasks: dict[str, set[str]] = {name: set() for name in names}
    for _, _, label, task in (*train, *test):
        tasks[label] |= {task} if task else set()
    if not any(tasks.values()):
        return None, None
    if without := [name for name, found in tasks.items() if not found]:
        raise UserError(f"{file}: the class '{without[0]}' has no task; give one to each class, or to none.")
    for line, _, label, task in (*train, *test):
        if not task and len(tasks[label]) > 1:
            raise UserError(
                f"{file}, line {line}: the class '{label}' is in several tasks; name the task of this image."
            )
    found = in_order(set().union(*tasks.values()))
    of_train, of_test = ([task or min(tasks[label]) for _, _, label, task in part] for part in (train, test))
    own = [[number for number, name in enumerate(names) if task in tasks[name]] for task in found]
    return own if all(len(one) == 1 for one in tasks.values()) else None, Domains.of(of_train, of_test, found)


def in_order(words: set[str]) -> list[str]:
    """Sorted as numbers if all are numbers, else as words."""
    try:
        values = {word: float(word) for word in words}
    except ValueError:
        return sorted(words)
    numbers = all(map(isfinite, values.values()))
    return sorted(words, key=lambda word: (values[word], word) if numbers else (0.0, word))


def _csv(file: Path) -> Iterable[tuple[int, dict[str, str]]]:
    try:
        with open(file, encoding="utf-8-sig", newline="") as opened:
            reader = csv.DictReader(opened)
            _require(file, reader.fieldnames or ())
            for row in reader:
                yield reader.line_num, {key: value or "" for key, value in row.items() if isinstance(key, str)}
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{file} is not a CSV file in UTF-8 ({error}): save it as one.") from None


def _parquet(file: Path) -> Iterable[tuple[int, dict[str, str]]]:
    try:
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError:
        raise UserError(f"Reading {file} needs pyarrow: `pip install pyarrow`, or save it as CSV.") from None
    try:
        table = parquet.read_table(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as Parquet ({error}): write it again.") from None
    _require(file, table.column_names)
    for number, row in enumerate(table.to_pylist()):
        yield number + 1, {key: _word(value) for key, value in row.items()}


def _word(value: Any) -> str:
    """The value as text. Parquet turns integers into floats in a column with gaps; this turns them back."""
    if value is None or (isinstance(value, float) and isnan(value)):
        return ""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def _require(file: Path, columns: Iterable[str]) -> None:
    if missing := [name for name in COLUMNS if name not in columns]:
        raise UserError(f"{file} has no column '{missing[0]}'; it needs path, label and split, and can have task.")


DATASETS.add("manifest", manifest)
SOURCES["manifest"] = Source(
    "your own images, listed in a CSV or Parquet file, which is the root",
    "a file with the columns path, label, split and, optionally, task",
)
