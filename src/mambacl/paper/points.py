"""The numbers of a figure: ours from the runs, the paper's from its main table. Pure functions."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mambacl.paper.comparison import MetricNames, benchmark_of, value_of
from mambacl.paper.designs import DEPTH, NAMES, PRETRAINING, PlannedRun, paper_eta
from mambacl.paper.losses import read_losses
from mambacl.paper.quoted import paper_table
from mambacl.reports.groups import mean_and_deviation
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
    """Our points, then the paper's."""
    values = {"accuracy-curve": _by_task, "loss-curve": _losses}.get(name, _final)
    seen: dict[Place, list[tuple[float, int]]] = {}
    for run, record in found:
        if record.finished:
            for series, x, metric, value in values(run, record):
                seen.setdefault((benchmark_of(record), series, x, metric), []).append((value, run.seed))
    ours = []
    for place, pairs in seen.items():
        over_seeds = mean_and_deviation([value for value, _ in pairs])
        if over_seeds is not None:
            seeds = " ".join(str(seed) for _, seed in pairs)
            ours.append(Point("ours", *place, over_seeds.mean, over_seeds.std, seeds))
    return ours + _papers(name, scale)


Place = tuple[str, str, float | str, str]  # benchmark, series, x, metric
Values = Iterator[tuple[str, float | str, str, float]]  # series, x, metric, value


def _final(run: PlannedRun, record: RunRecord) -> Values:
    assert run.x is not None
    for metric in METRICS:
        value = value_of(record, metric, MetricNames())
        if value is not None:
            yield run.series, run.x, metric, value


def _by_task(run: PlannedRun, record: RunRecord) -> Values:
    for t, value in enumerate(record.after_each_task("tasks"), start=1):
        yield run.series, float(t), "accuracy", 100 * float(value)


def _losses(run: PlannedRun, record: RunRecord) -> Values:
    for t, losses in sorted(read_losses(record.folder).items()):
        for j, loss in enumerate(losses, start=1):
            yield f"{run.series}, task {j}", float(t + 1), "loss", loss


def _papers(name: str, scale: str) -> list[Point]:
    """The paper prints numbers of its figures only in its main table."""
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
