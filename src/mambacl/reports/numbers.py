"""The numbers behind each chart, as a table that the page shows and offers as CSV."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mambacl.nullspace.audit import QUANTITIES
from mambacl.reports.groups import Group, Value, common_headline
from mambacl.reports.runs import Floats, RunRecord
from mambacl.reports.spectra import LISTED, FeatureSpectra, relative_spectrum, thinned
from mambacl.reports.tables import Cell, Column, Table


def run_curve(record: RunRecord) -> Table:
    """The accuracy of one run after each task."""
    seen, newest = 100 * record.after_each_task(record.headline), 100 * np.diag(record.accuracies())
    rows = tuple((str(t + 1), _percent(seen[t]), _percent(newest[t])) for t in range(len(seen)))
    return Table("Accuracy (%) after each task", _columns("task", f"all {record.headline} seen", "newest task"), rows)


def accuracy_matrix(record: RunRecord) -> Table:
    matrix = 100 * record.accuracies()
    rows = tuple((str(t + 1), *(_percent(value) for value in row)) for t, row in enumerate(matrix))
    titles = ("after task", *(f"task {j + 1}" for j in range(len(matrix))))
    return Table("Accuracy (%) on each task after each task", _columns(*titles), rows)


def forgetting(record: RunRecord) -> Table:
    matrix, lost = 100 * record.accuracies(), 100 * record.forgetting_by_task()
    rows = tuple(
        (str(j + 1), _percent(matrix[-1, j] + lost[j]), _percent(matrix[-1, j]), _percent(lost[j]))
        for j in range(len(lost))
    )
    titles = ("task", "best before the last task", "after the last task", "forgetting")
    return Table("What each task lost, in per cent and points", _columns(*titles), rows)


def training(record: RunRecord) -> Table:
    rows = tuple(
        (str(e["task"] + 1), str(e["epoch"] + 1), *(_general(e.get(name)) for name in ("loss", "accuracy", "lr")))
        for e in record.epochs
    )
    return Table("Training, epoch by epoch", _columns("task", "epoch", "loss", "accuracy", "learning rate"), rows)


def curves(groups: Sequence[Group]) -> Table:
    """The accuracy of each group after each task."""
    headline = common_headline(run for group in groups for run in group.runs)
    return _by_task(
        f"Accuracy (%) after each task, mean over the {headline} seen",
        {group.label: group.after_each_task(headline) for group in groups},
    )


def forgetting_curves(groups: Sequence[Group]) -> Table:
    lines = {}
    for group in groups:
        losses = 100 * np.stack([run.forgetting_by_task() for run in group.runs])
        lines[group.label] = losses.mean(axis=0), losses.std(axis=0, ddof=1) if len(losses) > 1 else None
    return _by_task("Forgetting of each task (points)", lines)


def _by_task(caption: str, lines: Mapping[str, tuple[Floats, Floats | None]]) -> Table:
    rows = []
    for t in range(max((len(mean) for mean, _ in lines.values()), default=0)):
        row: list[Cell] = [str(t + 1)]
        for mean, std in lines.values():
            known = t < len(mean) and np.isfinite(mean[t])
            row.append(Value(float(mean[t]), None if std is None else float(std[t])) if known else None)
        rows.append(tuple(row))
    return Table(caption, _columns("task", *lines), tuple(rows))


def final(groups: Sequence[Group]) -> Table:
    """Each run's final accuracy and forgetting: what the means and deviations come from."""
    headline = common_headline(run for group in groups for run in group.runs)
    names = (f"final_accuracy_{headline}", "forgetting")
    rows = []
    for group in groups:
        for run in group.runs if group.finished else ():
            found = (run.metric(name) for name in names)
            rows.append((group.label, str(run.seed), *(None if v is None else Value(100 * v) for v in found)))
    columns = (Column("group", text=True), *_columns("seed", "final accuracy", "forgetting"))
    return Table("Final accuracy (%) and forgetting (points) of each run", columns, tuple(rows))


def protected(entries: Sequence[FeatureSpectra]) -> Table:
    blocks = list(dict.fromkeys(block for entry in entries for block in entry.spectra))
    rows = []
    for block in blocks:
        found = [entry.spectra.get(block) for entry in entries]
        size = next(len(spectrum.values) for spectrum in found if spectrum is not None)
        rows.append((block, str(size), *(None if s is None else str(len(s.values) - s.rank) for s in found)))
    columns = (Column("block", text=True), *_columns("directions", *(entry.title for entry in entries)))
    return Table("Protected directions, by block", columns, tuple(rows))


def spectra(entry: FeatureSpectra) -> Table:
    rows = []
    for block, spectrum in entry.spectra.items():
        relative, size = relative_spectrum(spectrum.values), len(spectrum.values)
        for n in thinned(size, LISTED):
            rows.append((block, str(n), f"{relative[n - 1]:.3e}", "null" if n > size - spectrum.rank else "protected"))
    columns = (Column("block", text=True), *_columns("direction", "eigenvalue / largest"), Column("kind", text=True))
    note = f"at most {LISTED} directions per block; the run's checkpoints/task-NN.safetensors has all"
    return Table(f"Spectra behind {entry.title}", columns, tuple(rows), (note,))


def drift(audit: Mapping[str, Any]) -> Table:
    rows = tuple(
        (str(entry["task"] + 1), block, *(f"{found[q]:.3e}" if q in found else None for q in QUANTITIES))
        for entry in audit["tasks"]
        for block, found in entry["drift"].items()
    )
    columns = (Column("task"), Column("block", text=True), *_columns(*QUANTITIES.values()))
    return Table("Relative change, by task and block", columns, rows)


def updates(audit: Mapping[str, Any]) -> Table:
    """Of the last task, as in the heat map."""
    rows = []
    for part in audit["updates"][-1]["parts"]:
        computed_all, computed, applied_all, applied = part["moved"]
        shares = (100 * inside / whole if whole else np.nan for inside, whole in
                  ((computed, computed_all), (applied, applied_all)))  # fmt: skip
        rows.append((part["block"], part["kind"], *(f"{v:.4g}" if np.isfinite(v) else None for v in shares)))
    columns = (Column("block", text=True), Column("kind", text=True), Column("computed (%)"), Column("applied (%)"))
    return Table("Share of the last task's updates in protected directions", columns, tuple(rows))


def _columns(*titles: str) -> tuple[Column, ...]:
    return tuple(Column(title) for title in titles)


def _percent(value: float) -> Value | None:
    return Value(float(value)) if np.isfinite(value) else None


def _general(value: Any) -> str | None:
    return f"{value:.5g}" if isinstance(value, int | float) else None
