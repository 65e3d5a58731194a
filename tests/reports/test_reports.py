"""Reports: tables checked by hand, and pages that need nothing from outside."""

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from jinja2 import UndefinedError
from matplotlib.figure import Figure
from PIL import Image
from reports_help import make_run
from small_run import CONFIG

import mambacl
from mambacl.files import write_tensors
from mambacl.nullspace import NullSpace
from mambacl.paper.comparison import compare_with_paper
from mambacl.paper.page import write_paper_table
from mambacl.paper.rendering import figure_page
from mambacl.reports import comparison_table, figures, load_run, write_report
from mambacl.reports.charts import chart
from mambacl.reports.groups import Value, group_runs
from mambacl.reports.rendering import latex_escaped, markdown_escaped, to_csv, to_latex, to_markdown, to_text
from mambacl.reports.runs import RunRecord
from mambacl.reports.spectra import Panel, spectra_by_feature
from mambacl.reports.tables import Column, Table
from mambacl.reports.templating import render
from mambacl.training.metrics import accuracy_over_images, accuracy_over_tasks, all_metrics

HOSTILE = '<img src="http://evil.example/x.png" onerror=alert(1)> & "quoted" | 50% \\_'
TWO_TASKS = {0: [[90], [80, 45]], 1: [[92], [84, 46]], 2: [[94], [82, 50]]}  # of 100 and 50 images


def many_tasks(count: int, loss: float) -> tuple[list[list[int]], list[int]]:
    """Counts that fall by the same share with every task."""
    return [[round(100 * (0.95 - loss * (t - j))) for j in range(t + 1)] for t in range(count)], [100] * count


@pytest.fixture
def seeds(tmp_path: Path) -> list[RunRecord]:
    """One method with three seeds."""
    return [load_run(make_run(tmp_path / f"a-{s}", rows, [100, 50], seed=s)) for s, rows in TWO_TASKS.items()]


def column(table: Table, title: str, row: int = 0) -> Any:
    return table.rows[row][[column.title for column in table.columns].index(title)]


# Tables


def test_a_group_of_seeds_is_one_row_with_mean_and_sample_deviation(seeds):
    table = comparison_table(seeds)
    assert len(table.rows) == 1
    assert table.rows[0][:2] == ("mamba-cl", "0, 1, 2")
    expected = {
        "final accuracy": (88.0, 3.0),  # (80 + 90) / 2 = 85, 88, 91
        "forgetting": (10.0, 2.0),  # 10, 8, 12
        "learning accuracy": (93.0, np.sqrt((9 + 1 + 16) / 2)),  # (90 + 90) / 2 = 90, 92, 97
        "after 1": (92.0, 2.0),  # 90, 92, 94
        "after 2": (88.0, 3.0),
    }
    for title, (mean, std) in expected.items():
        value = column(table, title)
        assert value.mean == pytest.approx(mean) and value.std == pytest.approx(std), title
    # over images: 90 and 125 / 150, 92 and 130 / 150, 94 and 132 / 150, each averaged over the two rows
    averages = [(90 + 100 * 125 / 150) / 2, (92 + 100 * 130 / 150) / 2, (94 + 100 * 132 / 150) / 2]
    assert column(table, "average incremental accuracy").mean == pytest.approx(np.mean(averages))
    assert any("best over the rows before the last, the paper's formula" in note for note in table.notes)
    assert "88.0 ± 3.0" in to_text(table)


def test_a_single_run_has_no_deviation(seeds):
    table = comparison_table(seeds[:1])
    assert column(table, "final accuracy") == Value(pytest.approx(85.0), None)
    assert "±" not in to_text(table)


