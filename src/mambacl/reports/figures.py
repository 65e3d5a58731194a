"""Figures of runs. Each function returns a matplotlib `Figure`; `png` always turns it into the same bytes.

They use only matplotlib's object-oriented interface, so that pyplot's global state stays untouched. Colours are those
of Okabe and Ito, which colour-blind readers can tell apart; lines also differ in their markers.

A report waits for its figures, so they are cheap to draw: margins are fixed in inches instead of computed from the size
of every text, many lines are one artist, and a figure is drawn only once.
"""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation
from numpy.typing import NDArray
from PIL import Image

from mambacl.reports.groups import Group, common_headline
from mambacl.reports.marks import mark
from mambacl.reports.runs import Floats, RunRecord
from mambacl.reports.tables import MINUS, one_decimal

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINE_STYLES = ("-", "--", ":", "-.")
INK, QUIET, FAINT, TINT = "#22272e", "#6b7480", "#d9dee4", "#eff2f5"
NULL_TINT, NULL_INK = "#d9efe8", "#00704f"
CELL_INK, CELL_WHITE = "#22272f", "#fffffe"  # on a coloured cell: the same on a dark page, unlike INK and white
BLUES = LinearSegmentedColormap.from_list("mambacl", ["#f2f7fb", "#9cc7e4", "#2b83bd", "#08406e"])
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
DPI = 150
LONGEST_LABEL, LONGEST_CLASS = 60, 24
MAX_NUMBERED_TASKS = 12  # with more tasks, cells and points have no numbers
LEGEND_ROW = 0.24  # inches
STYLE: Any = {  # untyped, because the keys differ between releases of matplotlib
    "figure.dpi": DPI,
    "font.size": 10.5,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.titley": 1.0,  # otherwise matplotlib measures every tick to place the title
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
}


