"""The consistency audit of a run as tables and heat maps: what moved, and how much of each update was protected."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from mambacl.nullspace.audit import QUANTITIES, shares
from mambacl.reports.figures import BLUES, QUIET, frame, styled
from mambacl.reports.runs import Floats
from mambacl.reports.tables import Column, Table

Audit = Mapping[str, Any]  # audit.json
RESOLUTION = 1e-8  # relative changes below the resolution of float32 are drawn alike


def drift_table(audit: Audit, task: int | None = None) -> Table:
    """By task, the median over the blocks with the largest in brackets; or one task (from 0) block by block."""
    titles = tuple(Column(title) for title in QUANTITIES.values())
    note = "relative change of the norm, on training images of the task kept for this; exact to about 1e-7 in float32"
    if task is None:
        rows = []
        for entry in audit["tasks"]:
            found = [_column(entry["drift"], quantity) for quantity in QUANTITIES]
            cells = [f"{np.median(values):.1e} ({values.max():.1e})" if len(values) else "–" for values in found]
            rows.append((str(entry["task"] + 1), str(entry["images"]), *cells))
        caption = f"How far each task's features have moved by the end of task {audit['after']}: median (largest block)"
        return Table(caption, (Column("task"), Column("images"), *titles), tuple(rows), (note,))
    entry = next((entry for entry in audit["tasks"] if entry["task"] == task), None)
    drift = {} if entry is None else entry["drift"]
    rows = [(block, *(f"{found[q]:.1e}" if q in found else "–" for q in QUANTITIES)) for block, found in drift.items()]
    caption = f"How far the features of task {task + 1} have moved by the end of task {audit['after']}, block by block"
    return Table(caption, (Column("block", text=True), *titles), tuple(rows), (note,))


def updates_table(audit: Audit) -> Table:
    """By task and kind of parameter: the share of the updates that lay in protected directions."""
    rows = []
    for entry in audit["updates"]:
        for kind, (asked, applied) in by_kind(entry["parts"]).items():
            rows.append((str(entry["task"] + 1), kind, f"{100 * asked:.2f}", f"{100 * applied:.4g}"))
    columns = (Column("task"), Column("kind", text=True), Column("asked for (%)"), Column("applied (%)"))
    note = (
        "share of the squared norm of all steps in directions protected for earlier tasks: as the optimizer computed "
        "them, and after the projection"
    )
    return Table("Updates in protected directions", columns, tuple(rows), (note,))


def by_kind(parts: list[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Asked and applied shares, over all blocks."""
    sums: dict[str, Floats] = {}
    for part in parts:
        sums[part["kind"]] = sums.get(part["kind"], np.zeros(4)) + np.asarray(part["moved"], dtype=np.float64)
    return {kind: shares(total) for kind, total in sums.items()}


def _column(drift: Mapping[str, Mapping[str, float]], quantity: str) -> Floats:
    return np.array([found[quantity] for found in drift.values() if quantity in found])


@styled
def drift_map(audit: Audit) -> Figure:
    """A heat map for each quantity: a row per task, a column per block, on a logarithmic scale."""
    tasks, blocks = audit["tasks"], list(audit["tasks"][0]["drift"])
    figure, grid = _stack(len(QUANTITIES), 0.34 * len(tasks))
    found = {
        quantity: np.array([[entry["drift"][block].get(quantity, np.nan) for block in blocks] for entry in tasks])
        for quantity in QUANTITIES
    }
    everything = np.concatenate([values.ravel() for values in found.values()])
    high = max(float(np.nanmax(everything, initial=RESOLUTION)), 10 * RESOLUTION)
    low = max(float(np.nanmin(np.where(everything > 0, everything, np.nan), initial=high)), RESOLUTION)
    low = min(low, high / 10)
    for axes, (quantity, title) in zip(grid, QUANTITIES.items(), strict=True):
        values = np.ma.masked_invalid(np.maximum(found[quantity], low))
        image = axes.imshow(values, cmap=BLUES, norm=LogNorm(low, high), aspect="auto", interpolation="nearest")
        axes.set_title(title, fontsize=9.5, pad=3)
        axes.set_yticks(range(len(tasks)), [str(entry["task"] + 1) for entry in tasks])
        _hide_frame(axes)
    _number_blocks(grid[-1], blocks)
    figure.supylabel("task whose images were kept", fontsize=9, x=0.012)
    figure.colorbar(image, ax=grid, shrink=0.6, pad=0.02, aspect=30).set_label("relative change", fontsize=9)
    _title(figure, f"What has moved by the end of task {audit['after']}")
    return figure


@styled
def updates_map(audit: Audit) -> Figure:
    """Shares of the last task's updates in protected directions: a row per kind of parameter, a column per block."""
    entry = audit["updates"][-1]
    blocks = list(dict.fromkeys(part["block"] for part in entry["parts"]))
    kinds = list(dict.fromkeys(part["kind"] for part in entry["parts"]))
    sums = np.zeros((len(kinds), len(blocks), 4))
    for part in entry["parts"]:
        sums[kinds.index(part["kind"]), blocks.index(part["block"])] += np.asarray(part["moved"])
    with np.errstate(invalid="ignore"):
        panels = {
            "as the optimizer computed them": 100 * sums[..., 1] / sums[..., 0],
            "as they were applied": 100 * sums[..., 3] / sums[..., 2],
        }
    figure, grid = _stack(2, 0.34 * len(kinds))
    for axes, (title, values) in zip(grid, panels.items(), strict=True):
        image = axes.imshow(np.ma.masked_invalid(values), cmap=BLUES, vmin=0, vmax=100, aspect="auto")
        axes.set_title(title, fontsize=9.5, pad=3)
        axes.set_yticks(range(len(kinds)), kinds)
        _hide_frame(axes)
    _number_blocks(grid[-1], blocks)
    figure.colorbar(image, ax=grid, shrink=0.8, pad=0.02, aspect=30).set_label("per cent", fontsize=9)
    _title(figure, f"Updates of task {entry['task'] + 1} in directions protected for earlier tasks")
    return figure


def _stack(rows: int, height: float) -> tuple[Figure, list[Any]]:
    """Maps of that height above each other, with room for a title each."""
    gap = 0.32
    return frame(
        8.6, 1.3 + rows * height + (rows - 1) * gap, rows, left=0.8, right=0.1, top=0.74, bottom=0.56, sharex=True,
        hspace=gap / height,
    )  # fmt: skip


def _title(figure: Figure, words: str) -> None:
    figure.text(0.02, 1 - 0.14 / figure.get_figheight(), words, fontsize=11.5, fontweight="bold", va="top")


def _hide_frame(axes: Any) -> None:
    axes.grid(False)
    axes.tick_params(length=0, labelsize=8.5)
    axes.spines[["left", "bottom"]].set_visible(False)


def _number_blocks(axes: Any, blocks: list[str]) -> None:
    names = [".".join(re.findall(r"\d+", block)) or block for block in blocks]
    step = max(1, -(-len(names) // 24))
    axes.set_xticks(range(0, len(names), step), names[::step])
    axes.set_xlabel("block", color=QUIET)
