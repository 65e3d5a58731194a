"""Chooses options on training images that are held back: `mambacl tune` and `mambacl.tune`.

Every run of a search holds back a share of the training images of each class and is evaluated on those. Three things
keep the test images out: the configuration of every run says so before it starts, `data.stream.open_data` then replaces
the test images before a stream is made, and the choice refuses a run whose stream.json does not say what was held back.
"""

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mambacl.config import RunConfig, preset_names, resolve
from mambacl.errors import UserError
from mambacl.files import expanded, write_bytes, write_json
from mambacl.lazy import own_version
from mambacl.options import merge, nested
from mambacl.sweeps import search
from mambacl.sweeps.api import Work, results_of, train_all
from mambacl.sweeps.engines import EngineName
from mambacl.sweeps.plan import Plan, PlannedRun, checked, label_of
from mambacl.sweeps.search import Point, Space, chosen_points, space_of
from mambacl.sweeps.states import FINISHED, Entry
from mambacl.sweeps.view import View, make_view
from mambacl.training.folder import RunFolder
from mambacl.training.identity import EXECUTION, flatten
from mambacl.training.metrics import METRICS
from mambacl.training.provenance import commit

EVIDENCE, BEST = "tune.json", "best.yaml"  # in the search's folder
HELD_BACK = 0.2
OWN = {
    "seed": "name the seeds with --seeds",
    "stream.validation": "--validation sets it",
    "stream.test_share": "it would change which images are the test images",
    "out": "every run has its own folder in --out",
    "name": "a run has the name of its preset",
}
METRIC = "final_accuracy_tasks"


@dataclass(frozen=True)
class Question:
    """What is searched, and how a point is judged."""

    preset: str
    options: Mapping[str, Any]
    """of every run, nested"""
    space: Space
    points: tuple[Point, ...]
    seeds: tuple[int, ...]
    metric: str
    validation: float
    trials: int | None = None
    search_seed: int = 0

    @property
    def better(self) -> str:
        return METRICS.get(self.metric).better or "max"


@dataclass(frozen=True)
class Tried:
    """A point with the values of its runs, by seed."""

    point: Point
    values: tuple[float | None, ...]
    """None for a run that failed"""
    seconds: float
    """of all its runs"""
    runs: tuple[str, ...]
    failed: dict[str, str]
    """why runs failed"""

    @property
    def mean(self) -> float | None:
        known = [value for value in self.values if value is not None]
        return statistics.fmean(known) if len(known) == len(self.values) else None

    @property
    def deviation(self) -> float | None:
        """Over seeds; None if there is one."""
        known = [value for value in self.values if value is not None]
        return statistics.stdev(known) if 1 < len(known) == len(self.values) else None


@dataclass(frozen=True)
class Tuned:
    """The outcome of a search."""

    folder: Path
    tried: tuple[Tried, ...]
    best: Tried | None
    """None if no point has all its runs"""
    warnings: tuple[str, ...]

    @property
    def options(self) -> Path:
        """The YAML file with the best options, for `mambacl train`."""
        return self.folder / BEST


def ask(
    preset: str | Path,
    given: Mapping[str, Any],
    overrides: Mapping[str, Any],
    seeds: Sequence[int] = (0,),
    validation: float = HELD_BACK,
    metric: str = METRIC,
    trials: int | None = None,
    search_seed: int = 0,
) -> Question:
    """Checks what is to be searched. `given`: by option, a list of values, a pair for a range, or their text."""
    METRICS.check(metric)
    if METRICS.get(metric).better is None:
        raise UserError(f"The metric {metric} has no best value: choose another one.")
    if not 0 < validation < 1:
        raise UserError(f"validation is a share of the training images between 0 and 1, got {validation}.")
    space = space_of({name.replace("-", "_"): values for name, values in flatten(given).items()})
    options = flatten(nested(overrides))
    for name, remedy in OWN.items():
        if name in options or name in space:
            raise UserError(f"A search cannot set {name}: {remedy}.")
    if twice := [name for name in space if any(f"{other}.".startswith(f"{name}.") for other in options)]:
        raise UserError(f"{twice[0]} is searched, and also one of the options of every run: remove one.")
    found = chosen_points(space, trials, search_seed)
    return Question(
        str(preset), nested(overrides), space, tuple(found), tuple(dict.fromkeys(seeds)), metric, validation, trials,
        search_seed,
    )  # fmt: skip