@contextmanager
def style() -> Iterator[None]:
    """Draws with this module's style instead of the user's matplotlibrc, which it restores afterwards."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


styled = style()  # as a decorator, it opens the context for every call


def png(figure: Figure) -> bytes:
    """The figure as PNG. It contains no date and no version, so equal figures have equal bytes.

    `savefig` would draw a figure with a layout engine twice.
    """
    canvas = FigureCanvasAgg(figure)
    with style():
        canvas.draw()
    out = io.BytesIO()
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    picture.save(out, format="png", dpi=(DPI, DPI), compress_level=3)
    return out.getvalue()


def frame(
    width: float, height: float, rows: int = 1, *, left: float = 0.72, right: float = 0.2, bottom: float = 0.54,
    top: float = 0.46, columns: int = 1, wspace: float = 0.25, **shared: Any,
) -> tuple[Figure, list[Any]]:  # fmt: skip
    """A figure and its axes, row by row. Sizes are in inches; the space between axes is a share of their size."""
    figure = Figure(figsize=(width, height))
    sides = {"left": left / width, "right": 1 - right / width, "bottom": bottom / height, "top": 1 - top / height}
    figure.subplots_adjust(**sides, hspace=0.16, wspace=wspace)
    grid = list(figure.subplots(rows, columns, squeeze=False, **shared).ravel())
    for axes in grid:  # labels have fixed places, too: otherwise matplotlib measures every tick label to place them
        axes.xaxis.set_label_coords(0.5, 0, axes.transAxes + ScaledTranslation(0, -0.31, figure.dpi_scale_trans))
        axes.yaxis.set_label_coords(0, 0.5, axes.transAxes + ScaledTranslation(-0.5, 0, figure.dpi_scale_trans))
    return figure, grid


@styled
def accuracy_matrix(record: RunRecord) -> Figure:
    """R[t, j] as a heat map: a row per task learned, a column per task tested."""
    matrix = 100 * record.accuracies()
    done = len(matrix)
    numbered = done <= MAX_NUMBERED_TASKS  # cells with numbers need no colour bar
    side = float(np.clip(2.6 + 0.36 * done, 4.4, 7.0))
    figure, (axes,) = frame(side + (0.2 if numbered else 0.9), side)
    low, high = shade_range(matrix)
    image = heat_map(
        axes, matrix, low, high, numbered, lambda a, b: f"task {b + 1} after task {a + 1}: {matrix[a, b]:.2f}%"
    )
    if not numbered:
        bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.03)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0)
    axes.set(xlabel="tested on task", ylabel="after task")
    axes.set_title("Accuracy on each task after each task (%)")
    return figure


def heat_map(
    axes: Any, values: NDArray[Any], low: float, high: float, numbered: bool, words: Callable[[int, int], str]
) -> Any:
    """Draws values as coloured cells, with a row and a column per task; a cell without a value stays empty. `words`
    describe the cell in a row and a column."""
    image = axes.imshow(
        np.ma.masked_invalid(values), cmap=BLUES, vmin=low, vmax=high, interpolation="nearest", aspect="auto"
    )
    t, j = np.nonzero(np.isfinite(values))
    cells = list(zip(t.tolist(), j.tolist(), strict=True))
    for a, b in cells if numbered else ():
        colour = CELL_WHITE if (values[a, b] - low) / (high - low) > 0.64 else CELL_INK
        axes.text(b, a, one_decimal(values[a, b]), ha="center", va="center", color=colour, fontsize=8.5)
    mark(axes, j, t, [words(a, b) for a, b in cells], (1, 1))
    _number_tasks(axes.xaxis, len(values))
    _number_tasks(axes.yaxis, len(values))
    axes.grid(False)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    return image


@styled
def accuracy_curves(groups: Sequence[Group]) -> Figure:
    """Accuracy over all tasks seen, after each task, with a band of one standard deviation for several seeds.

    A single run also has the accuracy on the newest task, to show what was learned next to what was kept.
    """
    headline = common_headline(run for group in groups for run in group.runs)
    alone = len(groups) == 1 and len(groups[0].runs) == 1
    figure, (axes,) = frame(5.4, 4.7) if alone else frame(6.2, 4.4)  # a single run's curve is next to its matrix
    drawn = [(group, *group.after_each_task(headline)) for group in groups]
    longest = max((len(mean) for _, mean, _ in drawn), default=0)
    if alone:
        newest = 100 * np.diag(groups[0].first.accuracies())
        axes.plot(
            _task_numbers(newest), newest, color=QUIET, linestyle=(0, (4, 2)), linewidth=1.4, label="the newest task"
        )
        words = [f"task {t} right after learning it: {value:.2f}%" for t, value in enumerate(newest, start=1)]
        mark(axes, _task_numbers(newest), newest, words)
    for i, (group, mean, std) in enumerate(drawn):
        _curve(axes, i, mean, std, "all tasks seen" if alone else label_of(group), marked=longest <= 25)
        mark(
            axes,
            _task_numbers(mean),
            mean,
            _curve_words("all tasks seen" if alone else group.label, "after", mean, std),
        )
    if alone and 0 < longest <= MAX_NUMBERED_TASKS:
        mean = drawn[0][1]
        ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.5}  # legible over the other line
        write_at(axes, _task_numbers(mean), mean, [one_decimal(y) for y in mean], -14, zorder=5, bbox=ground)
    _number_tasks(axes.xaxis, longest, first=1)
    axes.margins(x=0.03, y=0.12)
    axes.set_ylim(top=min(axes.get_ylim()[1], 101.5))
    axes.set(xlabel="tasks learned", ylabel="accuracy (%)")
    axes.set_title(f"Accuracy after each task, mean over {headline} seen")
    if len(drawn) > 1 or alone:
        legend_below(figure, axes, len(drawn) + alone)
    return figure


@styled
def forgetting_by_task(record: RunRecord) -> Figure:
    """Each task's best accuracy before the last task and its accuracy now; the gap is what was forgotten."""
    matrix = 100 * record.accuracies()
    done = len(matrix)
    figure, (axes,) = frame(5.8, 3.7)
    numbers = _task_numbers(matrix)
    now = matrix[-1]
    best = np.array([*(np.max(matrix[j:-1, j]) for j in range(done - 1)), np.nan])
    size = float(np.clip(260 / max(done, 1), 9, 44))
    width = float(np.clip(60 / max(done, 1), 1.0, 5.0))
    for changed, colour in ((now < best, "#eec3a7"), (now > best, "#a5d6c8")):
        axes.vlines(numbers[changed], now[changed], best[changed], color=colour, linewidth=width)
    hollow = {"facecolor": "white", "edgecolor": COLOURS[1], "linewidth": 1.4}
    axes.scatter(numbers, best, s=size, zorder=3, **hollow)
    axes.scatter(numbers, now, s=size, color=COLOURS[0], marker="s", zorder=3)
    if done <= MAX_NUMBERED_TASKS:
        losses = (best - now)[:-1]
        words = [_signed(-loss) if np.isfinite(loss) else "" for loss in losses]
        write_at(axes, numbers[:-1], np.fmax(best, now)[:-1], words, 7)
    for values, when in ((best, "best before the last task"), (now, "after the last task")):
        mark(axes, numbers, values, [f"task {t}, {when}: {v:.2f}%" for t, v in enumerate(values, start=1)])
    axes.scatter([], [], s=40, label="best before the last task", **hollow)  # for the legend, in a readable size
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
    """How much each task was forgotten after the last task: a line per group, the mean over seeds, with a band."""
    figure, (axes,) = frame(5.8, 3.9)
    for i, group in enumerate(groups):
        losses = 100 * np.stack([run.forgetting_by_task() for run in group.runs])  # (seeds, tasks - 1)
        std = losses.std(axis=0, ddof=1) if len(losses) > 1 else None
        mean = losses.mean(axis=0)
        _curve(axes, i, mean, std, label_of(group), marked=losses.shape[1] <= 25)
        mark(axes, _task_numbers(mean), mean, _curve_words(group.label, "forgetting of", mean, std))
    axes.axhline(0, color=QUIET, linewidth=1)
    _number_tasks(axes.xaxis, max((group.first.tasks_done - 1 for group in groups), default=0), first=1)
    axes.set(xlabel="task", ylabel="forgetting (points)")
    axes.set_title("What each task lost by the end")
    legend_below(figure, axes, len(groups))
    return figure


