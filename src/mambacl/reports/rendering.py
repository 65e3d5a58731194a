"""Renders tables as aligned text for a terminal, Markdown, LaTeX and CSV. HTML is in `templates`."""

import base64
import csv
import io
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from unicodedata import combining, east_asian_width

from mambacl.reports.groups import Value
from mambacl.reports.tables import MISSING, Cell, Table

LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "±": r"$\pm$",
    MISSING: "--",
    "·": r"\textperiodcentered{}",
    **{sign: "\\" + sign for sign in "&%$#_"},
}


def terminal_width() -> int:
    """The terminal's, within reason; 120 if the output goes elsewhere."""
    return min(200, max(60, shutil.get_terminal_size((120, 24)).columns))


def to_text(table: Table, width: int | None = None) -> str:
    """Aligned columns for a terminal, with the notes below.

    Columns that exceed the width, by default the terminal's, follow in further blocks, which repeat the first column.
    """
    width = width or terminal_width()
    titles = [_one_line(column.title) for column in table.columns]
    heads = [textwrap.wrap(title, 12, break_long_words=False, break_on_hyphens=False) or [""] for title in titles]
    cells = [[_one_line(table.shown(cell)) for cell in row] for row in table.rows]
    widths = [max(columns_of(words) for words in [*head, *(row[i] for row in cells)]) for i, head in enumerate(heads)]

    def line(row: list[str], block: list[int]) -> str:
        return "  ".join(pad(row[i], widths[i], right=not table.columns[i].text) for i in block).rstrip()

    lines: list[str] = []
    for block in _blocks(widths, width):
        height = max(len(heads[i]) for i in block)
        padded = [[""] * (height - len(head)) + head for head in heads]  # titles touch the rule below them
        lines += [
            line([head[number] if number < len(head) else "" for head in padded], block) for number in range(height)
        ]
        lines.append("  ".join("-" * widths[i] for i in block))
        lines += [*(line(row, block) for row in cells), ""]
    return "\n".join([table.caption, "", *lines, *table.notes]).rstrip() + "\n"


def columns_of(text: str) -> int:
    """The columns that a text takes on a terminal: Chinese, Japanese and Korean signs take two, accents none."""
    return sum(0 if combining(sign) else 2 if east_asian_width(sign) in "WF" else 1 for sign in text)


def pad(text: str, width: int, right: bool = False) -> str:
    """The text in this many columns of a terminal, on the left or on the right."""
    space = " " * (width - columns_of(text))
    return space + text if right else text + space


def _blocks(widths: list[int], width: int) -> list[list[int]]:
    """Groups of columns that fit side by side; the first column begins every group."""
    blocks = [[0]] if widths else []
    for i in range(1, len(widths)):
        taken = sum(widths[j] + 2 for j in blocks[-1])
        if taken + widths[i] > width and len(blocks[-1]) > 1:
            blocks.append([0])
        blocks[-1].append(i)
    return blocks


def to_markdown(table: Table) -> str:
    """A pipe table with the best value per column in bold, and the notes as a list below."""
    lines = [
        "| " + " | ".join(markdown_escaped(column.title) for column in table.columns) + " |",
        "|" + "|".join(":--" if column.text else "--:" for column in table.columns) + "|",
    ]
    for r, row in enumerate(table.rows):
        words = [markdown_escaped(table.shown(cell)) for cell in row]
        words = [f"**{word}**" if table.is_best(r, c) else word for c, word in enumerate(words)]
        lines.append("| " + " | ".join(words) + " |")
    notes = [f"- {markdown_escaped(note)}" for note in table.notes]
    return "\n".join([f"{markdown_escaped(table.caption)}", "", *lines, "", *notes]).rstrip() + "\n"


def pipe_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table of cells as they are."""
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rows))


def to_latex(table: Table) -> str:
    """A tabular for the package booktabs with the best value per column in bold; caption and notes are comments."""
    lines = [f"% {_one_line(table.caption)}", r"% needs \usepackage{booktabs}"]
    lines += [f"% {_one_line(note)}" for note in table.notes]
    lines += [rf"\begin{{tabular}}{{{''.join('l' if column.text else 'r' for column in table.columns)}}}", r"\toprule"]
    lines += [" & ".join(latex_escaped(column.title) for column in table.columns) + r" \\", r"\midrule"]
    for r, row in enumerate(table.rows):
        words = [_latex_cell(table, cell, table.is_best(r, c)) for c, cell in enumerate(row)]
        lines.append(" & ".join(words) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def csv_address(table: Table) -> str:
    """A table as the address of a CSV file to download."""
    return "data:text/csv;charset=utf-8;base64," + base64.b64encode(to_csv(table).encode()).decode("ascii")


def to_csv(table: Table) -> str:
    """Numbers in per cent with four decimals. Deviations have their own column, if any row has one."""
    spread = [
        any(isinstance(row[i], Value) and row[i].std is not None for row in table.rows)  # type: ignore[union-attr]
        for i in range(len(table.columns))
    ]
    titles = [[column.title, f"{column.title} std"] for column in table.columns]
    lines = [titles, *([_csv_fields(cell) for cell in row] for row in table.rows)]
    return csv_text(
        [word for pair, deviates in zip(line, spread, strict=True) for word in pair[: 1 + deviates]] for line in lines
    )


def csv_text(rows: Iterable[Sequence[str]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def markdown_escaped(text: str) -> str:
    """Escapes text so that Markdown shows it unchanged. Underscores within words need no escape."""
    text = re.sub(r"([\\`*\[\]<>|&~$])", r"\\\1", _one_line(text))
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", text)


def latex_escaped(text: str) -> str:
    return "".join(LATEX.get(sign, sign) for sign in _one_line(text))


def _latex_cell(table: Table, cell: Cell, best: bool) -> str:
    if not isinstance(cell, Value):
        return latex_escaped(table.shown(cell))
    mean = table.shown(Value(cell.mean))
    mean = mean.replace("-", "$-$")  # a minus sign, not a hyphen
    mean = rf"\textbf{{{mean}}}" if best else mean
    return mean if cell.std is None else rf"{mean} $\pm$ {table.shown(Value(cell.std))}"


def _csv_fields(cell: Cell) -> list[str]:
    if isinstance(cell, Value):
        return [f"{cell.mean:.4f}", "" if cell.std is None else f"{cell.std:.4f}"]
    return [cell or "", ""]


def _one_line(text: str) -> str:
    """Replaces line breaks and other control characters, which would break a row, by spaces."""
    return re.sub(r"[\x00-\x1f\x7f\u2028\u2029]+", " ", text)