def test_the_headline_over_images_counts_images(tmp_path):
    config = {"training": {"headline": "images"}}
    run = load_run(make_run(tmp_path / "a", TWO_TASKS[0], [100, 50], config=config))
    table = comparison_table([run])
    assert column(table, "after 2").mean == pytest.approx(100 * 125 / 150)
    assert column(table, "final accuracy").mean == pytest.approx(100 * 125 / 150)
    other = load_run(make_run(tmp_path / "b", TWO_TASKS[0], [100, 50], method="frozen"))
    mixed = comparison_table([run, other])
    assert column(mixed, "after 2").mean == pytest.approx(85.0)
    assert any("some runs average over images" in note for note in mixed.notes)


def test_accuracies_agree_with_the_evaluation(tmp_path):
    correct, total = [[9], [7, 3], [6, 4, 11]], [10, 7, 30]
    run = load_run(make_run(tmp_path / "a", correct, total))
    assert run.after_each_task("tasks") == pytest.approx(accuracy_over_tasks(correct, total))
    assert run.after_each_task("images") == pytest.approx(accuracy_over_images(correct, total))
    assert run.forgetting_by_task().mean() == pytest.approx(all_metrics(correct, total)["forgetting"])


def test_methods_and_settings_make_groups_and_names(tmp_path, seeds):
    others = [
        load_run(make_run(tmp_path / "b", TWO_TASKS[0], [100, 50], config={"nullspace": {"eta": 0.9}})),
        load_run(make_run(tmp_path / "c", TWO_TASKS[0], [100, 50], method="frozen")),
    ]
    groups = group_runs([*seeds, *others])
    assert [group.name for group in groups] == ["mamba-cl, eta=unset", "mamba-cl, eta=0.9", "frozen"]
    assert [len(group.runs) for group in groups] == [3, 1, 1]


def test_a_run_that_is_not_finished_stays_apart_and_has_no_final_figures(tmp_path, seeds):
    open_run = load_run(make_run(tmp_path / "open", TWO_TASKS[0][:1], [100, 50], seed=3, status="interrupted"))
    table = comparison_table([*seeds, open_run])
    assert [row[0] for row in table.rows] == ["mamba-cl", "mamba-cl (1 of 2 tasks)"]
    assert column(table, "final accuracy", 1) is None and column(table, "after 2", 1) is None
    assert column(table, "after 1", 1).mean == pytest.approx(90.0)


def test_at_most_ten_task_columns_unless_all_are_asked_for(tmp_path):
    run = load_run(make_run(tmp_path / "a", *many_tasks(20, 0.01)))
    titles = [column.title for column in comparison_table([run]).columns if column.title.startswith("after")]
    assert titles == [f"after {t}" for t in range(2, 21, 2)]
    rows = list(csv.reader(io.StringIO(to_csv(comparison_table([run], tasks="all")))))
    assert sum(title.startswith("after") for title in rows[0]) == 20 and len(rows[1]) == len(rows[0])


def test_a_repeated_seed_is_named(tmp_path):
    runs = [load_run(make_run(tmp_path / name, TWO_TASKS[0], [100, 50])) for name in ("a", "b")]
    assert any("a seed appears more than once" in note for note in comparison_table(runs).notes)


def test_markdown_and_latex_escape_and_set_off_the_best():
    rows = ((HOSTILE, Value(70.0)), ("a_b", Value(80.04, 0.25)), ("new\nline", Value(80.0)), ("none", None))
    table = Table("50% & more", (Column("me|thod", text=True), Column("final", best="max")), rows, ("a note_",))
    markdown = to_markdown(table).splitlines()
    assert markdown[2] == r"| me\|thod | final |"
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 3 for line in markdown[2:8])
    assert r"\<img" in markdown[4] and r"\|" in markdown[4]
    assert markdown[5] == "| a_b | **80.0 ± 0.2** |" and markdown[6] == "| new line | **80.0** |"
    latex = to_latex(table)
    assert r"a\_b & \textbf{80.0} $\pm$ 0.2 \\" in latex
    assert r"50\% \textbackslash{}\_" in latex and "new line" in latex and "none & -- " in latex
    assert r"\toprule" in latex and latex.count("{tabular}") == 2
    assert latex_escaped("a&b#{~^}$") == r"a\&b\#\{\textasciitilde{}\textasciicircum{}\}\$"
    assert markdown_escaped("_x_ a_b *") == r"\_x\_ a_b \*"


