"""Shows the results of a design: a table, or a figure with its numbers; each as text and as a page."""

from collections.abc import Sequence
from pathlib import Path

from mambacl.nullspace.settings import SETTINGS
from mambacl.paper.comparison import compare_with_paper
from mambacl.paper.designs import FIGURES, NANO_WORDS, PlannedRun
from mambacl.paper.drawing import TITLES, draw
from mambacl.paper.losses import read_losses
from mambacl.paper.page import as_table, write_paper_table
from mambacl.paper.points import Point, points, to_csv
from mambacl.reports.figures import png
from mambacl.reports.groups import departures
from mambacl.reports.rendering import to_markdown, to_text
from mambacl.reports.runs import RunRecord
from mambacl.reports.tables import Cell, Column, Table
from mambacl.reports.templating import Picture
from mambacl.reports.templating import render as render_page
from mambacl.reports.writing import write_files


def render(name: str, found: Sequence[tuple[PlannedRun, RunRecord]], target: Path, scale: str) -> tuple[str, Path]:
    """Writes the table or figure. Returns it as text, and the path of its page."""
    notes = nano_notes(name, found) if scale == "nano" and found else []
    if name not in FIGURES:
        compared = compare_with_paper(name, [record for _, record in found], notes=notes)
        return to_text(as_table(compared)), write_paper_table(compared, target)
    shown = points(name, found, scale)
    table, stem, picture = figure_table(name, shown, found, notes), f"paper-{name}", png(draw(name, shown))
    files = {f"{stem}.csv": to_csv(name, shown).encode(), f"{stem}.md": to_markdown(table).encode()}
    files |= {f"{stem}.png": picture, f"{stem}.html": figure_page(name, table, picture).encode()}  # the page last
    write_files(target, files)
    return to_text(table), target / f"{stem}.html"


def nano_notes(name: str, found: Sequence[tuple[PlannedRun, RunRecord]]) -> list[str]:
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


def figure_page(name: str, table: Table, picture: bytes) -> str:
    figure = Picture(f"paper-{name}.png", picture)
    markdown = to_markdown(table)
    return render_page("paper_figure.html", title=TITLES[name], figure=figure, numbers=table, markdown=markdown).html


def figure_table(
    name: str, shown: Sequence[Point], found: Sequence[tuple[PlannedRun, RunRecord]], words: Sequence[str] = ()
) -> Table:
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
