"""Turns run records into tables. `rendering` turns tables into text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mambacl.reports.groups import STORES, Group, Value, common_headline, differing_options, experiment, group_runs
from mambacl.reports.runs import RunRecord
from mambacl.scenarios import SCENARIOS
from mambacl.training.metrics import list_metrics, table_metrics

Cell = str | Value | None
MOST_TASK_COLUMNS = 10
MISSING, MINUS = "\N{EN DASH}", "\N{MINUS SIGN}"


@dataclass(frozen=True)
class Column:
    title: str
    best: Literal["max", "min"] | None = None
    """which value of several to highlight"""
    text: bool = False
    """whether it has words, aligned left, instead of numbers"""


@dataclass(frozen=True)
class Table:
    """Columns and rows, independent of any format. A `Value` is in per cent; None is a missing value."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def shown(self, cell: Cell) -> str:
        if cell is None:
            return MISSING
        if isinstance(cell, str):
            return cell
        return one_decimal(cell.mean) + ("" if cell.std is None else f" ± {one_decimal(cell.std)}")

    def is_best(self, row: int, column: int) -> bool:
        """Whether this value, as printed, is the best in its column; never if all are equal."""
        best, cell = self.columns[column].best, self.rows[row][column]
        others = [other[column] for other in self.rows]
        means = [one_decimal(other.mean) for other in others if isinstance(other, Value)]
        if best is None or not isinstance(cell, Value) or len(set(means)) < 2:
            return False
        return one_decimal(cell.mean) == (max if best == "max" else min)(means, key=float)


def comparison_table(records: Sequence[RunRecord], tasks: Literal["none", "some", "all"] = "some") -> Table:
    """One row per group of runs that differ only in their seed, with the metrics and the accuracy after each task.

    `tasks`: whether to add the accuracy after "all" tasks, after "some" (at most ten, evenly spaced), or "none".
    """
    groups = group_runs(records)
    headline = common_headline(records)
    several_benchmarks = len({record.benchmark for record in records}) > 1
    several_backbones = len({record.backbone for record in records}) > 1
    shown_tasks = _task_columns(groups, tasks)
    rank = not several_benchmarks  # different benchmarks do not compare

    words = ["method", *["benchmark"] * several_benchmarks, *["backbone"] * several_backbones, "seeds"]
    columns = [Column(word, text=True) for word in words]
    metrics = table_metrics(headline)
    columns += [Column(metric.title, metric.better if rank else None) for metric in metrics]
    columns += [Column(f"after {task + 1}") for task in shown_tasks]
    rows = []
    for group in groups:
        row: list[Cell] = [group.name + (f" ({group.progress})" if group.progress else "")]
        row += [group.first.benchmark] * several_benchmarks + [group.first.backbone] * several_backbones
        row += [group.seeds, *(group.metric(metric.name) for metric in metrics)]
        row += _after(group, shown_tasks, headline)
        rows.append(tuple(row))
    caption = " and ".join(dict.fromkeys(record.benchmark for record in records)) + ", in per cent"
    return Table(
        caption, tuple(columns), tuple(rows), tuple(_notes(groups, headline, bool(shown_tasks), several_benchmarks))
    )


def progress_table(records: Sequence[RunRecord]) -> Table:
    """One row per group with the accuracy after each task (at most ten tasks)."""
    groups = group_runs(records)
    headline = common_headline(records)
    shown_tasks = _task_columns(groups, "some")
    columns = (Column("method", text=True), *(Column(f"{task + 1}") for task in shown_tasks))
    rows: list[tuple[Cell, ...]] = []
    for group in groups:
        name = group.label + (f" ({group.progress})" if group.progress else "")
        rows.append((name, *_after(group, shown_tasks, headline)))
    caption = f"Accuracy in per cent after the task in the column heading, mean over the {headline} seen"
    return Table(caption, columns, tuple(rows))


def metrics_table(record: RunRecord) -> Table:
    """All metrics of one run, with their formulas in words."""
    rows: list[tuple[Cell, ...]] = []
    for metric in list_metrics():
        value = record.metric(metric.name)
        rows.append((metric.name, None if value is None else Value(100 * value), metric.meaning))
    columns = (Column("metric", text=True), Column("per cent"), Column("formula", text=True))
    return Table("All metrics", columns, tuple(rows))


def differences_table(groups: Sequence[Group]) -> Table:
    """One row per option that differs between the groups."""
    firsts = [group.first for group in groups]
    configs = [experiment(record) for record in firsts]
    rows = tuple((key, *(config.get(key) for config in configs)) for key in differing_options(firsts))
    columns = (Column("setting", text=True), *(Column(group.label, text=True) for group in groups))
    return Table("Settings that differ", columns, rows)


def one_decimal(value: float) -> str:
    """The value with one decimal, and no negative zero."""
    text = f"{value:.1f}"
    return "0.0" if text == "-0.0" else text


def _task_columns(groups: Sequence[Group], tasks: str) -> list[int]:
    """Indices of the tasks with a column; always includes the last."""
    done = max((group.first.tasks_done for group in groups), default=0)
    if tasks == "none":
        return []
    if tasks == "all" or done <= MOST_TASK_COLUMNS:
        return list(range(done))
    step = -(-done // MOST_TASK_COLUMNS)
    return sorted({done - 1 - i * step for i in range(MOST_TASK_COLUMNS) if done - 1 - i * step >= 0})


def _after(group: Group, shown_tasks: Sequence[int], headline: str) -> list[Cell]:
    mean, std = group.after_each_task(headline)
    cells: list[Cell] = []
    for task in shown_tasks:
        known = task < len(mean) and np.isfinite(mean[task])
        cells.append(Value(float(mean[task]), None if std is None else float(std[task])) if known else None)
    return cells


def _notes(groups: Sequence[Group], headline: str, shown_tasks: bool, several_benchmarks: bool) -> list[str]:
    """What a reader must know to compare the numbers with others."""
    runs = [run for group in groups for run in group.runs]
    notes = [metric.sentence for metric in table_metrics(headline)]
    if shown_tasks:
        over = "mean over the tasks seen" if headline == "tasks" else "share of all test images seen"
        notes.append(f"after t: accuracy after task t, {over}")
    for scenario in dict.fromkeys(run.scenario for run in runs if run.scenario != "class"):
        notes.append(f"{scenario}-incremental: the model {SCENARIOS[scenario]}")
    if any(len(group.runs) > 1 for group in groups):
        notes.append("several seeds: mean ± sample standard deviation")
    if any(run.headline != headline for run in runs):
        notes.append("some runs average over images by default; here all are averaged over tasks")
    if any(not group.finished for group in groups):
        notes.append("unfinished runs have no final values yet")
    for group in groups:
        if len({str(run.seed) for run in group.runs}) < len(group.runs):
            notes.append(f"{group.label}: a seed appears more than once, so the deviation is too small")
    if stored := [run.stored_images for run in runs if run.stored_images is not None]:
        notes.append(f"{STORES} stores training images of earlier tasks, up to {max(stored):,}; the others store none")
    tools = list(dict.fromkeys(run.imported for run in runs if run.imported))
    if tools:
        notes.append(f"imported from {', '.join(tools)}: accuracies from the file, with its own split and class order")
    images = {sum(run.results["total"]) for run in runs if run.finished and not run.imported}
    if len(images) > 1 and not several_benchmarks:
        notes.append(f"the runs were not tested on the same number of images: {min(images):,} to {max(images):,}")
    return notes