def test_csv_gives_deviations_their_own_column(seeds):
    rows = list(csv.DictReader(io.StringIO(to_csv(comparison_table(seeds)))))
    assert rows[0]["final accuracy"] == "88.0000" and rows[0]["final accuracy std"] == "3.0000"


def test_text_that_is_too_wide_goes_on_in_a_further_block(seeds):
    text = to_text(comparison_table(seeds), width=60)
    table = text.split("final accuracy: ")[0]
    assert max(len(line) for line in table.splitlines()) <= 60
    assert table.count("mamba-cl") > 1 and "-0.0" not in to_text(Table("", (Column("x"),), ((Value(-0.01),),)))


def test_names_in_other_scripts_stay_in_their_columns():
    rows = (("猫", "1"), ("cafe\u0301", "22"), ("dog", "333"))  # two columns; an accent of its own takes none
    head, rule, *lines = to_text(Table("", (Column("class", text=True), Column("n")), rows)).splitlines()[2:]
    assert (head, rule) == ("class    n", "-----  ---")
    assert lines == ["猫       1", "cafe\u0301    22", "dog    333"]


# Pages


INSIDE = {
    "li": ("ul",), "tr": ("thead", "tbody", "tfoot"), "td": ("tr",), "th": ("tr",), "thead": ("table",),
    "tbody": ("table",), "tfoot": ("table",), "caption": ("table",), "summary": ("details",),
    "figcaption": ("figure",), "dt": ("div",), "dd": ("div",),
}  # fmt: skip
"""where these tags belong"""


class Page(HTMLParser):
    """Notes every address, and checks what valid HTML asks for: tags closed in order and in the right place, each
    attribute and id once, rows of a table equally long."""

    VOID = ("meta", "img", "br", "wbr", "hr", "link", "input")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.ids: set[str] = set()
        self.cells: list[list[int]] = []  # of each table, the cells of each row
        self.missing_alt = 0
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open
        assert all(len(set(rows)) == 1 for rows in self.cells), self.cells

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attrs)
        assert len(given) == len(attrs) and not any(name.startswith("on") for name in given)
        assert tag not in INSIDE or self.open[-1] in INSIDE[tag], (tag, self.open)
        if "id" in given:
            assert given["id"] not in self.ids
            self.ids.add(str(given["id"]))
        if tag == "table":
            self.cells.append([])
        elif tag == "tr":
            self.cells[-1].append(0)
        elif tag in ("td", "th"):
            self.cells[-1][-1] += 1
        self.addresses += [str(given[name]) for name in ("src", "href", "srcset", "data", "action") if name in given]
        self.missing_alt += tag == "img" and not given.get("alt")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def checked(path: Path) -> tuple[Page, str]:
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    assert all(
        re.match(r"data:(image/png|image/jpeg|text/csv;charset=utf-8);base64,|#", address) for address in page.addresses
    )
    assert {address[1:] for address in page.addresses if address.startswith("#")} <= page.ids
    assert page.missing_alt == 0 and page.tags.count("script") == 1 and "link" not in page.tags
    assert "@import" not in html and html.count("url(") == html.count("url(#")
    return page, html


def check_pictures(folder: Path, names: set[str]) -> None:
    assert {path.name for path in folder.iterdir()} == names
    for path in folder.iterdir():
        with Image.open(path) as image:
            image.load()
            assert image.format == "PNG" and min(image.size) > 200
            assert len(image.convert("RGB").getcolors(1 << 24) or []) > 10, path.name


