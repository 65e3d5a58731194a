"""Compares our runs with a table of the paper: which run belongs to which cell, and how far the values differ.

A run's benchmark follows from its data set and tasks, not from its preset's name. A run with other images, classes or
tasks than the paper's gets a separate column.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mambacl.backbones import create_model
from mambacl.backbones.flops import count_flops
from mambacl.backbones.registry import MODELS
from mambacl.methods import METHODS
from mambacl.nullspace.settings import PAPER_KINDS
from mambacl.paper import rivals
from mambacl.paper.quoted import PaperTable, Quoted, Row, paper_table
from mambacl.reports.groups import Value, group_runs
from mambacl.reports.runs import RunRecord
from mambacl.training.metrics import METRICS
from mambacl.training.seconds import AROUND

CLASSES = {"cifar100": 100, "imagenet-r": 200, "domainnet-s200": 200}
"""number of classes in each of the paper's data sets"""
AVERAGE = "average"
"""the column that is a mean over the others"""
PLAIN = ("mamba-cl", "sequential", "frozen")
"""methods that add nothing to the backbone: for others, the model's FLOPs are too few"""
Key = tuple[str, str]


@dataclass(frozen=True)
class MetricNames:
    """Which of our metrics to compare with the paper's accuracy and forgetting; the defaults are its formulas."""

    accuracy: str = "final_accuracy_tasks"
    forgetting: str = "forgetting"

    def __post_init__(self) -> None:
        for name in (self.accuracy, self.forgetting):
            METRICS.check(name)


@dataclass
class Line:
    """A row of the paper, or an additional one, with our values and the paper's."""

    name: str
    row: Row | None = None
    ours: dict[Key, Value] = field(default_factory=dict)
    shares: dict[Key, float] = field(default_factory=dict)
    """the values as shares of another row, where the paper prints them, too"""
    runs: list[RunRecord] = field(default_factory=list)

    @property
    def venue(self) -> str:
        return self.row.venue if self.row else ""

    def paper(self, key: Key) -> Quoted | None:
        return self.row.values.get(key) if self.row else None

    def difference(self, key: Key) -> float | None:
        """Our value minus the paper's, in the same unit."""
        ours, paper = self.ours.get(key), self.paper(key)
        return None if ours is None or paper is None else ours.mean - paper.mean

    def seeds(self, benchmark: str) -> list[str]:
        return [str(run.seed) for run in self.runs if benchmark_of(run) == benchmark]

    @property
    def state(self) -> str:
        """Where our values come from, in words."""
        tools = list(dict.fromkeys(run.imported for run in self.runs if run.imported))
        if self.runs:
            seeds = ", ".join(dict.fromkeys(str(run.seed) for run in self.runs))
            return f"{'imported: ' + ', '.join(tools) + ', ' if tools else ''}seeds {seeds}"
        if self.ours:
            return "from the rows above"
        if self.row is None or self.row.source == "derived":
            return "paper only"
        run, known = self.row.run, METHODS.names()
        own = rivals.method_of(self.row.method) if run is None else run.get("method", "mamba-cl")
        return "no run given" if own in known else "not in mambacl"


@dataclass(frozen=True)
class Comparison:
    table: PaperTable
    names: MetricNames
    keys: tuple[Key, ...]
    """the paper's columns, then those of other benchmarks"""
    lines: tuple[Line, ...]
    left_out: tuple[RunRecord, ...]
    """unfinished runs"""
    notes: tuple[str, ...] = ()
    """what a reader should know about all runs"""


def compare_with_paper(
    name: str, records: Sequence[RunRecord], names: MetricNames | None = None, notes: Sequence[str] = ()
) -> Comparison:
    """The paper's table `name` with the values of our runs: mean and sample deviation over seeds."""
    table, names = paper_table(name), names or MetricNames()
    finished = [record for record in records if record.finished]
    lines: list[Line] = []
    for row in table.rows:
        found = _lines(row.method, row, [run for run in finished if matches(row, run)], table, names)
        lines += found or [Line(row.method, row)]
    rest = [run for run in finished if not any(matches(row, run) for row in table.rows)]
    for method in dict.fromkeys(run.method for run in rest):
        lines += _lines(method, None, [run for run in rest if run.method == method], table, names)
    for line in lines:
        words = dict.fromkeys(map(words_about, line.runs))
        line.name += "".join(f" ({said})" for said in words if said)
    _derive(table, lines)
    benchmarks = dict.fromkeys((*table.columns, *(key[0] for line in lines for key in line.ours)))
    keys = tuple((benchmark, metric) for benchmark in benchmarks for metric in (*table.metrics, *table.own))
    left_out = tuple(record for record in records if not record.finished)
    return Comparison(table, names, keys, tuple(lines), left_out, tuple(notes))


