"""The numbers of a figure: ours from the runs, the paper's where its text has them. Pure functions."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mambacl.paper.comparison import Names, benchmark_of, value_of
from mambacl.paper.designs import DEPTH, NAMES, PRETRAINING, PlannedRun, paper_eta
from mambacl.paper.losses import read_losses
from mambacl.paper.quoted import paper_table
from mambacl.reports.runs import RunRecord

HEAD = ("figure", "source", "benchmark", "series", "x", "metric", "value", "std", "seeds")
METRICS = ("accuracy", "forgetting")
Found = Sequence[tuple[PlannedRun, RunRecord]]


@dataclass(frozen=True)
class Point:
    source: str
    """ours or paper"""
    benchmark: str
    series: str
    x: float | str
    metric: str
    value: float
    std: float | None = None
    seeds: str = ""


def points(name: str, found: Found, scale: str) -> list[Point]:
    """Ours, then the paper's."""
    finished = [(run, record) for run, record in found if record.finished]
    values = {"accuracy-curve": _by_task, "loss-curve": _losses}.get(name, _final)(finished)
    ours = []
    for (benchmark, series, x, metric), seen in values.items():
        numbers = np.array([value for value, _ in seen])
        std = float(numbers.std(ddof=1)) if len(numbers) > 1 else None
        seeds = " ".join(str(seed) for _, seed in seen)
        ours.append(Point("ours", benchmark, series, x, metric, float(numbers.mean()), std, seeds))
    return ours + _papers(name, scale)


Values = dict[tuple[str, str, float | str, str], list[tuple[float, int]]]


def _final(found: Found) -> Values:
    values: Values = {}
    for run, record in found:
        assert run.x is not None
        for metric in METRICS:
            value = value_of(record, metric, Names())
            if value is not None:
                values.setdefault((benchmark_of(record), run.series, run.x, metric), []).append((value, run.seed))
    return values


def _by_task(found: Found) -> Values:
    values: Values = {}
    for run, record in found:
        for t, value in enumerate(record.after_each_task("tasks"), start=1):
            key = (benchmark_of(record), run.series, float(t), "accuracy")
            values.setdefault(key, []).append((100 * float(value), run.seed))
    return values


def _losses(found: Found) -> Values:
    values: Values = {}
    for run, record in found:
        for t, losses in sorted(read_losses(record.folder).items()):
            for j, loss in enumerate(losses, start=1):
                key = (benchmark_of(record), f"{run.series}, task {j}", float(t + 1), "loss")
                values.setdefault(key, []).append((loss, run.seed))
    return values


def _papers(name: str, scale: str) -> list[Point]:
    """The paper prints a figure's numbers only where they are those of its main table."""
    table = paper_table("main")
    rows = {row.method: row for row in table.rows if row.method in NAMES.values()}
    wanted: list[tuple[str, str, float | str, tuple[str, ...]]] = []
    for benchmark in table.columns:
        if name == "eta":
            wanted.append((benchmark, "Mamba-CL", paper_eta(benchmark), METRICS))
        elif name == "blocks":
            wanted.append((benchmark, "Mamba-CL", float(DEPTH[scale]), METRICS))
        elif name == "pretraining":
            wanted += [(benchmark, series, PRETRAINING["paper"][0], METRICS) for series in rows]
        elif name == "accuracy-curve" and benchmark in ("imagenet-r-10", "cifar100-10"):
            wanted += [(benchmark, series, 10.0, ("accuracy",)) for series in rows]
    found = []
    for benchmark, series, x, metrics in wanted:
        for metric in metrics:
            quoted = rows[series].values[benchmark, metric]
            assert quoted is not None
            found.append(Point("paper", benchmark, series, x, metric, quoted.mean, quoted.std))
    return found


def to_csv(name: str, shown: Sequence[Point]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HEAD)
    for point in shown:
        x = point.x if isinstance(point.x, str) else f"{point.x:g}"
        std = "" if point.std is None else f"{point.std:.4f}"
        writer.writerow(
            [name, point.source, point.benchmark, point.series, x, point.metric, f"{point.value:.4f}", std, point.seeds]
        )
    return out.getvalue()