@pytest.fixture
def space_state(tiny_model: Callable[..., torch.nn.Module]) -> dict[str, torch.Tensor]:
    """The null space of a real, small model after one task."""
    space = NullSpace(tiny_model())
    space.consolidate([torch.randn(8, 3, 16, 16)])
    return space.state_dict()


def test_the_page_of_a_run(tmp_path, space_state):
    names = [HOSTILE, "</style><script>alert(1)</script>", *(f"n{i}" for i in range(8))]
    folder = make_run(tmp_path / "a & <b>", *many_tasks(5, 0.02), class_names=names, epochs=3)
    write_tensors(folder / "checkpoints" / "task-04.safetensors", space_state, {})
    path = write_report([folder])
    assert path == folder / "report.html"
    page, html = checked(path)
    words = "".join(page.words)
    assert HOSTILE in words and "<script>alert(1)</script>" in words and "evil.example/x.png&#34;" in html
    final = 100 * np.mean([0.87, 0.89, 0.91, 0.93, 0.95])
    for expected in (f"{final:.1f}", "321 images per second", "3.0 GiB", "1 min 40 s", "abc123", "2.11.0", "headline"):
        assert expected in words, expected
    assert "mambacl train" in words and "not finished" not in words
    spectra = {f"spectra-{name}.png" for name in ("w-delta-w-c", "w-b", "a", "out")}
    own = {"accuracy.png", "matrix.png", "forgetting.png", "training.png", "protected.png"}
    check_pictures(folder / "figures", own | spectra)
    assert (folder / "table.md").exists() and (folder / "table.tex").exists() and (folder / "table.csv").exists()
    assert not list(folder.glob(".*")) and not list((folder / "figures").glob(".*"))
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    write_report([folder])
    assert before == {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.usefixtures("few_test_images")
def test_the_page_of_a_run_without_training(tmp_path):
    """No epochs, no loss curve, no speed; the page says what the classifier sees and how large it is."""
    options = {"classifier_options": {"width": 100}, "features": {"mirror": "both"}}
    run = mambacl.train(CONFIG, method="analytic", out=str(tmp_path / "run"), **options)
    page, html = checked(write_report([run.folder]))
    words = " ".join(" ".join(page.words).split())
    for expected in ("analytic on small", "classifier ridge", "2 depths (class, mean) and the final one, 160 values"):
        assert expected in words, expected
    assert "160 values, mirror images" in words and f"{run.results['classifier_bytes'] / 1e6:,.1f} MB" in words
    absent_words = "images per second|Training and time|Null space|Consistency audit|None|nan|epochs"
    for absent in absent_words.split("|"):
        assert absent not in words.split("Configuration To reproduce")[0], absent
    assert not re.search(r"<(ul|dl|p|section)[^>]*>\s*</\1>", html)  # nothing is empty
    own = {"accuracy.png", "matrix.png", "forgetting.png", "classes.png", "task-confusion.png"}
    check_pictures(run.folder / "figures", own)
    other = make_run(tmp_path / "other", *many_tasks(3, 0.02), method="mamba-cl", epochs=2, benchmark="small")
    assert "analytic" in "".join(checked(write_report([run.folder, other], tmp_path / "both"))[0].words)


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({"count": 32, "depths": [], "pool": [], "mirror": "none"}, "features final, 32 values"),
        ({"count": 1728, "depths": [3], "pool": ["std"], "mirror": "learning"},
         "features 1 depth (std) and the final one, 1,728 values, mirror images in learning"),
        ("rubbish", None),
    ],
)  # fmt: skip
def test_the_features_that_a_page_names(tmp_path, features, expected):
    folder = make_run(tmp_path / "a", TWO_TASKS[0], [100, 50], features=features, classifier_bytes=2.5e6)
    words = " ".join(" ".join(checked(write_report([folder]))[0].words).split())
    assert "2.5 MB" in words
    assert ("features" in words.split("Final accuracy")[0]) == (expected is not None) and (expected or "") in words


