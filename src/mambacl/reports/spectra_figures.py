"""Figures of the null space: every block's spectrum with the chosen rank, and what each block protects."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from mambacl.reports.figures import COLOURS, INK, MARKERS, QUIET, legend_below, styled
from mambacl.reports.spectra import FeatureSpectra

FLOOR = 1e-18  # relative eigenvalues below the resolution of float64 are drawn here


@styled
def spectra(family: FeatureSpectra) -> Figure:
    """Small multiples, one a block: eigenvalues relative to the largest, with the null directions shaded."""
    count = len(family.spectra)
    columns = min(count, 8 if count > 24 else 6 if count > 8 else 4)
    rows = -(-count // columns)
    figure = Figure(figsize=(max(4.4, 1.6 * columns), max(2.6, 1.42 * rows + 1.0)))
    figure.subplots_adjust(
        left=0.62 / figure.get_figwidth(),
        right=1 - 0.14 / figure.get_figwidth(),
        bottom=0.52 / figure.get_figheight(),
        top=1 - 0.72 / figure.get_figheight(),
        hspace=0.42,
        wspace=0.16,
    )
    same_size = len({len(spectrum.values) for spectrum in family.spectra.values()}) == 1
    grid = figure.subplots(rows, columns, sharex=same_size, sharey=True, squeeze=False).ravel()
    relative = {block: _relative(spectrum.values) for block, spectrum in family.spectra.items()}
    kept_shares = [1 - spectrum.rank / len(spectrum.values) for spectrum in family.spectra.values()]
    early = float(np.median(kept_shares)) < 0.25  # a corner among the first directions needs room
    lowest = max(min((float(values[-1]) for values in relative.values()), default=FLOOR), FLOOR)
    for axes in grid[count:]:
        axes.set_axis_off()
    for axes, (block, spectrum) in zip(grid[:count], family.spectra.items(), strict=True):
        size = len(spectrum.values)
        kept = size - spectrum.rank
        axes.axvspan(kept + 0.5, size + 0.5, color="#d9efe8", linewidth=0, zorder=0)
        axes.axvline(kept + 0.5, color=COLOURS[2], linewidth=1.0)
        axes.plot(np.arange(1, size + 1), relative[block], color=COLOURS[0], linewidth=1.4)
        axes.set_title(block, fontsize=8.5, pad=3)
        words = f"{spectrum.rank} of {size}"
        axes.set_title(words, fontsize=7.5, pad=3, loc="right", color="#00704f", fontweight="normal")
        axes.tick_params(labelsize=7.5, length=2)
        axes.grid(False)
    # Panels share their axes: to set one sets all, and to set each sets all of them as many times.
    grid[0].set_yscale("log")
    grid[0].set_ylim(lowest / 3, 3)
    grid[0].yaxis.set_major_locator(LogLocator(numticks=4))
    grid[0].yaxis.set_minor_locator(NullLocator())
    numbered = 1 if same_size else count
    for axes, spectrum in zip(grid[:numbered], list(family.spectra.values())[:numbered], strict=True):
        _number_directions(axes, len(spectrum.values), early)
    last_in_column = {i % columns: i for i in range(count)}
    for i, axes in enumerate(grid[:count]):
        axes.tick_params(labelbottom=not same_size or last_in_column[i % columns] == i)
    left = 0.12 / figure.get_figwidth()
    top = 1 - 0.12 / figure.get_figheight()
    figure.text(left, top, f"Spectra behind {family.title}", fontsize=11.5, fontweight="bold", va="top")
    words = "a panel a block; shaded, and counted on the right: null directions" + (
        f"; feature: {family.feature}" if family.feature else ""
    )
    figure.text(left, top - 0.21 / figure.get_figheight(), words, fontsize=8.5, color=QUIET, va="top")
    figure.supxlabel("direction, by eigenvalue", fontsize=9, color=INK, y=0.08 / figure.get_figheight())
    figure.supylabel("eigenvalue / largest", fontsize=9, color=INK, x=0.06 / figure.get_figwidth())
    return figure


def _number_directions(axes: Any, size: int, early: bool) -> None:
    if early:
        axes.set_xscale("log")
    axes.set_xlim(0.9 if early else 0.5, size + 0.5)
    if early:
        axes.xaxis.set_major_locator(LogLocator(numticks=5))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))


@styled
def protected_directions(families: Sequence[FeatureSpectra]) -> Figure:
    """How many directions each block protects, on a logarithmic scale: the rest is room to learn in."""
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.add_subplot()
    blocks = list(dict.fromkeys(block for family in families for block in family.spectra))
    sizes = {block: len(spectrum.values) for family in families for block, spectrum in family.spectra.items()}
    axes.plot(
        [sizes[block] for block in blocks], color=QUIET, linestyle=(0, (4, 2)), linewidth=1.2, label="all directions"
    )
    fewest = min(len(s.values) - s.rank for family in families for s in family.spectra.values())
    for i, family in enumerate(families):
        places = [blocks.index(block) for block in family.spectra]
        kept = [len(spectrum.values) - spectrum.rank for spectrum in family.spectra.values()]
        colour, marker, size = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)], 4 if len(blocks) > 24 else 5
        axes.plot(places, kept, color=colour, marker=marker, markersize=size, linewidth=1.4, label=family.title)
    step = max(1, -(-len(blocks) // 16))
    axes.set_xticks(range(0, len(blocks), step), blocks[::step])
    if fewest >= 1:
        axes.set_yscale("log")
        axes.set_ylim(0.8 * fewest, 1.6 * max(sizes.values()))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    else:  # a block that protects nothing has no place on a logarithmic axis
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(0, 1.6 * max(sizes.values()))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="x", visible=False)
    axes.set(xlabel="block", ylabel="directions")
    axes.set_title("Protected directions, by block")
    legend_below(figure, axes, len(families) + 1)
    return figure


def _relative(values: np.ndarray) -> np.ndarray:
    """Eigenvalues over the largest, with a floor for a logarithmic axis."""
    largest = values[0] if len(values) and values[0] > 0 else 1.0
    return np.maximum(values / largest, FLOOR)
