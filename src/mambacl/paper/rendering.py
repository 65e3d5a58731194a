"""Shows what a design's runs came to: a table by the reports' own code, a figure as PNG with its numbers as CSV."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mambacl.backbones import create_model
from mambacl.backbones.flops import count_flops
from mambacl.paper.designs import FIGURES, PlannedRun
from mambacl.paper.drawing import TITLES, draw
from mambacl.paper.points import Point, points, to_csv
from mambacl.reports.figures import png
from mambacl.reports.groups import Value
from mambacl.reports.page import write_files
from mambacl.reports.paper_page import laid_out, write_paper_table
from mambacl.reports.paper_table import Comparison, benchmark_of, compare_with_paper
from mambacl.reports.rendering import to_markdown, to_text
from mambacl.reports.runs import RunRecord
from mambacl.reports.tables import Cell, Column, Table


def render(name: str, found: Sequence[tuple[PlannedRun, RunRecord]], target: Path, scale: str) -> tuple[str, Path]:
    """Writes the table or figure; returns it as text, and the path of the page or picture."""
    if name not in FIGURES:
        compared = compare_with_paper(name, [record for _, record in found])
        _complete(compared)
        random = [record.backbone for _, record in found if record.config.get("pretrained") is False]
        words = f"ours start from random weights: {', '.join(dict.fromkeys(random))}\n" if random else ""
        return to_text(laid_out(compared)) + words, write_paper_table(compared, target)
    shown = points(name, found, scale)
    table, stem = figure_table(name, shown, found), f"paper-{name}"
    files = {f"{stem}.csv": to_csv(name, shown).encode(), f"{stem}.md": to_markdown(table).encode()}
    files[f"{stem}.png"] = png(draw(name, shown))  # last, so that it is there only when all is
    write_files(target, files)
    return to_text(table), target / f"{stem}.png"


def figure_table(name: str, shown: Sequence[Point], found: Sequence[tuple[PlannedRun, RunRecord]]) -> Table:
    """The figure's numbers: a row for each benchmark, series and place, ours and the paper's side by side."""
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
    elif "paper" in sources:
        notes.append("paper: the values of its main table; the figure's others are not printed in its text")
    if name == "blocks":
        notes.append("paper: with all 48 blocks of its backbone, and set where all blocks of ours are")
    backbones = list(dict.fromkeys(record.backbone for _, record in found))
    if backbones:
        notes.append(f"ours on {', '.join(backbones)}; the paper's on defocus_mamba_large_22k")
    notes += [f"left out, for it is not finished: {record.folder}" for _, record in found if not record.finished]
    return Table(f"{TITLES[name]}: the paper's figure '{name}'", tuple(columns), tuple(cells), tuple(notes))


def _cell(point: Point | None) -> Cell:
    if point is None:
        return None
    digits = 4 if point.metric == "loss" else 2
    return f"{point.value:.{digits}f}" + ("" if point.std is None else f" ± {point.std:.{digits}f}")


def _complete(compared: Comparison) -> None:
    """What a table has besides accuracies and minutes of runs: the mean over benchmarks, and the model's operations."""
    columns = [name for name in compared.table.columns if name != "average"]
    for line in compared.lines:
        ours = [line.ours.get((name, "minutes")) for name in columns]
        if "average" in compared.table.columns and all(ours):
            line.ours["average", "minutes"] = Value(sum(value.mean for value in ours if value) / len(ours))
        if "gflops" in compared.table.metrics:
            for run in line.runs:
                line.ours[benchmark_of(run), "gflops"] = Value(gflops(run))


def gflops(run: RunRecord) -> float:
    """Of one image, the scan included; see `mambacl models`."""
    options: Mapping[str, Any] = run.config.get("backbone_options") or {}
    with torch.device("meta"):
        model: Any = create_model(run.backbone, num_classes=0, **options).eval()
        size = _size(run) or model.default_cfg["input_size"][-1]
        return count_flops(model, size)[0] / 1e9


def _size(run: RunRecord) -> int | None:
    transforms = (run.config.get("stream") or {}).get("transforms") or {}
    return transforms.get("image_size")
