"""Shows a comparison with the paper: as a table in every format, as a long CSV, as a page, and as JSON."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mambacl.paper.comparison import Comparison, Key, Line, benchmark_of, on_vit
from mambacl.paper.quoted import Quoted, sources
from mambacl.reports.groups import departures
from mambacl.reports.rendering import csv_text, to_latex, to_markdown, to_text
from mambacl.reports.runs import RunRecord
from mambacl.reports.tables import Cell, Column, Table
from mambacl.reports.templating import render
from mambacl.reports.writing import write_files
from mambacl.training.metrics import METRICS

UNITS = {
    "accuracy": "per cent",
    "forgetting": "per cent",
    "minutes": "minutes",
    "gflops": "GFLOP",
    "inference_ms": "ms",
}
TITLES = {"inference_ms": "inference", "peak_gib": "peak GiB", "parameters": "million parameters"}
COST_NOTES = {
    "minutes": "minutes, ours: training, consolidation and evaluation, on the machine of the run",
    "gflops": "GFLOP, ours: per image; a multiply-add counts as two, and the scan is included",
    "inference_ms": "inference, ours: evaluation time per image, including reading it",
    "peak_gib": "peak GiB, ours: of the GPU, or of the process on a CPU",
    "parameters": "million parameters, ours: of the backbone",
}
MAX_NAMED_ROWS = 6
CSV_HEAD = ("table", "method", "venue", "runs", "benchmark", "metric", "seeds", "ours", "ours_std", "paper",
            "paper_std", "mark", "source", "difference")  # fmt: skip


def as_table(comparison: Comparison) -> Table:
    """The paper's rows and columns, with three columns instead of one if we have runs; those come first."""
    table = comparison.table
    has_venue, has_complexity = any(row.venue for row in table.rows), any(row.complexity for row in table.rows)
    filled = {key for line in comparison.lines for key in line.ours}
    keys = sorted(comparison.keys, key=lambda key: key not in filled)
    columns = [Column("method", text=True), *[Column("venue", text=True)] * has_venue, Column("runs", text=True)]
    for benchmark, metric in keys:
        title = f"{benchmark} {TITLES.get(metric, metric)}"
        known, quoted = (benchmark, metric) in filled, (benchmark, metric) in table.keys
        columns += [Column(f"{title} ours")] * known + [Column(f"{title} paper")] * quoted
        columns += [Column(f"{title} difference")] * (known and quoted)
    columns += [Column("complexity", text=True)] * has_complexity
    rows = []
    for line in comparison.lines:
        row: list[Cell] = [line.name, *[line.venue or None] * has_venue, line.state]
        for key in keys:
            known, quoted = key in filled, key in table.keys
            row += [_ours(line, key)] * known + [_paper(line.paper(key))] * quoted
            row += [_difference(line, key)] * (known and quoted)
        row += [line.row.complexity if line.row and line.row.complexity else None] * has_complexity
        rows.append(tuple(row))
    units = " and ".join(dict.fromkeys(UNITS[metric] for metric in table.metrics))
    caption = f"{table.title}, in {units}: the paper's table '{table.name}' ({table.label})"
    return Table(caption, tuple(columns), tuple(rows), tuple(_notes(comparison)))


def as_text(comparison: Comparison, width: int | None = None) -> str:
    """For a terminal: our values beside the paper's in a table that fits 80 columns, then all rows."""
    text = to_text(as_table(comparison), width)
    ours = ours_table(comparison)
    return f"{to_text(ours, width)}\n{text}" if ours.rows else text


def ours_table(comparison: Comparison) -> Table:
    """A row per value of ours."""
    rows = [
        (line.name, benchmark, TITLES.get(metric, metric), _ours(line, (benchmark, metric)),
         _paper(line.paper((benchmark, metric))), _difference(line, (benchmark, metric)))
        for line in comparison.lines
        for benchmark, metric in line.ours
    ]  # fmt: skip
    titles = ("method", "benchmark", "metric", "ours", "paper", "difference")
    columns = tuple(Column(title, text=title in titles[:3]) for title in titles)
    return Table("Our results", columns, tuple(rows))


