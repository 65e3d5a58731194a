"""Groups runs that differ only in their seed: they share a row of a table and a line of a figure."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mambacl.nullspace.settings import SETTINGS
from mambacl.reports.runs import Floats, RunRecord
from mambacl.training.identity import SEEDS, defining, flatten
from mambacl.training.recipe import RECIPES

SHOWN_DIFFERENCES = 3
STORES = "*"  # behind the name of a method that stores images


@dataclass(frozen=True)
class Value:
    """The mean over seeds and, for two or more seeds, the sample standard deviation; in per cent unless the table says
    otherwise."""

    mean: float
    std: float | None = None


def mean_and_deviation(values: Sequence[float | None], scale: float = 1.0) -> Value | None:
    """The mean and deviation of some values; None if one of them is missing."""
    known = [scale * value for value in values if value is not None and np.isfinite(value)]
    if not known or len(known) < len(values):
        return None
    return Value(float(np.mean(known)), float(np.std(known, ddof=1)) if len(known) > 1 else None)


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    name: str
    """the method, and what distinguishes this group from others with the same method, backbone and benchmark"""
    label: str
    """the name, with backbone and benchmark if these differ as well"""
    runs: tuple[RunRecord, ...]

    @property
    def first(self) -> RunRecord:
        return self.runs[0]

    @property
    def finished(self) -> bool:
        return self.first.finished

    @property
    def seeds(self) -> str:
        return ", ".join(str(run.seed) for run in self.runs)

    @property
    def progress(self) -> str:
        """ "4 of 10 tasks" for unfinished runs, empty for finished ones."""
        return "" if self.finished else f"{self.first.tasks_done} of {len(self.first.tasks)} tasks"

    def metric(self, name: str) -> Value | None:
        """A metric of finished runs; None for unfinished ones, whose value would not compare with final ones."""
        return self.summary(lambda run: run.metric(name)) if self.finished else None

    def summary(self, of: Callable[[RunRecord], float | None], scale: float = 100.0) -> Value | None:
        """Mean and deviation of a value of each run, times `scale`."""
        return mean_and_deviation([of(run) for run in self.runs], scale)

    def after_each_task(self, over: str) -> tuple[Floats, Floats | None]:
        """Accuracy in per cent after each task: the mean over seeds and, for two or more, the sample deviation."""
        curves = 100 * np.stack([run.after_each_task(over) for run in self.runs])  # (seeds, tasks)
        return curves.mean(axis=0), curves.std(axis=0, ddof=1) if len(curves) > 1 else None


def group_runs(records: Iterable[RunRecord]) -> list[Group]:
    """Groups in the order of their first run; the runs of a group are sorted by seed.

    Unfinished runs are kept apart, so that no mean mixes different numbers of tasks.
    """
    gathered: dict[tuple[Any, ...], list[RunRecord]] = {}
    for record in records:
        progress = ("all" if record.finished else record.tasks_done, len(record.tasks))
        key = (*_kind(record), json.dumps(experiment(record), sort_keys=True), *progress)
        gathered.setdefault(key, []).append(record)
    groups = [sorted(runs, key=_seed_order) for runs in gathered.values()]
    firsts = [runs[0] for runs in groups]
    backbones = len({run.backbone for run in firsts}) > 1
    benchmarks = len({run.benchmark for run in firsts}) > 1
    named = []
    for runs in groups:
        mark = STORES if any(run.stored_images is not None for run in runs) else ""
        name = runs[0].method + mark + _differences(runs[0], [run for run in firsts if _kind(run) == _kind(runs[0])])
        label = name + (f", {runs[0].backbone}" if backbones else "") + (f", {runs[0].benchmark}" if benchmarks else "")
        named.append(Group(name, label, tuple(runs)))
    return named


def common_headline(records: Iterable[RunRecord]) -> str:
    """The average to use for all runs: over images only if every run's headline is that, else over tasks."""
    return "images" if {record.headline for record in records} == {"images"} else "tasks"


def experiment(record: RunRecord) -> dict[str, str]:
    """The options that the runs of a group share, by dotted name and as text."""
    return {key: text(value) for key, value in defining(record.config).items() if key not in SEEDS}


def text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def differing_options(records: Sequence[RunRecord]) -> list[str]:
    """The options that differ between the runs, except seeds."""
    configs = [experiment(record) for record in records]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    differing = [key for key in keys if len({config.get(key) for config in configs}) > 1]
    implied = set(differing)
    for config in configs:
        implied &= _implied(config)
    return [key for key in differing if key not in implied]


def departures(record: RunRecord) -> list[str]:
    """How a run departs from the paper: another setting or recipe, fewer training images, and changes to the recipe."""
    config = experiment(record)
    words = [f"{word} {config[word]}" for word in ("setting", "recipe") if config.get(word, "paper") != "paper"]
    if (images := config.get("stream.train_per_class", "null")) != "null":
        words.append(f"train_per_class {images}")
    if config.get("recipe") not in RECIPES:
        return words
    implied = _implied(config)
    changed = [key for key in config if key.startswith("training.") and key not in implied]
    return words + [f"{key.removeprefix('training.')} {_short(config[key])}" for key in changed]


def _implied(config: Mapping[str, str]) -> set[str]:
    """Keys whose values are those of the configuration's named setting and recipe."""
    known: dict[str, Any] = {}
    for group, word, named in (("nullspace", "setting", SETTINGS), ("training", "recipe", RECIPES)):
        name = config.get(word, "")
        if name in named:
            known |= flatten(dataclasses.asdict(named[name]), f"{group}.")
    return {key for key, value in known.items() if config.get(key) == text(value)}


def _differences(record: RunRecord, siblings: Sequence[RunRecord]) -> str:
    """What to add to a method's name, as in ", eta=0.9"; a key is shortened to its last word if that is unique."""
    keys = differing_options(siblings)
    if not keys:
        return ""
    config = experiment(record)
    tails = [key.rpartition(".")[2] for key in keys]
    words = [
        f"{tail if tails.count(tail) == 1 else key}={_short(config.get(key, 'unset'))}"
        for key, tail in zip(keys, tails, strict=True)
    ]
    more = len(words) - SHOWN_DIFFERENCES
    return ", " + ", ".join(words[:SHOWN_DIFFERENCES]) + (f", {more} more" if more > 0 else "")


def _short(value: str) -> str:
    """A value, short enough for a name."""
    return value if len(value) <= 24 else value[:23] + "…"


def _kind(record: RunRecord) -> tuple[str, str, str]:
    return record.method, record.backbone, record.benchmark


def _seed_order(record: RunRecord) -> tuple[int, float, str]:
    """Sorts seeds that are numbers by value, before any others."""
    number = isinstance(record.seed, int | float)
    return (0, float(record.seed), "") if number else (1, 0.0, str(record.seed))