def plan_of(question: Question, out: Path | None = None) -> Plan:
    """The runs of a search, each of which holds back training images."""
    first = checked(_config(question, question.points[0], question.seeds[0]))
    methods = question.options.get("method", "several" if "method" in question.space else first.method)
    name = f"tune-{first.name}-{methods}"
    folder = Path("runs") / name if out is None else out
    runs: dict[str, PlannedRun] = {}
    for point in question.points:
        label = label_of({option: value for option, value in point.items() if option != "method"})
        for seed in question.seeds:
            config = checked(_config(question, point, seed))
            assert config.stream.validation == question.validation, "a search must not see the test images"
            key = f"{config.method}{label}-{seed}"
            while key in runs:
                key += "+"
            runs[key] = PlannedRun(key, dataclasses.replace(config, out=str(folder / key)))
    return Plan(name, folder, tuple(runs.values()))


def _config(question: Question, point: Point, seed: int) -> RunConfig:
    own = merge(merge(question.options, nested(point)), {"seed": seed})
    return resolve(question.preset, merge(own, {"stream": {"validation": question.validation}}))


def judge(question: Question, plan: Plan, entries: Sequence[Entry]) -> Tuned:
    """Chooses the best point, and writes the evidence and the best options."""
    per_point = len(question.seeds)
    groups = [entries[i : i + per_point] for i in range(0, len(entries), per_point)]
    tried = tuple(_tried(question, point, own) for point, own in zip(question.points, groups, strict=True))
    place = search.first_best([one.mean for one in tried], question.better)
    best = None if place is None else tried[place]
    found = Tuned(plan.folder, tried, best, () if best is None else tuple(_warnings(question, tried, best)))
    finished = next((entry for entry in entries if entry.state == FINISHED), None)
    write_json(plan.folder / EVIDENCE, _evidence(question, found, finished))
    if best is not None:
        write_bytes(found.options, _best_options(question, plan, best).encode())
    return found


def _tried(question: Question, point: Point, entries: Sequence[Entry]) -> Tried:
    values: list[float | None] = []
    seconds = 0.0
    for entry in entries:
        if entry.state != FINISHED:
            values.append(None)
            continue
        results, held = results_of(entry), RunFolder(entry.run.folder).stream().get("validation")
        if held != question.validation:
            raise UserError(
                f"{entry.run.folder} was not evaluated on held-back training images (validation {held}): remove that "
                "folder, or choose another --out."
            )
        values.append(float(results["metrics"][question.metric]))
        seconds += sum(results["seconds"].values())
    failed = {entry.run.key: entry.reason for entry in entries if entry.state != FINISHED}
    return Tried(point, tuple(values), seconds, tuple(entry.run.key for entry in entries), failed)


def _warnings(question: Question, tried: Sequence[Tried], best: Tried) -> list[str]:
    found = []
    for name, which, value in search.ends(question.space, best.point):
        further = "smaller" if which == "smallest" else "larger"
        found.append(f"The best {name}, {value:g}, is at the end of what was searched: try {further} values.")
    close = [one for one in tried if one is not best and one.mean is not None and best.mean is not None
             and abs(one.mean - best.mean) < (best.deviation or 0.0)]  # fmt: skip
    if close:
        found.append(
            f"{len(close)} other point{'s differ' if len(close) > 1 else ' differs'} from the best by less than its "
            "seeds do among themselves: more seeds would tell more."
        )
    return found