def long_csv(comparison: Comparison) -> str:
    """One line per cell, for easy parsing."""
    rows: list[Sequence[str]] = [CSV_HEAD]
    for line in comparison.lines:
        for key in comparison.keys:
            ours, paper, difference = line.ours.get(key), line.paper(key), line.difference(key)
            if ours is None and paper is None:
                continue
            seeds = " ".join(line.seeds(key[0])) if ours else ""
            cells = [f"{ours.mean:.4f}" if ours else "", _four_decimals(ours.std if ours else None)]
            cells += [f"{paper.mean:g}" if paper else "", f"{paper.std:g}" if paper and paper.std is not None else ""]
            cells += [paper.mark if paper else "", line.row.source if line.row else "", _four_decimals(difference)]
            rows.append([comparison.table.name, line.name, line.venue, line.state, *key, seeds, *cells])
    return csv_text(rows)


def as_record(comparison: Comparison) -> dict[str, Any]:
    """Every finished run with its numbers, and a table per benchmark in the form of `mambacl.bench.page`, which writes
    it into a page."""
    metrics = comparison.table.metrics
    rows: dict[str, dict[str, Any]] = {}
    tables: dict[str, dict[str, Any]] = {}
    for line in comparison.lines:
        for benchmark in dict.fromkeys(key[0] for key in line.ours):
            own = [run for run in line.runs if benchmark_of(run) == benchmark]
            row: dict[str, Any] = {"what": line.name, "backbone": ", ".join(dict.fromkeys(run.backbone for run in own))}
            for metric in metrics:
                value, quoted = line.ours.get((benchmark, metric)), line.paper((benchmark, metric))
                if value is not None:
                    row[metric] = [round(part, 2) for part in (value.mean, value.std) if part is not None]
                row[f"{metric}, published"] = quoted.text if quoted else ""
            rows[f"{line.name}, {benchmark}"] = {**row, "seeds": line.seeds(benchmark)}
            columns = ["backbone", *metrics, *(f"{metric}, published" for metric in metrics)]
            tables.setdefault(benchmark, {"columns": columns, "rows": []})["rows"].append(f"{line.name}, {benchmark}")
    return {
        "unit": "per cent",
        "notes": _notes(comparison),
        "rows": rows,
        "tables": tables,
        "runs": {run.folder.name: _numbers(run) for line in comparison.lines for run in line.runs},
    }


def _numbers(run: RunRecord) -> dict[str, Any]:
    """A run's numbers, and how it was trained. Its times hold for its machine and what else ran there."""
    results, training = run.results, run.config.get("training", {})
    sizes = ("peak_memory_bytes", "state_bytes", "stored_images")
    copied = ("metrics", "seconds", "images_per_second", *sizes, "precision", "versions")
    recipe = ("passes", "batch_size", "optimizer", "schedule", "lr", "head_lr", "weight_decay")
    return {
        **{key: getattr(run, key) for key in ("method", "backbone", "seed")},
        "benchmark": benchmark_of(run),
        **{key: results[key] for key in copied if key in results},
        "classes": [len(task) for task in run.tasks],
        "correct": results["correct"][-1],
        "total": results["total"],
        "training": {key: training[key] for key in recipe if key in training},
        "options": run.config.get("options", {}),
    }


def paper_page(comparison: Comparison) -> str:
    table = as_table(comparison)
    return render(
        "paper_table.html",
        title=comparison.table.title,
        name=comparison.table.name,
        runs=len({run.folder for line in comparison.lines for run in line.runs}),
        results=table,
        markdown=to_markdown(table),
        latex=to_latex(table),
    ).html


def write_paper_table(comparison: Comparison, target: Path) -> Path:
    """Writes `paper-NAME.html`, the table as `.md`, `.tex` and `.csv`, all runs as `.json`. Returns the page's path."""
    table, stem = as_table(comparison), f"paper-{comparison.table.name}"
    files = {f"{stem}.md": to_markdown(table), f"{stem}.tex": to_latex(table), f"{stem}.csv": long_csv(comparison)}
    files[f"{stem}.json"] = json.dumps(as_record(comparison), indent=1) + "\n"
    files[f"{stem}.html"] = paper_page(comparison)
    write_files(target, {name: text.encode() for name, text in files.items()})
    return target / f"{stem}.html"