@styled
def final_figures(groups: Sequence[Group]) -> Figure:
    """Final accuracy and forgetting of finished groups: mean and deviation, with a dot per seed."""
    finished = [(i, group) for i, group in enumerate(groups) if group.finished]
    headline = common_headline(run for _, group in finished for run in group.runs)
    labels = [label_of(group) for _, group in finished]
    margin = 0.3 + 0.085 * max(map(len, labels), default=0)  # names can be long
    height = 1.3 + 0.5 * max(len(finished), 1)
    figure, (left, right) = frame(5.6 + margin, height, columns=2, left=margin, wspace=0.08, bottom=0.36, sharey=True)
    names = (
        (left, f"final_accuracy_{headline}", "Final accuracy (%)"),
        (right, "forgetting", "Forgetting (points)"),
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
                words = [f"{group.label}, seed {run.seed}: {v:.2f}" for run, v in zip(group.runs, seeds, strict=True)]
                mark(axes, seeds, [row + 0.2] * len(seeds), words)
            spread = "" if value.std is None else f" ± {value.std:.2f}"
            mark(axes, [value.mean], [row], [f"{group.label}: {value.mean:.2f}{spread}"])
            write_at(axes, [value.mean], [row], [one_decimal(value.mean)], 8, fontsize=9.5)
        axes.set_title(title, fontsize=10.5)
        axes.set_ylim(len(finished) - 0.45, -0.75)
        axes.margins(x=0.12)
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    left.set_yticks(range(len(finished)), labels)
    return figure


@styled
def training_curves(record: RunRecord) -> Figure:
    """Loss and training accuracy by epoch, with tasks on alternating backgrounds."""
    epochs = record.epochs
    panels = [("loss", "training loss", 1.0), ("accuracy", "training accuracy (%)", 100.0)]
    panels = [panel for panel in panels if any(isinstance(epoch.get(panel[0]), int | float) for epoch in epochs)]
    count = max(len(panels), 1)
    figure, grid = frame(6.0, 1.4 + 1.8 * count, count, sharex=True, top=0.62)
    starts = [i for i, epoch in enumerate(epochs) if i == 0 or epoch["task"] != epochs[i - 1]["task"]]
    ends = [*starts[1:], len(epochs)]
    bounds = list(zip(starts, ends, strict=True))
    for axes, (name, label, scale), colour in zip(grid[: len(panels)], panels, COLOURS[: len(panels)], strict=True):
        values = np.array([scale * v if isinstance(v := epoch.get(name), int | float) else np.nan for epoch in epochs])
        points = np.column_stack([np.arange(1, len(epochs) + 1), values])
        width = 1.6 if len(starts) <= 20 else 0.9
        axes.add_collection(LineCollection([points[a:b] for a, b in bounds], colors=colour, linewidths=width))
        words = [
            f"task {e['task'] + 1}, epoch {e['epoch'] + 1}, {label}: {v:.4g}"
            for e, v in zip(epochs, values, strict=True)
        ]
        mark(axes, points[:, 0], points[:, 1], words)
        single = [a for a, b in bounds if b - a == 1]  # a line with one point is invisible
        axes.plot(*points[single].T, "o", color=colour, markersize=3)
        shaded = [(a + 0.5, b - a) for a, b in bounds[1::2]]
        axes.broken_barh(shaded, (0, 1), transform=axes.get_xaxis_transform(), facecolor=TINT, linewidth=0, zorder=0)
        axes.set_ylabel(label)
        axes.set_xlim(0.5, max(len(epochs), 1) + 0.5)
        axes.grid(axis="x", visible=False)
        axes.set_ylim(0, 1.05 * float(np.nanmax(values, initial=0)) or 1)
    if len(starts) <= 20:
        prefix = "task " if len(starts) <= MAX_NUMBERED_TASKS else ""
        words = [f"{prefix}{epochs[start]['task'] + 1}" for start in starts]
        middles = [(a + b + 1) / 2 for a, b in bounds]
        write_at(
            grid[0], middles, [1.0] * len(starts), words, 4, base=grid[0].get_xaxis_transform(), fontsize=8, color=QUIET
        )
    grid[0].set_title("Training, task by task", pad=20)
    grid[-1].set_xlabel("epoch")
    grid[-1].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure


def write_at(
    axes: Any, x: Sequence[float] | Floats, y: Sequence[float] | Floats, words: Sequence[str], points: float,
    base: Any = None, **style: Any,
) -> None:  # fmt: skip
    """Writes a text at each place, moved up by `points` or, if negative, down; `base` replaces the data coordinates."""
    up = ScaledTranslation(0, points / 72, axes.figure.dpi_scale_trans)
    place = (axes.transData if base is None else base) + up
    aligned = "bottom" if points > 0 else "baseline"
    for a, b, text in zip(x, y, words, strict=True):
        axes.text(a, b, text, **{"transform": place, "ha": "center", "va": aligned, "fontsize": 8.5, **style})


def _curve(axes: Any, i: int, mean: Floats, std: Floats | None, label: str, marked: bool) -> None:
    """Draws the i-th line of a figure, with a band of one deviation."""
    colour, style = COLOURS[i % len(COLOURS)], LINE_STYLES[i // len(COLOURS) % len(LINE_STYLES)]
    marker = MARKERS[i % len(MARKERS)] if marked else None
    axes.plot(_task_numbers(mean), mean, color=colour, linestyle=style, marker=marker, markersize=5, label=label)
    if std is not None:
        axes.fill_between(_task_numbers(mean), mean - std, mean + std, color=colour, alpha=0.16, linewidth=0)


def _curve_words(name: str, when: str, mean: Floats, std: Floats | None) -> list[str]:
    spread = [""] * len(mean) if std is None else [f" ± {value:.2f}" for value in std]
    return [f"{name}, {when} task {t + 1}: {mean[t]:.2f}{spread[t]}" for t in range(len(mean))]


def _signed(value: float) -> str:
    """A change in points, with a real minus sign, or a plus for a gain."""
    words = one_decimal(value).replace("-", MINUS)
    return words if value <= 0 or words == "0.0" else f"+{words}"


def shade_range(accuracies: Floats) -> tuple[float, float]:
    """The accuracies with the lightest and the darkest shade: multiples of ten, so that tables compare."""
    known = accuracies[np.isfinite(accuracies)]
    low = float(np.floor(known.min() / 10) * 10) if len(known) else 0.0
    return min(low, 90.0), 100.0


def power_of_ten(value: float) -> str:
    """10⁻³ for 0.001, as plain text: matplotlib is slow to typeset a formula."""
    return "10" + str(round(np.log10(value))).translate(SUPERSCRIPTS)


def label_of_class(name: str) -> str:
    """A class name as plain text on one line."""
    name = re.sub(r"[\x00-\x1f\x7f\ud800-\udfff]+", " ", name)
    return (name if len(name) <= LONGEST_CLASS else name[: LONGEST_CLASS - 1] + "…").replace("$", r"\$")


def label_of(group: Group) -> str:
    """A group's label as plain text on one line. Matplotlib would take dollar signs for formulas, and hide a label that
    begins with an underscore from the legend."""
    label = " ".join(group.label.split()) + (f" ({group.progress})" if group.progress else "")
    label = label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 1] + "…"
    return (" " if label.startswith("_") else "") + label.replace("$", r"\$")


def _task_numbers(values: Floats) -> Floats:
    return np.arange(1, len(values) + 1, dtype=np.float64)


def _number_tasks(axis: Any, done: int, first: int = 0) -> None:
    """Puts at most a dozen ticks on the axis, for tasks counted from one: all, or the first and round numbers.

    `first`: where the first task is on the axis.
    """
    step = next((step for step in (1, 5, 10, 20, 50, 100) if done <= MAX_NUMBERED_TASKS * step), 200)
    numbers = [number for number in range(1, done + 1) if number == 1 or number % step == 0]
    axis.set_ticks([number - 1 + first for number in numbers], [str(number) for number in numbers])


def legend_below(figure: Figure, axes: Any, entries: int) -> None:
    """Puts the legend below the plot, in as many columns as the names allow, and shrinks the plot accordingly."""
    handles, labels = axes.get_legend_handles_labels()
    longest = max((len(label) for label in labels), default=1)
    columns = max(1, min(entries, 4, int(11.5 * figure.get_figwidth()) // (longest + 6)))
    rows = -(-len(labels) // columns)
    height = figure.get_figheight()
    figure.subplots_adjust(bottom=figure.subplotpars.bottom + (rows * LEGEND_ROW + 0.06) / height)
    figure.legend(
        handles, labels, loc="lower center", ncols=columns, fontsize=9.5, bbox_to_anchor=(0.5, 0.02 / height),
        borderaxespad=0.2,
    )  # fmt: skip
