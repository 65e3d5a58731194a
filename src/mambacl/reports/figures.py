"""Figures of runs. Each function returns a matplotlib `Figure`; `png` turns it into the same bytes every time.

Only the object-oriented interface is used: no global state of pyplot, so that a program with windows of its own is
left alone. Colours are those of Okabe and Ito, which stay apart for colour-blind readers; markers repeat the
distinction.
"""

import functools
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from mambacl.reports.groups import Group, common_headline
from mambacl.reports.runs import Floats, RunRecord
from mambacl.reports.tables import MINUS, one_decimal

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
INK, QUIET, FAINT = "#22272e", "#6b7480", "#d9dee4"
BLUES = LinearSegmentedColormap.from_list("mambacl", ["#f2f7fb", "#9cc7e4", "#2b83bd", "#08406e"])
LONGEST_LABEL = 60
MOST_NUMBERS = 12  # tasks up to which each cell or point carries its number
STYLE: Any = {  # untyped: not every release of matplotlib knows the same keys
    "font.size": 10.5,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.titley": 1.0,  # said, so that nobody measures every tick to find it
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "figure.facecolor": "white",
    "figure.constrained_layout.w_pad": 0.12,
    "figure.constrained_layout.h_pad": 0.1,
    "svg.hashsalt": "mambacl",
}

P = ParamSpec("P")


