"""Reads accuracy matrices from files of PILOT, Mammoth and Avalanche. The files are parsed as text, never executed.

PILOT and PyCIL: the log of a run, lines `CNN: {'total': 91.2, '00-09': 93.1, ..., 'old': ..., 'new': ...}`, per cent.
Mammoth: `class-il/DATASET/MODEL/logs.pyd`, one line per run with `'accuracy_J_taskT': ...`, per cent.
Avalanche: `eval_results.csv` of its CSVLogger, columns `eval_exp,training_exp,eval_accuracy,...`, fractions of one.
"""

import csv
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from mambacl.errors import UserError
from mambacl.reports.matrix_files import ImportedMatrix, lower_rows

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


def read_pilot(path: Path, text: str) -> list[ImportedMatrix]:
    words: dict[str, str] = {}
    found: list[ImportedMatrix] = []
    rows: list[list[float | None]] = []
    totals: list[float] = []

    def close() -> None:
        if rows:
            benchmark = _benchmark(words.get("dataset"), "pilot", len(rows))
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
            groups = sorted((key for key in values if re.fullmatch(r"\d+-\d+", key)), key=_first_class)
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
        benchmark = _benchmark(_setting(line, "dataset"), "mammoth", tasks)
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


def _first_class(group: str) -> int:
    """For sorting: "100-109" comes after "20-29"."""
    return int(group.partition("-")[0])


def _setting(line: str, key: str) -> str | None:
    match = re.search(rf"'{key}': '([^']*)'", line)
    return match[1] if match else None


def _benchmark(dataset: str | None, tool: str, tasks: int) -> str | None:
    if dataset is None:
        return None
    return f"{SAME_DATA.get(dataset, f'{tool}-{dataset}')}-{tasks}"