def _derive(table: PaperTable, lines: Sequence[Line]) -> None:
    """Adds what the paper computes from other rows: the mean over benchmarks, the increase, the share of a part."""
    columns = [name for name in table.columns if name != AVERAGE]
    for line in lines:
        every = [line.ours.get((name, "minutes")) for name in columns]
        if len(columns) < len(table.columns) and all(every):
            line.ours[AVERAGE, "minutes"] = Value(float(np.mean([value.mean for value in every if value])))
    for line in lines:
        row = line.row
        if row is not None and row.source == "derived":
            before, after = (_only(lines, method) for method in ("sequential", "mamba-cl"))
            for key in after.keys() & before.keys():
                line.ours[key] = Value(after[key].mean - before[key].mean)
                line.shares[key] = line.ours[key].mean / before[key].mean if before[key].mean else 0.0
        elif row is not None and row.run is not None and "metric" in row.run:
            total = _only(lines, "mamba-cl")
            line.shares |= {key: value.mean / total[key].mean for key, value in line.ours.items() if key in total}


def _only(lines: Sequence[Line], method: str) -> Mapping[Key, Value]:
    """The values in the only row of a method; empty if it has several rows, which differ in other ways."""
    found = [line for line in lines if line.row and line.row.run and dict(line.row.run) == {"method": method}]
    return found[0].ours if len(found) == 1 else {}


def matches(row: Row, run: RunRecord) -> bool:
    """Whether a run belongs to a row of the paper; runs of other tools are matched by the method's name."""
    if run.imported:
        return _without_signs(run.method) == _without_signs(row.method)
    if row.run is None:
        return on_vit(run) and rivals.method_of(row.method) == run.method
    wanted = row.run
    if on_vit(run):  # the paper's own rows are of Mamba backbones
        return False
    return (
        wanted.get("method", run.method) == run.method
        and wanted.get("backbone", "") in run.backbone
        and ("pretrained" not in wanted or run.config.get("pretrained") is False)
        and ("projects" not in wanted or projections(run) == set(wanted["projects"]))
    )


def on_vit(run: RunRecord) -> bool:
    return run.backbone.startswith("vit")


def words_about(run: RunRecord) -> str:
    """What the reader must know about a run of ours, besides its method."""
    options = run.config.get("options")
    return rivals.words_about(run.method, run.backbone, options if isinstance(options, Mapping) else {})


def projections(run: RunRecord) -> set[str] | None:
    """The kinds of parameters whose updates a run projects; None if it is not an ablation of Mamba-CL, i.e. has another
    method or does not train one of the kinds."""
    if run.method == "sequential":
        return set()
    if run.method != "mamba-cl":
        return None
    rules = run.config.get("nullspace")
    rules = rules if isinstance(rules, Mapping) else {}
    if any(_says_no(rules.get(kind), "trains") for kind in PAPER_KINDS):
        return None
    return {kind for kind in PAPER_KINDS if not _says_no(rules.get(kind), "projected")}


def benchmark_of(run: RunRecord) -> str:
    """The data set and the number of tasks, and how the run differs from the paper's benchmark."""
    stream = run.config.get("stream")
    dataset = stream.get("dataset") if isinstance(stream, Mapping) else None
    if not isinstance(stream, Mapping) or dataset not in CLASSES or run.imported:
        return run.benchmark
    sizes = [len(task) for task in run.tasks]
    name = f"{dataset}-{len(sizes)}"
    if sum(sizes) != CLASSES[dataset]:
        name += f", {sum(sizes)} classes"
    if len(set(sizes)) > 1:
        name += ", uneven tasks"
    if stream.get("train_per_class"):
        name += f", {stream['train_per_class']} images per class"
    if stream.get("validation"):
        name += ", on validation images"
    if run.scenario != "class":
        name += f", {run.scenario}-incremental"
    if run.skipped:
        name += f", without {len(run.skipped)} unreadable images"
    return name


def value_of(run: RunRecord, metric: str, names: MetricNames) -> float | None:
    """A run's value in the unit of the paper's column; None if the run does not have it."""
    if metric in ("accuracy", "forgetting"):
        value = run.metric(getattr(names, metric))
        return None if value is None else 100 * value
    of = COSTS.get(metric)
    return None if of is None or run.imported else of(run)


