"""Users' own images listed in a CSV or Parquet file: path, label, split (train or test) and, if there is one, task.

`stream.root` is the file. Paths are relative to its folder. Labels are class names; where all are whole numbers they
are sorted as such. A task is a name or a number, too; each class belongs to one, and `stream.own_tasks` takes them.
"""

import csv
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from mambacl.datasets.base import DATASETS, DataSet, FileImages
from mambacl.errors import UserError

COLUMNS = ("path", "label", "split")


def manifest(root: Path | None) -> DataSet:
    if root is None or root.is_dir():
        raise UserError("The data set 'manifest' needs stream.root: a CSV or Parquet file with path, label and split.")
    if not root.is_file():
        raise UserError(f"There is no file {root}: stream.root is the manifest itself.")
    rows = _parquet(root) if root.suffix.lower() in (".parquet", ".pq") else _csv(root)
    return from_rows(root, rows)


def from_rows(file: Path, rows: Iterable[tuple[int, dict[str, str]]]) -> DataSet:
    kept: dict[str, list[tuple[str, str]]] = {"train": [], "test": []}
    tasks: dict[str, str] = {}
    for line, row in rows:
        path, label, split, task = (row.get(name, "").strip() for name in (*COLUMNS, "task"))
        if split not in kept:
            raise UserError(f"{file}, line {line}: the split is '{split}'; it must be train or test.")
        if not path or not label:
            raise UserError(f"{file}, line {line}: the {'label' if path else 'path'} is empty; fill it in.")
        if task and tasks.setdefault(label, task) != task:
            raise UserError(
                f"{file}, line {line}: the class '{label}' is in the tasks '{tasks[label]}' and '{task}'; "
                "each class belongs to one."
            )
        kept[split].append((path, label))
    names = in_order({label for part in kept.values() for _, label in part})
    if not names:
        raise UserError(f"{file} lists no images: add lines 'path,label,split'.")
    number = {name: position for position, name in enumerate(names)}
    own: list[list[int]] | None = None
    if tasks:
        if without := [name for name in names if name not in tasks]:
            raise UserError(f"{file}: the class '{without[0]}' has no task; give one to each class, or to none.")
        own = [[number[name] for name in names if tasks[name] == task] for task in in_order(set(tasks.values()))]

    def images(part: list[tuple[str, str]]) -> FileImages:
        labels = np.array([number[label] for _, label in part], dtype=np.int64)
        return FileImages(file.parent, [file.parent / path for path, _ in part], labels)

    return DataSet(file.stem, names, images(kept["train"]), images(kept["test"]), own)


def in_order(words: set[str]) -> list[str]:
    """As numbers where all are whole numbers, else as words."""
    return sorted(words, key=int) if all(word.isdecimal() for word in words) else sorted(words)


def _csv(file: Path) -> Iterable[tuple[int, dict[str, str]]]:
    try:
        with open(file, encoding="utf-8-sig", newline="") as opened:
            reader = csv.DictReader(opened)
            _require(file, reader.fieldnames or ())
            for row in reader:
                yield reader.line_num, {key: value or "" for key, value in row.items() if isinstance(key, str)}
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{file} is no CSV file in UTF-8 ({error}): save it as one.") from None


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
        yield number + 1, {key: "" if value is None else str(value) for key, value in row.items()}


def _require(file: Path, columns: Iterable[str]) -> None:
    if missing := [name for name in COLUMNS if name not in columns]:
        raise UserError(f"{file} has no column '{missing[0]}'; its first line names path, label, split (and task).")


DATASETS.add("manifest", manifest)
