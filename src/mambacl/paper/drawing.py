"""Draws the paper's figures in the style of the reports. The paper's values are hollow markers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mambacl.paper.points import Point
from mambacl.reports.figures import COLOURS, MARKERS, QUIET, frame, legend_below, styled

TITLES = {
    "eta": "The weight of the projection, eta",
    "blocks": "How many of the first blocks are fine-tuned",
    "pretraining": "What the backbone was pre-trained on",
    "accuracy-curve": "Accuracy after each task",
    "loss-curve": "Training loss of old tasks after each task",
}
AXES = {"eta": "eta", "blocks": "blocks fine-tuned", "accuracy-curve": "tasks learned", "loss-curve": "tasks learned"}
UNITS = {"accuracy": "accuracy (%)", "forgetting": "forgetting (points)", "loss": "training loss"}


def draw(name: str, shown: Sequence[Point]) -> Figure:
    return _bars(name, shown) if name == "pretraining" else _lines(name, shown)


@styled
def _lines(name: str, shown: Sequence[Point]) -> Figure:
    """One panel per metric, with one line per benchmark and series."""
    metrics = list(dict.fromkeys(point.metric for point in shown)) or ["accuracy"]
    figure, panels = frame(1.6 + 4.4 * len(metrics), 4.8, columns=len(metrics))
    groups = list(dict.fromkeys((p.source, p.benchmark, p.series) for p in shown))
    several = len({group[2] for group in groups}) > 1
    colours = {group[1:]: COLOURS[i % len(COLOURS)] for i, group in enumerate(groups) if group[0] == "ours"}
    for axes, metric in zip(panels, metrics, strict=True):
        for i, (source, benchmark, series) in enumerate(groups):
            own = [
                p for p in shown if (p.source, p.benchmark, p.series, p.metric) == (source, benchmark, series, metric)
            ]
            own.sort(key=lambda point: float(point.x))
            x, y = np.array([float(p.x) for p in own]), np.array([p.value for p in own])
            label = benchmark + (f", {series}" if several else "")
            if source == "paper":
                colour = colours.get((benchmark, series), QUIET)
                axes.plot(
                    x, y, linestyle="", marker=MARKERS[i % len(MARKERS)], markersize=8, markerfacecolor="none",
                    color=colour, label=f"paper: {label}",
                )  # fmt: skip
                continue
            std = np.array([p.std if p.std is not None else np.nan for p in own])
            colour = colours[benchmark, series]
            axes.plot(x, y, color=colour, marker=MARKERS[i % len(MARKERS)], markersize=5, label=label)
            axes.fill_between(x, y - std, y + std, color=colour, alpha=0.16, linewidth=0)
        axes.set(xlabel=AXES[name], ylabel=UNITS[metric])
        axes.margins(x=0.06, y=0.1)
        if name == "eta":
            places = sorted({float(p.x) for p in shown})
            axes.set_xticks(places, [f"{x:g}" for x in places])
            axes.invert_xaxis()  # from strict to relaxed, as in the paper
        else:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    panels[0].set_title(TITLES[name])
    legend_below(figure, panels[0], len(groups))
    return figure


@styled
def _bars(name: str, shown: Sequence[Point]) -> Figure:
    """Filled bars for Mamba-CL and hollow ones for Mamba-Seq, as in the paper; the paper's values are grey."""
    metrics = list(dict.fromkeys(point.metric for point in shown)) or ["accuracy"]
    places = list(dict.fromkeys((p.source, p.benchmark, str(p.x)) for p in shown))
    figure = Figure(figsize=(9.6, 1.8 + 0.5 * max(len(places), 1)), layout="constrained")
    panels = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    for axes, metric in zip(panels, metrics, strict=True):
        for row, place in enumerate(places):
            own = [p for p in shown if (p.source, p.benchmark, str(p.x)) == place and p.metric == metric]
            for point in own:
                _bar(axes, row, point)
        axes.set_title(UNITS[metric], fontsize=10.5)
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.14)
    labels = [f"{'paper: ' if source == 'paper' else ''}{benchmark}, {x}" for source, benchmark, x in places]
    panels[0].set_yticks(range(len(places)), labels)
    panels[0].invert_yaxis()
    figure.suptitle(f"{TITLES[name]} (filled: Mamba-CL, hollow: Mamba-Seq)", fontsize=11.5, fontweight="bold")
    return figure


def _bar(axes: Any, row: int, point: Point) -> None:
    filled = point.series == "Mamba-CL"
    colour = QUIET if point.source == "paper" else COLOURS[0]
    place = row + (-0.2 if filled else 0.2)
    face = colour if filled else "white"
    axes.barh(place, point.value, height=0.36, color=face, edgecolor=colour, xerr=point.std, capsize=2)
    axes.annotate(
        f"{point.value:.1f}", (point.value, place), (4 if point.value >= 0 else -4, 0), textcoords="offset points",
        va="center", ha="left" if point.value >= 0 else "right", fontsize=8.5,
    )  # fmt: skip
