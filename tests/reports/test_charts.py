"""Charts: the numbers behind each one, places to hover over, colours of the page, and fonts for all signs."""

import base64
import csv
import io
import json
import re
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure
from reports_help import make_run

from mambacl.reports import charts, figures, load_run, numbers
from mambacl.reports.charts import Chart, _wide_fonts, chart
from mambacl.reports.groups import Value, group_runs
from mambacl.reports.marks import mark, placed_marks
from mambacl.reports.tables import Column, Table

COUNTS = [[90], [80, 45], [70, 44, 20]]
TABLE = Table("numbers", (Column("x"), Column("y")), tuple((str(i), Value(i / 3)) for i in range(300)))


@pytest.fixture
def run(tmp_path):
    return load_run(make_run(tmp_path / "a", COUNTS, [100, 50, 25], epochs=2))


def rows_of(found: Chart) -> list[list[str]]:
    kind, _, data = found.csv.partition(",")
    assert kind == "data:text/csv;charset=utf-8;base64"
    return list(csv.reader(io.StringIO(base64.b64decode(data).decode())))


def test_the_numbers_of_the_matrix_are_those_of_the_run(run):
    found = chart("matrix", figures.accuracy_matrix(run), numbers.accuracy_matrix(run))
    head, *rows = rows_of(found)
    assert head == ["after task", "task 1", "task 2", "task 3"]
    assert rows == [["1", "90.0000", "", ""], ["2", "80.0000", "90.0000", ""], ["3", "70.0000", "88.0000", "80.0000"]]
    words = [entry[-1] for entry in json.loads(found.drawing.marks)]
    assert len(words) == 6 and words[1] == "task 1 after task 2: 80.00%"


def test_each_point_of_a_curve_says_its_value(run):
    found = chart("accuracy", figures.accuracy_curves(group_runs([run])), numbers.run_curve(run))
    words = [entry[-1] for entry in json.loads(found.drawing.marks)]
    assert "all tasks seen, after task 2: 85.00" in words and "task 3 right after learning it: 80.00%" in words
    assert [row[1:] for row in rows_of(found)[1:]] == [
        ["90.0000", "90.0000"], ["85.0000", "90.0000"], ["79.3333", "80.0000"]
    ]  # fmt: skip


def test_the_other_charts_have_numbers(run):
    lost = chart("forgetting", figures.forgetting_by_task(run), numbers.forgetting(run))
    assert rows_of(lost)[1:] == [["1", "90.0000", "70.0000", "20.0000"], ["2", "90.0000", "88.0000", "2.0000"]]
    trained = chart("training", figures.training_curves(run), numbers.training(run))
    assert rows_of(trained)[1] == ["1", "1", "1", "0.5", "0.1"] and len(rows_of(trained)) == 1 + 6
    assert len(json.loads(trained.drawing.marks)) == 2 * 6  # loss and accuracy


def test_marks_are_where_the_drawing_has_the_points():
    """The SVG's units are points, 72 per inch, from the upper left corner."""
    figure = Figure(figsize=(4, 2), dpi=150)
    axes = figure.add_axes((0.25, 0.5, 0.5, 0.5))  # from 1 to 3 inches, and from 1 to 2
    axes.set(xlim=(0, 10), ylim=(0, 1))
    mark(axes, [0, 5, np.nan], [0, 0.5, 1], ["a", "b", "nowhere"])
    mark(axes, [5], [0.5], ["cell"], (10, 1))
    assert json.loads(placed_marks(figure)) == [[72, 72, 0, 0, "a"], [144, 36, 0, 0, "b"], [72, 0, 144, 72, "cell"]]


def test_a_chart_is_small_and_takes_the_colours_of_the_page(run):
    found = chart("accuracy", figures.accuracy_curves(group_runs([run])), TABLE)
    assert found.drawing.svg.startswith("<svg viewBox") and len(found.drawing.svg) < 50_000
    for colour, name in ((figures.INK, "--ink"), (figures.QUIET, "--quiet")):
        assert colour not in found.drawing.svg and f"var({name})" in found.drawing.svg
    assert "var(--font)" in found.drawing.svg and "DejaVu" not in found.drawing.svg
    ids = re.findall(r' id="([^"]*)"', found.drawing.svg)
    assert all(name.startswith("accuracy-") for name in ids) and len(ids) == len(set(ids))
    used = re.findall(r'(?:href="|url\()#([^")]*)', found.drawing.svg)
    assert used and set(used) <= set(ids)
    assert chart("accuracy", figures.accuracy_curves(group_runs([run])), TABLE).drawing == found.drawing


def test_a_long_table_is_cut_on_the_page_but_not_in_the_csv(run):
    found = chart("matrix", figures.accuracy_matrix(run), TABLE)
    assert len(found.shown.rows) == 200 and "the first 200 of 300 rows" in found.shown.notes[-1]
    assert len(rows_of(found)) == 301


def test_without_a_font_for_names_in_other_scripts_one_sentence_says_so(monkeypatch, caplog):
    monkeypatch.setattr(charts.fontManager, "ttflist", [])
    monkeypatch.setattr(charts, "findSystemFonts", list)
    _wide_fonts.cache_clear()
    try:
        assert _wide_fonts() == _wide_fonts() == []
        [sentence] = [record.message for record in caplog.records]
        assert "PNG files of figures show boxes: install one" in sentence
    finally:
        _wide_fonts.cache_clear()


def drawn(name: str) -> Chart:
    figure, (axes,) = figures.frame(3, 2)
    axes.set_yticks([0], [name])
    return chart("names", figure, TABLE)


def test_names_in_other_scripts_are_drawn_and_not_boxes():
    if not _wide_fonts():
        pytest.skip("no font here has Chinese signs")

    # Without such a font, both would be the same box.
    assert drawn("猫").drawing.png != drawn("犬").drawing.png and "猫" in drawn("猫").drawing.svg


@pytest.mark.skipif(sys.platform != "linux", reason="charts are drawn in forks on Linux only")
def test_charts_drawn_together_are_those_drawn_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> list[Chart]:
        return [drawn(word) for word in ("one", "two", "three", "four", "five", "six")]

    monkeypatch.setattr(charts.os, "cpu_count", lambda: 2)
    together, alone = made(), made()
    charts.draw(together)
    assert all("drawing" in vars(one) for one in together) and not any("drawing" in vars(one) for one in alone)
    assert [one.drawing for one in together] == [one.drawing for one in alone]
    late = made()
    monkeypatch.setattr(charts, "PATIENCE", 0.0)
    charts.draw(late)  # drawn when needed, if the forks do not answer
    assert not any("drawing" in vars(one) for one in late) and late[0].drawing == alone[0].drawing