def _lines(name: str, row: Row | None, runs: Sequence[RunRecord], table: PaperTable, names: MetricNames) -> list[Line]:
    """One line for all benchmarks; several if the runs differ in more than benchmark and seed."""
    kinds = dict.fromkeys(map(_kind, runs))
    differing = [len({kind[i] for kind in kinds}) > 1 for i in range(3)]
    lines: dict[tuple[object, str], Line] = {}
    for kind in kinds:
        words = [word for word, differs in zip(kind, differing, strict=True) if differs and word]
        own = [run for run in runs if _kind(run) == kind]
        for benchmark in dict.fromkeys(map(benchmark_of, own)):
            taken: set[str] = set()
            for group in group_runs([run for run in own if benchmark_of(run) == benchmark]):
                suffix = _unused(group.name.removeprefix(group.first.method), taken)
                label = name + (f" ({', '.join(words)})" if words else "") + suffix
                line = lines.setdefault((kind, suffix), Line(label, row))
                line.runs += group.runs
                for metric in (*table.metrics, *table.own):
                    of = str(row.run.get("metric", metric)) if row and row.run else metric
                    value = group.summary(lambda run, of=of: value_of(run, of, names), scale=1.0)  # type: ignore[misc]
                    if value is not None:
                        line.ours[benchmark, metric] = value
    return list(lines.values())


def _kind(run: RunRecord) -> tuple[str, str, str]:
    return run.backbone, str(run.config.get("setting") or ""), str(run.config.get("recipe") or "")


def _unused(suffix: str, taken: set[str]) -> str:
    """Numbers the suffix if it is taken: different groups can be shortened to the same name."""
    number = 1
    while (found := suffix if number == 1 else f"{suffix} ({number})") in taken:
        number += 1
    taken.add(found)
    return found


def _says_no(rule: object, word: str) -> bool:
    return isinstance(rule, Mapping) and rule.get(word) is False


def _without_signs(name: str) -> str:
    """For matching names: coda_prompt and CODA-Prompt are the same method."""
    return "".join(sign for sign in name.lower() if sign.isalnum() or sign == "+")


# What a run costs, in the units of the paper's tables: from its results, or from its model on the meta device


def _minutes(run: RunRecord) -> float | None:
    """Minutes of the work itself, without starting, reading and writing, which the paper's times leave out."""
    seconds = [value for phase, value in _seconds(run).items() if phase not in AROUND]
    return sum(seconds) / 60 if seconds else None


def _decomposition_minutes(run: RunRecord) -> float | None:
    seconds = _seconds(run)
    return seconds["decomposition"] / 60 if "decomposition" in seconds else None


def _inference_ms(run: RunRecord) -> float | None:
    """Time of all evaluations, per evaluated image. Each evaluation covers the tasks learned so far."""
    seconds, total = _seconds(run).get("evaluate"), run.results["total"]
    images = sum(sum(total[: len(row)]) for row in run.results["correct"])
    return 1000 * seconds / images if seconds and images else None


def _peak_gib(run: RunRecord) -> float | None:
    peak = run.results.get("peak_memory_bytes")
    return peak / 2**30 if isinstance(peak, int | float) and peak > 0 else None


def _gflops(run: RunRecord) -> float | None:
    known = _model(run)
    return known[1] / 1e9 if known and run.method in PLAIN else None


def _parameters(run: RunRecord) -> float | None:
    """Parameters of the backbone, in millions."""
    known = _model(run)
    return known[0] / 1e6 if known else None


COSTS = {
    "minutes": _minutes,
    "decomposition_minutes": _decomposition_minutes,
    "inference_ms": _inference_ms,
    "peak_gib": _peak_gib,
    "gflops": _gflops,
    "parameters": _parameters,
}


def _seconds(run: RunRecord) -> Mapping[str, float]:
    return run.results.get("seconds", {})


def _model(run: RunRecord) -> tuple[int, int] | None:
    """Parameters and operations of the run's backbone; None if it is not registered."""
    if run.backbone not in MODELS.names():
        return None
    transforms = (run.config.get("stream") or {}).get("transforms") or {}
    options = run.config.get("backbone_options") or {}
    return _sizes(run.backbone, json.dumps(options, sort_keys=True), transforms.get("image_size"))


@functools.cache
def _sizes(backbone: str, options: str, size: int | None) -> tuple[int, int]:
    with torch.device("meta"):
        model: Any = create_model(backbone, num_classes=0, **json.loads(options)).eval()
        operations, _ = count_flops(model, size or model.default_cfg["input_size"][-1])
    return sum(parameter.numel() for parameter in model.parameters()), operations