def test_the_page_of_a_run_that_is_not_finished(tmp_path):
    folder = make_run(tmp_path / "a b", TWO_TASKS[0][:1], [100, 50], status="interrupted")
    words = "".join(checked(write_report([folder]))[0].words)
    assert "This run is not finished" in words and f"mambacl resume '{folder}'" in words
    assert "Accuracy after 1 of 2 tasks" in words and "Final accuracy" not in words


def test_the_page_of_a_run_without_a_finished_task(tmp_path):
    folder = make_run(tmp_path / "a", [], [100, 50], status="running")
    words = "".join(checked(write_report([folder], tmp_path / "out"))[0].words)
    assert "0 of 2 tasks are done" in words and "If it is no longer running" in words
    assert not (folder / "report.html").exists() and (tmp_path / "out" / "report.html").exists()
    assert "(0 of 2 tasks)" in to_text(comparison_table([load_run(folder)]))


def test_the_comparison_of_runs(tmp_path):
    runs = tmp_path / "runs"
    folders = [make_run(runs / f"a-{s}", rows, [100, 50], seed=s) for s, rows in TWO_TASKS.items()]
    folders += [make_run(runs / "b-0", TWO_TASKS[1], [100, 50], method=HOSTILE)]
    folders += [make_run(runs / "d-0", TWO_TASKS[2], [100, 50], method="_$x^{$")]
    folders += [make_run(runs / "c-0", [], [100, 50], method="new", status="running")]
    path = write_report([*folders, folders[0]])
    assert path == runs / "comparison" / "report.html"
    page, _ = checked(path)
    words = "".join(page.words)
    assert "Highest final accuracy" in words and "88.0 ± 3.0" in words and HOSTILE in words
    assert "new, seed 0, is not finished" in words
    check_pictures(path.parent / "figures", {"final.png", "accuracy.png", "forgetting.png"})
    assert "88.0 ± 3.0" in (path.parent / "table.md").read_text(encoding="utf-8")


def test_the_pages_of_the_papers_tables_and_figures(tmp_path):
    run = load_run(make_run(tmp_path / "a", TWO_TASKS[0], [100, 50], method=HOSTILE))
    path = write_paper_table(compare_with_paper("main", [run]), tmp_path)
    assert HOSTILE in "".join(checked(path)[0].words)
    table = Table(HOSTILE, (Column("x", text=True), Column("y", best="max")), ((HOSTILE, Value(1.0)),), (HOSTILE,))
    path.write_text(figure_page("eta", chart("eta", figures.accuracy_matrix(run), table)), encoding="utf-8")
    assert "".join(checked(path)[0].words).count(HOSTILE) >= 3


def test_a_run_that_says_little(tmp_path):
    """As an early version or another tool may have left it: only what a record must have."""
    (tmp_path / "results.json").write_text(
        json.dumps({"schema": 1, "tasks": [[0], [1]], "correct": [[9], [8, 7]], "total": [10, 10]})
    )
    words = "".join(checked(write_report([tmp_path]))[0].words)
    assert "unknown method on unknown benchmark" in words and "75.0" in words


def test_control_signs_in_names_become_a_mark(tmp_path):
    names = ["bell\x07", "half\udc80", "tab\t", "d"]
    html = checked(write_report([make_run(tmp_path / "a", TWO_TASKS[0], [100, 50], class_names=names)]))[1]
    assert "<li>bell\ufffd</li>" in html and "<li>half\ufffd</li>" in html and "<li>tab\t</li>" in html


def test_a_template_does_not_pass_over_what_is_missing():
    with pytest.raises(UndefinedError, match="markdown"):
        render("paper_table.html", title="", name="", runs=0, results=Table("", (), ()))


def test_matplotlib_is_loaded_only_to_draw():
    program = "import sys, mambacl.reports; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("log_x", [False, True])