def _notes(comparison: Comparison) -> list[str]:
    table, lines = comparison.table, comparison.lines
    names = {"accuracy": comparison.names.accuracy, "forgetting": comparison.names.forgetting}
    used = [(word, METRICS.get(name)) for word, name in names.items() if word in table.metrics]
    notes = [f"{word}, ours, is {metric.name}: {metric.meaning}" for word, metric in used]
    notes += [words for metric, words in COST_NOTES.items() if any(metric == key[1] for li in lines for key in li.ours)]
    notes.append("ours: mean ± sample standard deviation over the seeds; difference: ours minus the paper's")
    notes += _source_notes(comparison)
    if any(line.state == "not in mambacl" for line in lines):
        notes.append("not in mambacl: only the paper's value is shown")
    notes += _backbone_notes(comparison)
    notes += _training_notes(comparison)
    every = [run for line in lines for run in line.runs]
    tools = dict.fromkeys(run.imported for run in every if run.imported)
    if tools:
        notes.append(
            f"imported from {', '.join(tools)}: on the split, class order and backbone that the file's author used"
        )
    if any(value.std is None for line in lines for value in line.ours.values()):
        notes.append("a single seed has no deviation")
    for line in lines:
        for benchmark in dict.fromkeys(key[0] for key in line.ours):
            if len(set(line.seeds(benchmark))) < len(line.seeds(benchmark)):
                notes.append(f"{line.name}, {benchmark}: a seed appears more than once, so the deviation is too small")
    notes += comparison.notes
    for run in comparison.left_out:
        notes.append(f"left out because unfinished ({run.tasks_done} of {len(run.tasks)} tasks): {run.folder.name}")
    return notes


def _backbone_notes(comparison: Comparison) -> list[str]:
    """Which of our runs have another backbone than the paper's, or start from random weights unlike the paper's."""

    def other(run: RunRecord) -> str:
        paper = comparison.table.backbone
        if on_vit(run):
            return "" if run.backbone == "vit_base" else f"ours use {run.backbone}, the published ones a ViT-B/16"
        return f"ours use {run.backbone}, the paper {paper}" if paper and run.backbone != paper else ""

    notes = [f"{rows}: {words}" for words, rows in _rows_by(comparison, other).items()]
    random = [
        run.backbone
        for line in comparison.lines
        for run in line.runs
        if not run.imported and line.row and run.config.get("pretrained") is False
        if "pretrained" not in (line.row.run or {})
    ]
    return notes + [f"ours start from random weights: {', '.join(dict.fromkeys(random))}"] * bool(random)


def _training_notes(comparison: Comparison) -> list[str]:
    """Which rows have runs of ours that were trained differently from the paper."""
    ways = _rows_by(comparison, lambda run: "" if on_vit(run) else ", ".join(departures(run)))
    return [f"{rows}: ours are trained differently from the paper: {way}" for way, rows in ways.items()]


def _rows_by(comparison: Comparison, words: Callable[[RunRecord], str]) -> dict[str, str]:
    """The paper's rows with a run of ours that has these words, unless they are empty."""
    found: dict[str, list[str]] = {}
    for line in comparison.lines:
        for run in line.runs:
            said = "" if run.imported or line.row is None else words(run)
            if said and line.name not in found.setdefault(said, []):
                found[said].append(line.name)
    return {said: _first_to_last(names, 2) for said, names in found.items()}


def _first_to_last(names: Sequence[str], most: int) -> str:
    return ", ".join(names) if len(names) <= most else f"{names[0]} to {names[-1]}"


def _source_notes(comparison: Comparison) -> list[str]:
    """The sources of the paper's values, by row and by mark."""
    known, notes = sources(), []
    for source in dict.fromkeys(row.source for row in comparison.table.rows):
        methods = list(dict.fromkeys(row.method for row in comparison.table.rows if row.source == source))
        notes.append(f"paper, from {known[source]}: {_first_to_last(methods, MAX_NAMED_ROWS)}")
    marks = {value.mark for row in comparison.table.rows for value in row.values.values() if value and value.mark}
    return notes + [f"{mark}: {words}" for mark, words in known.items() if mark in marks]


def _ours(line: Line, key: Key) -> Cell:
    value = line.ours.get(key)
    if value is None:
        return None
    digits = 1 if key[1] == "minutes" and abs(value.mean) >= 10 else 2
    share = f" ({line.shares[key]:.1%})" if key in line.shares else ""
    return f"{value.mean:.{digits}f}" + ("" if value.std is None else f" ± {value.std:.{digits}f}") + share


def _paper(value: Quoted | None) -> Cell:
    return None if value is None else value.text.replace("±", " ± ")


def _difference(line: Line, key: Key) -> Cell:
    value = line.difference(key)
    return None if value is None else f"{value:+.{1 if key[1] == 'minutes' else 2}f}"


def _four_decimals(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