def _evidence(question: Question, found: Tuned, finished: Entry | None) -> dict[str, Any]:
    """What the choice rests on: the content of tune.json."""
    results = {} if finished is None else results_of(finished)
    stream = {} if finished is None else RunFolder(finished.run.folder).stream()
    return {
        "schema": 1,
        "preset": question.preset,
        "options": question.options,
        "search": search.as_json(question.space),
        "kind": "grid" if question.trials is None else "random",
        "trials": len(question.points),
        "search_seed": None if question.trials is None else question.search_seed,
        "seeds": list(question.seeds),
        "metric": question.metric,
        "better": question.better,
        "validation": {
            "share": question.validation,
            "of": "the training images of each class; the test images were not read",
            "trained_on": sum(stream.get("train", [])),
            "evaluated_on": sum(stream.get("test", [])),
        },
        "best": None if found.best is None else _as_json(found.best),
        "warnings": list(found.warnings),
        "tried": [_as_json(one) for one in found.tried],
        "versions": {"mambacl": own_version(), "commit": commit(), **results.get("versions", {})},
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _as_json(one: Tried) -> dict[str, Any]:
    found = {"point": one.point, "mean": one.mean, "deviation": one.deviation, "values": list(one.values)}
    return {**found, "seconds": round(one.seconds, 1), "runs": list(one.runs), "failed": one.failed}


def _best_options(question: Question, plan: Plan, best: Tried) -> str:
    """A file for `mambacl train`: the preset with the best options, evaluated on the test images."""
    config = plan.runs[question.points.index(best.point) * len(question.seeds)].config
    own = merge(question.options, nested(best.point))
    if isinstance(own.get("stream"), Mapping) and own["stream"].get("root") is not None:
        own = merge(own, {"stream": {"root": config.stream.root}})
    kept = nested({name: value for name, value in flatten(own).items() if name not in EXECUTION})
    preset = question.preset
    extends = preset if preset in preset_names() else str(expanded(preset).absolute())
    content = {"extends": extends, "name": f"{config.name}-tuned", "method": config.method}
    content = merge(merge(content, kept), {"stream": {"validation": None}})
    head = (
        f"# The best of {len(question.points)} points by {question.metric} on {question.validation:g} of the training "
        f"images of each class,\n# which were held back. {EVIDENCE} has all points.\n"
    )
    return head + yaml.safe_dump(content, sort_keys=False)


def tune(
    preset: str | Path,
    search: Mapping[str, Any],
    *,
    trials: int | None = None,
    search_seed: int = 0,
    seeds: Sequence[int] = (0,),
    validation: float = HELD_BACK,
    metric: str = METRIC,
    out: str | Path | None = None,
    engine: EngineName = "local",
    jobs: int | None = None,
    engine_options: Mapping[str, Any] | None = None,
    retries: int = 1,
    **overrides: Any,
) -> Tuned:
    """Searches for the best options of a preset or file, on training images that are held back.

        mambacl.tune("demo", {"training.lr": [2e-4, 6e-4], "training.passes": [1, 3]}, method="mamba-cl", seeds=[0, 1])

    `search`: by option, a list of values, or a pair (low, high) from which `trials` numbers are drawn, uniformly on a
    logarithmic scale. Without `trials`, every combination is tried. The best has the best mean of `metric` over
    `seeds`. `overrides`: options of every run; the others are those of `mambacl.sweep`. Interrupted searches continue.
    """
    question = ask(preset, search, overrides, seeds, validation, metric, trials, search_seed)
    plan = plan_of(question, None if out is None else Path(out))
    return search_on(question, plan, Work(engine, jobs, engine_options, retries, keep_checkpoints=False), make_view())


def search_on(question: Question, plan: Plan, work: Work, view: View) -> Tuned:
    """Trains the runs of a search and judges them."""
    return judge(question, plan, train_all(plan, work, view))


def table(question: Question, found: Tuned) -> str:
    """The points, the best first."""
    from mambacl.reports.groups import Value, text
    from mambacl.reports.rendering import to_text
    from mambacl.reports.tables import Cell, Column, Table, one_decimal

    best: Any = "max" if question.better == "max" else "min"
    metric = METRICS.get(question.metric)
    columns = [*(Column(name, text=True) for name in question.space), Column(metric.title, best), Column("seconds")]
    sign = -1 if question.better == "max" else 1
    order = sorted(found.tried, key=lambda one: (one.mean is None, sign * (one.mean or 0.0)))
    rows: list[tuple[Cell, ...]] = []
    for one in order:
        std = None if one.deviation is None else 100 * one.deviation
        value = None if one.mean is None else Value(100 * one.mean, std)
        rows.append((*(text(one.point[name]) for name in question.space), value, one_decimal(one.seconds)))
    notes = [
        metric.sentence,
        f"per cent, on {question.validation:g} of the training images of each class, held back; seeds "
        f"{', '.join(map(str, question.seeds))}",
    ]
    caption = f"{question.preset}: {len(found.tried)} points, the best first"
    return to_text(Table(caption, tuple(columns), tuple(rows), tuple(notes)))
