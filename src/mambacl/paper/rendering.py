"""Shows the results of a design: a table, or a figure with its numbers; each as text and as a page."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mambacl.nullspace.settings import SETTINGS
from mambacl.paper.comparison import MetricNames, benchmark_of, compare_with_paper, value_of
from mambacl.paper.designs import DEPTH, FIGURES, NAMES, NANO_WORDS, PRETRAINING, PlannedRun, paper_eta
from mambacl.paper.losses import read_losses
from mambacl.paper.page import as_text, write_paper_table
from mambacl.paper.quoted import paper_table
from mambacl.reports.charts import Chart, chart
from mambacl.reports.figures import COLOURS, MARKERS, QUIET, frame, legend_below, styled
from mambacl.reports.groups import departures, mean_and_deviation
from mambacl.reports.marks import mark
from mambacl.reports.rendering import csv_text, to_markdown, to_text
from mambacl.reports.runs import RunRecord
from mambacl.reports.tables import Cell, Column, Table
from mambacl.reports.templating import render as render_page
from mambacl.reports.writing import write_files

TITLES = {
    "eta": "The weight of the projection, eta",
    "blocks": "How many of the first blocks are fine-tuned",
    "pretraining": "What the backbone was pre-trained on",
    "accuracy-curve": "Accuracy after each task",
    "loss-curve": "Training loss of old tasks after each task",
}
AXES = {"eta": "eta", "blocks": "blocks fine-tuned", "accuracy-curve": "tasks learned", "loss-curve": "tasks learned"}
UNITS = {"accuracy": "accuracy (%)", "forgetting": "forgetting (points)", "loss": "training loss"}
HEAD = ("figure", "source", "benchmark", "series", "x", "metric", "value", "std", "seeds")
METRICS = ("accuracy", "forgetting")
Found = Sequence[tuple[PlannedRun, RunRecord]]
Place = tuple[str, str, float | str, str]  # benchmark, series, x, metric
Values = Iterator[tuple[str, float | str, str, float]]  # series, x, metric, value


@dataclass(frozen=True)
class Point:
    source: str
    """ours or paper"""
    benchmark: str
    series: str
    x: float | str
    metric: str
    value: float
    std: float | None = None
    seeds: str = ""


def render(name: str, found: Found, target: Path, scale: str) -> tuple[str, Path]:
    """Writes the table or figure. Returns it as text, and the path of its page."""
    notes = nano_notes(name, found) if scale == "nano" and found else []
    if name not in FIGURES:
        compared = compare_with_paper(name, [record for _, record in found], notes=notes)
        return as_text(compared), write_paper_table(compared, target)
    shown = points(name, found, scale)
    table, stem = figure_table(name, shown, found, notes), f"paper-{name}"
    drawn = chart(stem, (_bars if name == "pretraining" else _lines)(name, shown), table)
    files = {f"{stem}.csv": to_csv(name, shown).encode(), f"{stem}.md": to_markdown(table).encode()}
    files |= {f"{stem}.png": drawn.drawing.png, f"{stem}.html": figure_page(name, drawn).encode()}  # the page last
    write_files(target, files)
    return to_text(table), target / f"{stem}.html"


def nano_notes(name: str, found: Found) -> list[str]:
    """How runs at the scale nano differ from the paper's design."""
    benchmark, config = found[0][0].benchmark, found[0][1].config
    tasks = ", ".join(dict.fromkeys(str(run.benchmark.tasks) for run, _ in found))
    size, passes = config["stream"]["transforms"]["image_size"], config["training"]["passes"]
    notes = [
        f"scale nano: {benchmark.dataset} at {size} pixels in {tasks} tasks replaces all data sets, passes: {passes}",
    ]
    etas = dict.fromkeys(f"{record.config['nullspace']['eta']:g}" for run, record in found if "eta-" not in run.variant)
    if etas:
        notes.append(f"scale nano: eta {', '.join(etas)} unless it varies")
    rank = config["nullspace"]["rank"]
    if config["setting"] == "paper" and rank != SETTINGS["paper"].rank:
        notes.append(f"scale nano: rank by {rank}; the paper uses the {SETTINGS['paper'].rank} of the spectrum")
    if name in NANO_WORDS:
        notes.append(f"scale nano: {NANO_WORDS[name]}")
    return notes


def figure_page(name: str, drawn: Chart) -> str:
    markdown = to_markdown(drawn.numbers)
    return render_page(
        "paper_figure.html", title=TITLES[name], figure=drawn, numbers=drawn.numbers, markdown=markdown
    ).html


