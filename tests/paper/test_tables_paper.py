"""Every quoted value against the paper's LaTeX source: the same rows in the same order with the same numbers."""

import re
from pathlib import Path

import pytest
import yaml

from mambacl.errors import UserError
from mambacl.paper import Quoted, paper_table, sources, table_names
from mambacl.paper.quoted import FILE

PAPER = Path(__file__).parents[3] / "shared" / "paper.txt"
PROJECTIONS = ("W_delta", "W_C", "A", "W_B", "out")
in_the_paper = pytest.mark.skipif(not PAPER.is_file(), reason=f"the paper's text is not at {PAPER}")


def latex_rows(label: str) -> list[str]:
    """The body rows of the table with this label."""
    tables = re.findall(r"\\begin\{table\*?\}.*?\\end\{table\*?\}", PAPER.read_text(encoding="utf-8"), re.S)
    (table,) = (table for table in tables if rf"\label{{{label}}}" in table)
    body = table[table.index(r"\midrule") :]
    nested = r"\\begin\{tabular\}\[c\]\{[^&]*?\\end\{tabular\}"  # a cell of two lines
    body = re.sub(nested, lambda match: match[0].replace(r"\\", " "), body, flags=re.S)
    return [row for row in body.split(r"\\") if "&" in row]


def cells(row: str) -> list[str]:
    """What the row's cells say, in the way that the data file writes it."""
    row = re.sub(r"\\cite\{[^}]*\}|\\(multirow|multicolumn)\{\d+\}\{[^}]*\}|\\cmidrule\(l\)\{[\d-]+\}", "", row)
    row = re.sub(r"\\(begin|end)\{tabular\}(\[c\]\{@\{\}c@\{\}\})?|\\(midrule|bottomrule|tsb\{[^}]*\})", "", row)
    row = row.replace(r"\pms", "±").replace(r"\tdr", "†").replace(r"\str", "*").replace("’", "'").replace(r"\%", "%")
    row = re.sub(r"\\(underline|textbf|calO|,|\(|\))|[{}~]", "", row)
    words = [re.sub(r"\s+(?!\()(?=±)", "", " ".join(cell.split())) for cell in row.split("&")]
    return [word for word in words if word not in ("", "|")]


@in_the_paper
@pytest.mark.parametrize("name", table_names())
def test_every_row_is_the_papers(name: str) -> None:
    table = paper_table(name)
    printed = latex_rows(table.label)
    assert len(printed) == len(table.rows)
    for line, row in zip(printed, table.rows, strict=True):
        found = cells(line)
        expected = [value.text if value else "-" for value in row.values.values()]
        if name == "ablation":
            used = [kind for kind, cell in zip(PROJECTIONS, line.split("&"), strict=False) if r"\use" in cell]
            assert row.run is not None and row.run["projects"] == used
            assert found[-len(expected) :] == expected
            continue
        if name == "resources":
            assert found.pop().replace(" ", "").removeprefix("--") == row.complexity.removeprefix("O")
        assert found[-len(expected) :] == expected, row.method
        assert row.method in found
        if name in ("main", "long-sequence"):
            assert found == [row.method, row.venue, *expected]
        cited = re.findall(r"\\cite\{([^}]*)\}", line)
        assert cited == ([row.cite] if row.cite else [])


@in_the_paper
def test_no_table_of_the_paper_is_left_out() -> None:
    labels = re.findall(r"\\label\{(tab:[^}]*)\}", PAPER.read_text(encoding="utf-8"))
    assert sorted(labels) == sorted(paper_table(name).label for name in table_names())


def test_the_published_competitors_and_those_reproduced_for_long_sequences() -> None:
    assert sum(row.source == "published" for row in paper_table("main").rows) == 22
    assert sum(row.source == "reproduced" for row in paper_table("long-sequence").rows) == 6


@pytest.mark.parametrize("name", table_names())
def test_every_row_says_where_it_comes_from(name: str) -> None:
    for row in paper_table(name).rows:
        assert row.source in sources()
        assert all(value.mark in ("", *sources()) for value in row.values.values() if value)
        assert row.cite or row.source != "published"
        assert (row.run is not None) == (row.source == "own")


def test_a_value() -> None:
    value = paper_table("main").rows[0].values["domainnet-s200-10", "accuracy"]
    assert value == Quoted("81.17±0.83†", 81.17, 0.83, "†")
    assert paper_table("main").rows[3].values["domainnet-s200-10", "accuracy"] is None
    assert paper_table("svd").rows[1].values["imagenet-r-10", "minutes"] == Quoted("8.7 (2.3%)", 8.7)


def test_a_table_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"no table 'mian'. Did you mean 'main'\?"):
        paper_table("mian")


def test_nothing_in_the_file_goes_unread() -> None:
    known = {"method", "venue", "cite", "source", "complexity", "run", "values"}
    contents = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    for table in contents["tables"].values():
        assert all(set(row) <= known for row in table["rows"])