def test_panels_have_the_scales_of_matplotlib(log_x):
    """Spectra are drawn without axes, which take long; axes in the same place put every point where they do."""
    panel = Panel(1.0, 2.0, 3.0, 1.5, 90, 1e-9, log_x)
    axes = Figure(figsize=(5, 5)).add_axes((1 / 5, 2 / 5, 3 / 5, 1.5 / 5))
    axes.set(yscale="log", ylim=(1e-9, 3), xscale="log" if log_x else "linear", xlim=(0.9 if log_x else 0.5, 90.5))
    values = np.geomspace(1, 1e-8, 90)
    points = np.column_stack([np.arange(1, 91), values])
    assert panel.curve(values) == pytest.approx(axes.transData.transform(points) / axes.figure.dpi)
    assert 1 < len(panel.directions()) < 6


def test_a_long_spectrum_keeps_its_ends():
    for log_x in (False, True):
        panel, values = Panel(0.0, 0.0, 1.0, 1.0, 5000, 1e-9, log_x), np.geomspace(1, 1e-8, 5000)
        curve = panel.curve(values)
        assert 100 < len(curve) <= 240
        for end in (0, -1):
            assert curve[end] == pytest.approx([panel.x([1, 5000][end]), panel.y(values[end])])


@pytest.mark.parametrize("count", [1, 20, 100])
def test_any_number_of_tasks(tmp_path, count):
    folder = make_run(tmp_path / "a", *many_tasks(count, 0.002), epochs=1)
    html = checked(write_report([folder]))[1]
    assert html.count('class="row">after ') == count and html.count('class="drawing') == (3 if count == 1 else 4)


def test_figures_leave_the_global_style_alone_and_give_the_same_bytes(tmp_path):
    run = load_run(make_run(tmp_path / "a", TWO_TASKS[0], [100, 50]))
    first = figures.png(figures.accuracy_matrix(run))
    with matplotlib.rc_context({"font.size": 30.0, "axes.grid": False, "savefig.dpi": 20.0}):
        assert figures.png(figures.accuracy_matrix(run)) == first
        assert matplotlib.rcParams["font.size"] == 30.0


# Reading


def test_spectra_are_read_with_ranks_and_put_in_families(tmp_path, space_state):
    folder = make_run(tmp_path / "a", TWO_TASKS[0], [100, 50])
    checkpoints = folder / "checkpoints"
    (checkpoints / "task-00.safetensors").write_bytes(b"an older one is not read")
    write_tensors(checkpoints / "task-01.safetensors", space_state, {})
    run = load_run(folder)
    assert run.spectra_task == 1 and len(run.spectra) == 10  # five parts in two blocks
    for part, (values, rank) in run.spectra.items():
        assert values == pytest.approx(space_state[f"{part}.spectrum"].numpy())
        assert rank == int(space_state[f"{part}.rank"])
    families = spectra_by_feature(run)
    assert [family.roles for family in families] == [("W_delta", "W_C"), ("W_B",), ("A",), ("out",)]
    assert all(list(family.spectra) == ["0", "1"] for family in families)


def test_the_setting_says_which_rows_are_projected(tmp_path):
    rule = {"trains": True, "projected": True, "feature": "delta-x"}
    setting = json.dumps({"W_B": rule, "W_delta": {**rule, "projected": False}, "W_C": {**rule, "trains": False}})
    state = {}
    for block in (10, 9):
        state[f"layers.{block}.mixer.x_proj.weight[4:8].spectrum"] = torch.tensor([3.0, 2.0, 0.0]) + block
        state[f"layers.{block}.mixer.x_proj.weight[4:8].rank"] = torch.tensor(1)
    folder = make_run(tmp_path / "a", TWO_TASKS[0], [100, 50])
    write_tensors(folder / "checkpoints" / "task-01.safetensors", state, {"setting": setting})
    (family,) = spectra_by_feature(load_run(folder))
    assert family.roles == ("W_B",) and family.feature == "delta-x" and "|delta|^2" in family.meaning
    assert list(family.spectra) == ["9", "10"]
