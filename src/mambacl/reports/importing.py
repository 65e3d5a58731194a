"""Turns accuracy matrices of other tools into run records, to compare them with our runs."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mambacl.errors import UserError
from mambacl.reports.foreign_logs import reader_of
from mambacl.reports.matrix_files import ImportedMatrix, read_csv, read_json
from mambacl.reports.runs import RunRecord
from mambacl.training.folder import SCHEMA
from mambacl.training.metrics import list_metrics, mean

PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".npy", ".npz", ".joblib")
COUNTED = ("cifar100", "imagenet-r", "domainnet-s200", "domainnet-345")
"""data sets whose benchmarks have the number of tasks in their name, as in cifar100-10"""


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
