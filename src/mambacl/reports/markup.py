"""Pieces of HTML. Every text that comes from outside passes through `escaped`; the page needs no other file.

The content security policy lets the page show its own pictures and style and nothing else, so that a name which
slipped through could still do no harm.
"""

import base64
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mambacl.reports.figures import COLOURS, shade_range
from mambacl.reports.groups import Value
from mambacl.reports.runs import RunRecord
from mambacl.reports.stylesheet import CSS
from mambacl.reports.tables import MINUS, MISSING, Cell, Table, one_decimal

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True)
class Picture:
    """A figure as it is written to `figures/` and embedded in the page."""

    name: str
    data: bytes
    alt: str
    caption: str = ""

    def html(self) -> str:
        source = "data:image/png;base64," + base64.b64encode(self.data).decode("ascii")
        width, height = (
            int.from_bytes(self.data[i : i + 4], "big") * 16 // 25 for i in (16, 20)
        )  # PNG header; 150 dpi to 96
        caption = f"<figcaption>{escaped(self.caption)}</figcaption>" if self.caption else ""
        return (
            f'<figure><img src="{source}" alt="{escaped(self.alt)}" width="{width}" height="{height}">'
            f"{caption}</figure>"
        )


@dataclass(frozen=True)
class Section:
    anchor: str
    title: str
    body: str
    lead: str = ""

    def html(self) -> str:
        lead = f'<p class="lead">{escaped(self.lead)}</p>' if self.lead else ""
        title = f'<h2 id="{self.anchor}-title">{escaped(self.title)}</h2>{lead}'
        return f'<section id="{self.anchor}" aria-labelledby="{self.anchor}-title">\n{title}\n{self.body}\n</section>'