def figure_table(name: str, shown: Sequence[Point], found: Found, words: Sequence[str]) -> Table:
    """The figure's numbers: one row per benchmark, series and place, with our values and the paper's."""
    metrics = list(dict.fromkeys(point.metric for point in shown))
    rows: dict[tuple[str, str, str], dict[tuple[str, str], Point]] = {}
    for point in shown:
        x = point.x if isinstance(point.x, str) else f"{point.x:g}"
        rows.setdefault((point.benchmark, point.series, x), {})[point.metric, point.source] = point
    columns = [Column("benchmark", text=True), Column("method", text=True), Column("at", text=True)]
    sources = [source for source in ("ours", "paper") if any(point.source == source for point in shown)]
    heads = [(metric, source) for metric in metrics for source in sources]
    columns += [Column(f"{metric} {source}") for metric, source in heads]
    cells = [(*key, *(_cell(row.get(head)) for head in heads)) for key, row in rows.items()]
    notes = ["ours: mean ± sample standard deviation over the seeds, by final_accuracy_tasks and forgetting"]
    if name == "loss-curve":
        notes = ["cross-entropy of the old task's training images over its own classes, images as in evaluation",
                 "the paper shows this figure without numbers"]  # fmt: skip
        notes += [
            f"losses are missing after some tasks, because `mambacl resume` does not record them: {record.folder}"
            for _, record in found
            if record.finished and len(read_losses(record.folder)) < record.tasks_done
        ]
    elif "paper" in sources:
        notes.append("paper: the values of its main table; it does not print the figure's other values")
    if name == "blocks":
        notes.append("paper: with all 48 blocks of its backbone, shown at all blocks of ours")
    backbones = list(dict.fromkeys(record.backbone for _, record in found))
    if backbones:
        notes.append(f"ours use {', '.join(backbones)}; the paper uses defocus_mamba_large_22k")
    ways = dict.fromkeys(", ".join(departures(record)) for _, record in found)
    notes += [f"ours are trained differently from the paper: {way}" for way in ways if way]
    notes += words
    notes += [f"left out because unfinished: {record.folder}" for _, record in found if not record.finished]
    return Table(f"{TITLES[name]}: the paper's figure '{name}'", tuple(columns), tuple(cells), tuple(notes))


def _cell(point: Point | None) -> Cell:
    if point is None:
        return None
    digits = 4 if point.metric == "loss" else 2
    return f"{point.value:.{digits}f}" + ("" if point.std is None else f" ± {point.std:.{digits}f}")


# The numbers of a figure: ours from the runs, the paper's from its main table


def points(name: str, found: Found, scale: str) -> list[Point]:
    """Our points, then the paper's."""
    values = {"accuracy-curve": _by_task, "loss-curve": _losses}.get(name, _final)
    seen: dict[Place, list[tuple[float, int]]] = {}
    for run, record in found:
        if record.finished:
            for series, x, metric, value in values(run, record):
                seen.setdefault((benchmark_of(record), series, x, metric), []).append((value, run.seed))
    ours = []
    for place, pairs in seen.items():
        over_seeds = mean_and_deviation([value for value, _ in pairs])
        if over_seeds is not None:
            seeds = " ".join(str(seed) for _, seed in pairs)
            ours.append(Point("ours", *place, over_seeds.mean, over_seeds.std, seeds))
    return ours + _papers(name, scale)


def _final(run: PlannedRun, record: RunRecord) -> Values:
    assert run.x is not None
    for metric in METRICS:
        value = value_of(record, metric, MetricNames())
        if value is not None:
            yield run.series, run.x, metric, value


def _by_task(run: PlannedRun, record: RunRecord) -> Values:
    for t, value in enumerate(record.after_each_task("tasks"), start=1):
        yield run.series, float(t), "accuracy", 100 * float(value)


def _losses(run: PlannedRun, record: RunRecord) -> Values:
    for t, losses in sorted(read_losses(record.folder).items()):
        for j, loss in enumerate(losses, start=1):
            yield f"{run.series}, task {j}", float(t + 1), "loss", loss


def _papers(name: str, scale: str) -> list[Point]:
    """The paper prints numbers of its figures only in its main table."""
    table = paper_table("main")
    rows = {row.method: row for row in table.rows if row.method in NAMES.values()}
    wanted: list[tuple[str, str, float | str, tuple[str, ...]]] = []
    for benchmark in table.columns:
        if name == "eta":
            wanted.append((benchmark, "Mamba-CL", paper_eta(benchmark), METRICS))
        elif name == "blocks":
            wanted.append((benchmark, "Mamba-CL", float(DEPTH[scale]), METRICS))
        elif name == "pretraining":
            wanted += [(benchmark, series, PRETRAINING["paper"][0], METRICS) for series in rows]
        elif name == "accuracy-curve" and benchmark in ("imagenet-r-10", "cifar100-10"):
            wanted += [(benchmark, series, 10.0, ("accuracy",)) for series in rows]
    found = []
    for benchmark, series, x, metrics in wanted:
        for metric in metrics:
            quoted = rows[series].values[benchmark, metric]
            assert quoted is not None
            found.append(Point("paper", benchmark, series, x, metric, quoted.mean, quoted.std))
    return found


def to_csv(name: str, shown: Sequence[Point]) -> str:
    rows: list[Sequence[str]] = [HEAD]
    for point in shown:
        x = point.x if isinstance(point.x, str) else f"{point.x:g}"
        std = "" if point.std is None else f"{point.std:.4f}"
        value = f"{point.value:.4f}"
        rows.append([name, point.source, point.benchmark, point.series, x, point.metric, value, std, point.seeds])
    return csv_text(rows)


# Drawings in the style of the reports: the paper's values are hollow markers


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
            mark(axes, x, y, [_words(point) for point in own])
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


def _words(point: Point) -> str:
    """What hovering over a point shows."""
    spread = "" if point.std is None else f" ± {point.std:.2f}"
    x = point.x if isinstance(point.x, str) else f"{point.x:g}"
    return f"{point.source}: {point.benchmark}, {point.series}, at {x}: {point.metric} {point.value:.4g}{spread}"


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
    mark(axes, [point.value], [place], [_words(point)])
    axes.barh(place, point.value, height=0.36, color=face, edgecolor=colour, xerr=point.std, capsize=2)
    axes.annotate(
        f"{point.value:.1f}", (point.value, place), (4 if point.value >= 0 else -4, 0), textcoords="offset points",
        va="center", ha="left" if point.value >= 0 else "right", fontsize=8.5,
    )  # fmt: skip
