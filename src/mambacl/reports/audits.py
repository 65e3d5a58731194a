"""The consistency audit of a run as tables and heat maps: drift of features, and updates in protected directions."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from mambacl.nullspace.audit import QUANTITIES, shares
from mambacl.reports.figures import BLUES, QUIET, frame, power_of_ten, styled
from mambacl.reports.marks import mark
from mambacl.reports.runs import Floats
from mambacl.reports.tables import Column, Table

Audit = Mapping[str, Any]  # audit.json
RESOLUTION = 1e-8  # smallest relative change to draw: below it, float32 has no resolution


def drift_table(audit: Audit, task: int | None = None) -> Table:
    """A row per task with the median over the blocks and the largest in brackets; or a row per block of one `task`."""
    titles = tuple(Column(title) for title in QUANTITIES.values())
    note = "relative change of the norm, on kept training images of the task; accurate to about 1e-7 in float32"
    if task is None:
        rows = []
        for entry in audit["tasks"]:
            blocks = entry["drift"].values()
            found = [[block[quantity] for block in blocks if quantity in block] for quantity in QUANTITIES]
            cells = [f"{np.median(values):.1e} ({np.max(values):.1e})" if values else "–" for values in found]
            rows.append((str(entry["task"] + 1), str(entry["images"]), *cells))
        caption = f"How far each task's features have drifted after task {audit['after']}: median (largest block)"
        return Table(caption, (Column("task"), Column("images"), *titles), tuple(rows), (note,))
    entry = next((entry for entry in audit["tasks"] if entry["task"] == task), None)
    drift = {} if entry is None else entry["drift"]
    rows = [(block, *(f"{found[q]:.1e}" if q in found else "–" for q in QUANTITIES)) for block, found in drift.items()]
    caption = f"How far the features of task {task + 1} have drifted after task {audit['after']}, block by block"
    return Table(caption, (Column("block", text=True), *titles), tuple(rows), (note,))


def updates_table(audit: Audit) -> Table:
    """A row per task and kind of parameter: the share of the updates in protected directions."""
    rows = []
    for entry in audit["updates"]:
        for kind, (computed, applied) in by_kind(entry["parts"]).items():
            rows.append((str(entry["task"] + 1), kind, f"{100 * computed:.2f}", f"{100 * applied:.4g}"))
    columns = (Column("task"), Column("kind", text=True), Column("computed (%)"), Column("applied (%)"))
    note = (
        "share of the squared norm of all steps in directions protected for earlier tasks: as computed by the "
        "optimizer, and as applied after the projection"
    )
    return Table("Updates in protected directions", columns, tuple(rows), (note,))


def by_kind(parts: list[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Shares of the computed and of the applied updates, over all blocks."""
    sums: dict[str, Floats] = {}
    for part in parts:
        sums[part["kind"]] = sums.get(part["kind"], np.zeros(4)) + np.asarray(part["moved"], dtype=np.float64)
    return {kind: shares(total) for kind, total in sums.items()}


@styled
def drift_map(audit: Audit) -> Figure:
    """A heat map per quantity, with a row per task and a column per block, on a logarithmic scale."""
    tasks, blocks = audit["tasks"], list(audit["tasks"][0]["drift"])
    found = np.array(
        [
            [[entry["drift"][block].get(quantity, np.nan) for block in blocks] for entry in tasks]
            for quantity in QUANTITIES
        ]
    )  # (quantities, tasks, blocks)
    high = max(float(np.nanmax(found, initial=RESOLUTION)), 10 * RESOLUTION)
    low = max(float(np.nanmin(np.where(found > 0, found, np.nan), initial=high)), RESOLUTION)
    low = min(low, high / 10)
    figure = _maps(
        np.maximum(found, low), list(QUANTITIES.values()), [str(entry["task"] + 1) for entry in tasks], blocks,
        LogNorm(low, high), "relative change", f"Drift after task {audit['after']}", "task",
    )  # fmt: skip
    figure.supylabel("task whose images were kept", fontsize=9, x=0.012)
    return figure


@styled
def updates_map(audit: Audit) -> Figure:
    """The share of the last task's updates in protected directions: a row per kind of parameter, a column per block."""
    entry = audit["updates"][-1]
    blocks = list(dict.fromkeys(part["block"] for part in entry["parts"]))
    kinds = list(dict.fromkeys(part["kind"] for part in entry["parts"]))
    sums = np.zeros((len(kinds), len(blocks), 4))
    for part in entry["parts"]:
        sums[kinds.index(part["kind"]), blocks.index(part["block"])] += np.asarray(part["moved"])
    with np.errstate(invalid="ignore"):
        found = 100 * np.stack([sums[..., 1] / sums[..., 0], sums[..., 3] / sums[..., 2]])
    return _maps(
        found, ["as computed by the optimizer", "as applied"], kinds, blocks, Normalize(0, 100), "per cent",
        f"Updates of task {entry['task'] + 1} in directions protected for earlier tasks", "kind",
    )  # fmt: skip


def _maps(
    values: Floats, titles: Sequence[str], rows: Sequence[str], blocks: Sequence[str], scale: Normalize, unit: str,
    title: str, what: str,
) -> Figure:  # fmt: skip
    """Stacks heat maps (maps, rows, blocks) on one scale. They are one image, with empty rows in between."""
    step = len(rows) + 1
    stacked = np.pad(values, ((0, 0), (0, 1), (0, 0)), constant_values=np.nan).reshape(-1, len(blocks))[:-1]
    height = 1.3 + 0.34 * len(stacked)
    figure, (axes,) = frame(8.6, height, left=0.8, right=0.1, top=0.74, bottom=0.56)
    image = axes.imshow(np.ma.masked_invalid(stacked), cmap=BLUES, norm=scale, aspect="auto", interpolation="nearest")
    axes.set_yticks([step * i + row for i in range(len(titles)) for row in range(len(rows))], [*rows] * len(titles))
    names = [".".join(re.findall(r"\d+", block)) or block for block in blocks]
    every = max(1, -(-len(names) // 24))
    axes.set_xticks(range(0, len(names), every), names[::every])
    axes.set_xlabel("block", color=QUIET)
    for i, words in enumerate(titles):
        for row, name in enumerate(rows):
            found = zip(blocks, values[i, row], strict=True)
            said = [f"{words}, {what} {name}, {block}: {value:.3g}" for block, value in found]
            known = np.isfinite(values[i, row])
            mark(axes, np.where(known, np.arange(len(blocks)), np.nan), [step * i + row] * len(blocks), said, (1, 1))
    for i, words in enumerate(titles):
        axes.text(-0.5, step * i - 0.62, words, fontsize=9.5, fontweight="bold")
    axes.grid(False)
    axes.tick_params(length=0, labelsize=8.5)
    axes.spines[["left", "bottom"]].set_visible(False)
    bar = figure.colorbar(image, ax=axes, shrink=0.7, pad=0.02, aspect=30)
    bar.set_label(unit, fontsize=9)
    if isinstance(scale, LogNorm):
        bar.minorticks_off()
        bar.ax.yaxis.set_major_formatter(lambda value, _: power_of_ten(value))
    figure.text(0.02, 1 - 0.14 / height, title, fontsize=11.5, fontweight="bold", va="top")
    return figure