def escaped(text: Any) -> str:
    """Text for HTML, quotes included; control signs, which HTML does not allow, become a visible mark."""
    return html.escape(re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", str(text)))


def document(title: str, header: str, sections: Sequence[Section]) -> str:
    links = "".join(f'<li><a href="#{section.anchor}">{escaped(section.title)}</a></li>' for section in sections)
    body = "\n".join(section.html() for section in sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{escaped(POLICY)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escaped(title)}</title>
<style>{CSS}</style>
</head>
<body>
<header>
{header}
<nav aria-label="Contents"><ul>{links}</ul></nav>
</header>
<main>
{body}
</main>
<footer><p>Written by mambacl. This page is one file and needs no connection.</p></footer>
</body>
</html>
"""


def cards(entries: Sequence[tuple[str, Cell, str]]) -> str:
    """Headline figures: a label, a value and what it means."""
    parts = []
    for label, value, meaning in entries:
        parts.append(
            f'<div><dt>{escaped(label)}</dt><dd class="figure">{_figure(value)}</dd>'
            f'<dd class="what">{escaped(meaning)}</dd></div>'
        )
    return f'<dl class="cards">{"".join(parts)}</dl>'


def facts(entries: Sequence[tuple[str, Any]]) -> str:
    items = "".join(f"<li>{escaped(label)} <b>{escaped(value)}</b></li>" for label, value in entries)
    return f'<ul class="facts">{items}</ul>'


def status_mark(record: RunRecord) -> str:
    return f'<span class="status {"finished" if record.finished else "open"}">{escaped(record.status)}</span>'


def table_html(table: Table, notes: bool = True) -> str:
    head = "".join(
        f'<th scope="col"{" class=text" if column.text else ""}>{escaped(column.title)}</th>'
        for column in table.columns
    )
    rows = []
    for r, row in enumerate(table.rows):
        cells = []
        for c, (cell, column) in enumerate(zip(row, table.columns, strict=True)):
            words = _cell(cell)
            words = f"<strong>{words}</strong>" if table.is_best(r, c) else words
            tag = 'th scope="row"' if c == 0 else "td"
            cells.append(f"<{tag}{' class=text' if column.text else ''}>{words}</{tag.split()[0]}>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    remarks = note_list(table.notes) if notes else ""
    dense = " dense" if len(table.columns) > 8 else ""
    return (
        f'<div class="wide" tabindex="0"><table class="full{dense}"><caption>{escaped(table.caption)}</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{''.join(rows)}</tbody></table></div>{remarks}"
    )


def note_list(notes: Sequence[str]) -> str:
    return f'<ul class="notes">{"".join(f"<li>{escaped(note)}</li>" for note in notes)}</ul>' if notes else ""


def matrix_html(record: RunRecord) -> str:
    """The accuracy matrix as a table: a row a task learned, shaded by accuracy, with the mean and the forgetting."""
    matrix = 100 * record.accuracies()
    done = len(matrix)
    low, high = shade_range(matrix)
    over = record.headline
    means = 100 * record.after_each_task(over)
    head = "".join(f'<th scope="col">{j + 1}</th>' for j in range(done))
    rows = []
    for t in range(done):
        cells = "".join(_shaded(matrix[t, j], low, high) for j in range(t + 1)) + "<td></td>" * (done - 1 - t)
        mean = f'<td class="total">{_number(means[t])}</td>'
        rows.append(f'<tr><th scope="row" class="row">after {t + 1}</th>{cells}{mean}</tr>')
    foot = ""
    if done > 1:
        lost = 100 * record.forgetting_by_task()
        cells = "".join(f"<td>{_number(value)}</td>" for value in lost)
        mean = f'<td class="total">{_number(float(np.mean(lost)))}</td>'
        foot = f'<tfoot><tr><th scope="row" class="row">forgetting</th>{cells}<td></td>{mean}</tr></tfoot>'
    size = " large" if done > 25 else ""
    caption = (
        f"Accuracy (%) on each task (columns) after each task (rows); the last column is the mean over the {over} "
        "seen. Forgetting: best over the rows before the last, less the last row."
    )
    return (
        f'<div class="wide" tabindex="0"><table class="matrix{size}"><caption>{caption}</caption>'
        f'<thead><tr><th scope="col" class="row">task</th>{head}<th scope="col">mean</th></tr></thead>\n'
        f"<tbody>{''.join(rows)}</tbody>{foot}</table></div>"
    )


def time_bar(seconds: Mapping[str, float]) -> str:
    """Seconds by phase as one bar, with a key that says it in words."""
    total = sum(seconds.values())
    if total <= 0:
        return ""
    bar, keys = [], []
    for i, (phase, value) in enumerate(seconds.items()):
        colour, share = COLOURS[i % len(COLOURS)], 100 * value / total
        bar.append(f'<div style="width:{share:.2f}%;background:{colour}"></div>')
        keys.append(
            f'<li><i style="background:{colour}"></i>{escaped(phase)} <b>{duration(value)}</b> ({share:.0f}%)</li>'
        )
    return f'<div class="bar" aria-hidden="true">{"".join(bar)}</div><ul class="keys">{"".join(keys)}</ul>'


def class_table(record: RunRecord) -> str:
    """The classes of each task by name, or its domain, the tasks to come in a quieter tone."""
    totals, domains = record.results["total"], record.domains
    what = "domain" if domains else "names"
    rows = []
    for t, task in enumerate(record.tasks):
        listed = [domains[t]] if domains else [record.class_name(class_id) for class_id in task]
        names = "".join(f"<li>{escaped(name)}</li>" for name in listed)
        tested = f"{totals[t]:,}" if t < len(totals) else MISSING
        todo = "" if t < record.tasks_done else " todo"
        rows.append(
            f'<tr><th scope="row">{t + 1}</th><td>{len(task)}</td><td>{tested}</td>'
            f'<td class="text"><ul class="names{todo}">{names}</ul></td></tr>'
        )
    return (
        '<div class="wide" tabindex="0"><table class="full"><thead><tr><th scope="col">task</th>'
        f'<th scope="col">classes</th><th scope="col">test images</th><th scope="col" class="text">{what}</th></tr>'
        f"</thead>\n<tbody>{''.join(rows)}</tbody></table></div>"
    )


def copyable(title: str, text: str, opened: bool = False) -> str:
    """Text behind a fold; one click on it selects it all, so that no script is needed."""
    state = " open" if opened else ""
    return f'<details{state}><summary>{escaped(title)}</summary><pre class="copy">{escaped(text)}</pre></details>'


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = round(seconds / 60), int(round(seconds / 60) // 60)
    return f"{hours} h {minutes - 60 * hours} min" if hours else f"{int(seconds // 60)} min {int(seconds % 60)} s"


def _shaded(value: float, low: float, high: float) -> str:
    if not np.isfinite(value):
        return f"<td>{MISSING}</td>"
    strength = 0.06 + 0.54 * float(np.clip((value - low) / (high - low), 0, 1))
    return f'<td style="background:rgba(var(--shade),{strength:.2f})">{_number(value)}</td>'


def _number(value: float) -> str:
    return one_decimal(value).replace("-", MINUS) if np.isfinite(value) else MISSING


def _cell(cell: Cell) -> str:
    if not isinstance(cell, Value):
        return escaped(MISSING if cell is None else cell)
    std = "" if cell.std is None else f' <span class="std">± {_number(cell.std)}</span>'
    return _number(cell.mean) + std


def _figure(cell: Cell) -> str:
    if not isinstance(cell, Value):
        return escaped(MISSING if cell is None else cell)
    std = "" if cell.std is None else f" ± {_number(cell.std)}"
    return f"{_number(cell.mean)}<small>{std} %</small>"