@contextmanager
def _style() -> Iterator[None]:
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Draws with this module's style, whatever the reader's matplotlibrc says, and leaves the latter in force."""

    @functools.wraps(draw)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with _style():
            return draw(*args, **kwargs)

    return wrapped


def png(figure: Figure, dpi: int = 150) -> bytes:
    """The figure as PNG. No date and no version goes in, so equal figures give equal bytes."""
    FigureCanvasAgg(figure)
    out = io.BytesIO()
    with _style():
        figure.savefig(out, format="png", dpi=dpi, metadata={"Software": None})
    return out.getvalue()


@styled
def accuracy_matrix(record: RunRecord) -> Figure:
    """R[t, j] as a heat map: a row for each task learned, a column for each task tested."""
    matrix = 100 * record.accuracies()
    done = len(matrix)
    side = float(np.clip(2.6 + 0.36 * done, 4.4, 7.0))
    figure = Figure(figsize=(side + 0.9, side), layout="constrained")
    axes = figure.add_subplot()
    low, high = shade_range(matrix)
    image = axes.imshow(np.ma.masked_invalid(matrix), cmap=BLUES, vmin=low, vmax=high, interpolation="nearest")
    if done <= MOST_NUMBERS:
        for t in range(done):
            for j in range(t + 1):
                if np.isfinite(matrix[t, j]):
                    dark = (matrix[t, j] - low) / (high - low) > 0.64
                    colour = "white" if dark else INK
                    axes.text(j, t, one_decimal(matrix[t, j]), ha="center", va="center", color=colour, fontsize=8.5)
    _number_tasks(axes.xaxis, done)
    _number_tasks(axes.yaxis, done)
    axes.grid(False)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    axes.set(xlabel="tested on task", ylabel="after task")
    axes.set_title("Accuracy on each task after each task (%)")
    bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.03)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)
    return figure


@styled
def accuracy_curves(groups: Sequence[Group]) -> Figure:
    """Accuracy over all tasks seen, after each task; a band of one standard deviation where there are seeds.

    For a single run, the accuracy on the newest task stands beside it: what is learned, and what is kept.
    """
    headline = common_headline(run for group in groups for run in group.runs)
    alone = len(groups) == 1 and len(groups[0].runs) == 1
    figure = Figure(figsize=(7.0, 5.6) if alone else (7.6, 4.6), layout="constrained")  # alone, beside the matrix
    axes = figure.add_subplot()
    drawn = [(group, *group.after_each_task(headline)) for group in groups]
    longest = max((len(mean) for _, mean, _ in drawn), default=0)
    if alone:
        newest = 100 * np.diag(groups[0].first.accuracies())
        axes.plot(_numbers(newest), newest, color=QUIET, linestyle=(0, (4, 2)), linewidth=1.4, label="the newest task")
    for i, (group, mean, std) in enumerate(drawn):
        label = "all tasks seen" if alone else name_of(group)
        axes.plot(
            _numbers(mean),
            mean,
            color=COLOURS[i % len(COLOURS)],
            linestyle=("-", "--", ":", "-.")[i // len(COLOURS) % 4],
            marker=MARKERS[i % len(MARKERS)] if longest <= 25 else None,
            markersize=5,
            label=label,
        )
        if std is not None:
            axes.fill_between(
                _numbers(mean), mean - std, mean + std, color=COLOURS[i % len(COLOURS)], alpha=0.16, linewidth=0
            )
    if alone and 0 < longest <= MOST_NUMBERS:
        for x, y in enumerate(drawn[0][1], start=1):
            number = axes.annotate(
                one_decimal(y), (x, y), (0, -14), textcoords="offset points", ha="center", fontsize=8.5, zorder=5
            )
            number.set_path_effects([withStroke(linewidth=3, foreground="white")])  # legible over the other line
    _number_tasks(axes.xaxis, longest, first=1)
    axes.margins(x=0.03, y=0.12)
    axes.set_ylim(top=min(axes.get_ylim()[1], 101.5))
    axes.set(xlabel="tasks learned", ylabel="accuracy (%)")
    over = "tasks" if headline == "tasks" else "images"
    axes.set_title(f"Accuracy after each task, mean over {over} seen")
    if len(drawn) > 1 or alone:
        legend_below(figure, axes, len(drawn) + alone)
    return figure


@styled
def forgetting_by_task(record: RunRecord) -> Figure:
    """For each task, its best accuracy before the last task and its accuracy now: the gap is what was forgotten."""
    matrix = 100 * record.accuracies()
    done = len(matrix)
    figure = Figure(figsize=(7.2, 3.9), layout="constrained")
    axes = figure.add_subplot()
    numbers = np.arange(1, done + 1)
    now = matrix[-1]
    best = np.array([*(np.max(matrix[j:-1, j]) for j in range(done - 1)), np.nan])
    lost = now < best
    size = float(np.clip(260 / max(done, 1), 9, 44))
    width = float(np.clip(60 / max(done, 1), 1.0, 5.0))
    axes.vlines(numbers[lost], now[lost], best[lost], color="#eec3a7", linewidth=width)
    gained = now > best
    axes.vlines(numbers[gained], best[gained], now[gained], color="#a5d6c8", linewidth=width)
    axes.scatter(numbers, best, s=size, facecolor="white", edgecolor=COLOURS[1], linewidth=1.4, zorder=3)
    axes.scatter(numbers, now, s=size, color=COLOURS[0], marker="s", zorder=3)
    if done <= MOST_NUMBERS:
        for number, high, low in zip(numbers[:-1], np.fmax(best, now)[:-1], (best - now)[:-1], strict=True):
            if np.isfinite(low):
                loss = one_decimal(-low).replace("-", MINUS)
                loss = loss if low >= 0 or loss == "0.0" else f"+{loss}"
                axes.annotate(loss, (number, high), (0, 7), textcoords="offset points", ha="center", fontsize=8.5)
    axes.scatter(
        [], [], s=40, facecolor="white", edgecolor=COLOURS[1], linewidth=1.4, label="best before the last task"
    )
    axes.scatter([], [], s=40, color=COLOURS[0], marker="s", label="after the last task")
    _number_tasks(axes.xaxis, done, first=1)
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.16)
    axes.set(xlabel="task", ylabel="accuracy (%)")
    axes.set_title("What each task lost")
    legend_below(figure, axes, 2)
    return figure


@styled
def forgetting_curves(groups: Sequence[Group]) -> Figure:
    """What each task lost by the last task learned, a line a group: mean over the seeds, with a band."""
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for i, group in enumerate(groups):
        losses = 100 * np.stack([run.forgetting_by_task() for run in group.runs])  # (seeds, tasks - 1)
        mean, colour = losses.mean(axis=0), COLOURS[i % len(COLOURS)]
        marker = MARKERS[i % len(MARKERS)] if len(mean) <= 25 else None
        style = ("-", "--", ":", "-.")[i // len(COLOURS) % 4]
        label = name_of(group)
        axes.plot(_numbers(mean), mean, color=colour, linestyle=style, marker=marker, markersize=5, label=label)
        if len(losses) > 1:
            std = losses.std(axis=0, ddof=1)
            axes.fill_between(_numbers(mean), mean - std, mean + std, color=colour, alpha=0.16, linewidth=0)
    axes.axhline(0, color=QUIET, linewidth=1)
    _number_tasks(axes.xaxis, max((group.first.tasks_done - 1 for group in groups), default=0), first=1)
    axes.set(xlabel="task", ylabel="forgetting (points)")
    axes.set_title("What each task lost by the end")
    legend_below(figure, axes, len(groups))
    return figure


@styled
def final_figures(groups: Sequence[Group]) -> Figure:
    """Final accuracy and forgetting of finished groups: mean, deviation, and each seed as a dot."""
    finished = [(i, group) for i, group in enumerate(groups) if group.finished]
    headline = common_headline(run for _, group in finished for run in group.runs)
    figure = Figure(figsize=(9.6, 1.3 + 0.5 * max(len(finished), 1)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = (
        (left, f"final_accuracy_{headline}", "Final accuracy (%), higher is better"),
        (right, "forgetting", "Forgetting (points), lower is better"),
    )
    for axes, name, title in names:
        for row, (i, group) in enumerate(finished):
            value = group.metric(name)
            if value is None:
                continue
            colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
            axes.errorbar(
                value.mean, row, xerr=value.std, color=colour, marker=marker, markersize=8, capsize=4, linewidth=1.8
            )
            if value.std is not None:
                seeds = [100 * (run.metric(name) or 0.0) for run in group.runs]
                axes.plot(seeds, [row + 0.2] * len(seeds), "o", color=colour, alpha=0.55, markersize=3.2)
            axes.annotate(
                one_decimal(value.mean),
                (value.mean, row),
                (0, 8),
                textcoords="offset points",
                ha="center",
                fontsize=9.5,
            )
        axes.set_title(title, fontsize=10.5)
        axes.set_ylim(len(finished) - 0.45, -0.75)
        axes.margins(x=0.12)
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    left.set_yticks(range(len(finished)), [name_of(group) for _, group in finished])
    return figure


@styled
def training_curves(record: RunRecord) -> Figure:
    """Loss and training accuracy by epoch, the tasks one after the other on alternating ground."""
    epochs = record.epochs
    panels = [("loss", "training loss", 1.0), ("accuracy", "training accuracy (%)", 100.0)]
    panels = [panel for panel in panels if any(isinstance(epoch.get(panel[0]), int | float) for epoch in epochs)]
    figure = Figure(figsize=(7.2, 1.4 + 1.9 * max(len(panels), 1)), layout="constrained")
    grid = figure.subplots(max(len(panels), 1), 1, sharex=True, squeeze=False)[:, 0]
    starts = [i for i, epoch in enumerate(epochs) if i == 0 or epoch["task"] != epochs[i - 1]["task"]]
    ends = [*starts[1:], len(epochs)]
    for axes, (name, label, scale), colour in zip(grid[: len(panels)], panels, COLOURS[: len(panels)], strict=True):
        for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
            values = [epoch.get(name) for epoch in epochs[start:end]]
            known = [scale * value if isinstance(value, int | float) else np.nan for value in values]
            marker = "o" if end - start == 1 else None
            width = 1.6 if len(starts) <= 20 else 0.9
            axes.plot(np.arange(start, end) + 1, known, color=colour, linewidth=width, marker=marker, markersize=3)
            if number % 2:
                axes.axvspan(start + 0.5, end + 0.5, color="#eff2f5", linewidth=0, zorder=0)
        axes.set_ylabel(label)
        axes.set_xlim(0.5, max(len(epochs), 1) + 0.5)
        axes.grid(axis="x", visible=False)
        axes.set_ylim(bottom=0)
    if len(starts) <= 20:
        for start, end in zip(starts, ends, strict=True):
            place = ((start + end + 1) / 2, 1.0)
            words = (
                f"task {epochs[start]['task'] + 1}" if len(starts) <= MOST_NUMBERS else str(epochs[start]["task"] + 1)
            )
            grid[0].annotate(
                words,
                place,
                (0, 4),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=QUIET,
            )
    grid[0].set_title("Training, task by task", pad=20)
    grid[-1].set_xlabel("epoch")
    grid[-1].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure


def shade_range(matrix: Floats) -> tuple[float, float]:
    """The accuracies that get the lightest and the darkest shade: whole tens, so that tables can be compared."""
    known = matrix[np.isfinite(matrix)]
    low = float(np.floor(known.min() / 10) * 10) if len(known) else 0.0
    return min(low, 90.0), 100.0


def name_of(group: Group) -> str:
    """A group's label as plain text of one line: matplotlib takes dollar signs for formulas, and leaves out of a
    legend what begins with an underscore."""
    label = " ".join(group.label.split()) + (f" ({group.progress})" if group.progress else "")
    label = label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 1] + "…"
    return (" " if label.startswith("_") else "") + label.replace("$", r"\$")


def _numbers(values: Floats) -> Floats:
    return np.arange(1, len(values) + 1, dtype=np.float64)


def _number_tasks(axis: Any, done: int, first: int = 0) -> None:
    """Ticks for tasks, which are counted from one: all of them, or the first and round numbers, a dozen at most.

    `first`: where the first task stands on the axis.
    """
    step = next((step for step in (1, 5, 10, 20, 50, 100) if done <= MOST_NUMBERS * step), 200)
    numbers = [number for number in range(1, done + 1) if number == 1 or number % step == 0]
    axis.set_ticks([number - 1 + first for number in numbers], [str(number) for number in numbers])


def legend_below(figure: Figure, axes: Any, entries: int) -> None:
    """Below the plot, where it covers nothing, in as many columns as long names allow."""
    handles, labels = axes.get_legend_handles_labels()
    longest = max((len(label) for label in labels), default=1)
    columns = max(1, min(entries, 4, 84 // (longest + 6)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9.5)
