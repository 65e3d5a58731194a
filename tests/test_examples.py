"""The examples run, in their smallest form, and show what they say."""

import importlib.util
import json
import math
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def language() -> ModuleType:
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("language_example", EXAMPLES / "language.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("setting", ["paper", "exact"])
def test_language_prints_its_table(
    language: ModuleType, setting: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    smallest = ["--steps", "2", "--bytes", "4000", "--setting", setting]
    monkeypatch.setattr("sys.argv", ["language.py", *smallest])
    language.main()
    title, *lines = capsys.readouterr().out.splitlines()
    domains = ["docstrings", "licences", "code"]
    assert title.startswith("perplexity per byte") and title.split()[-3:] == domains
    rows = [line.split("  ") for line in lines]
    rows = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    expected = [[f"after {domain}", method] for domain in domains for method in ("sequential", "null space")]
    assert [row[:2] for row in rows] == expected
    values = [[float(cell) for cell in row[2:]] for row in rows]
    assert [len(row) for row in values] == [1, 1, 2, 2, 3, 3]
    assert all(1 < value < 1000 and math.isfinite(value) for row in values for value in row)
    assert values[0] == values[1]  # the first domain is learned once
    assert values[4] != values[5]


def test_language_tells_the_domains_apart(language: ModuleType, tmp_path: Path) -> None:
    source = '"""A module."""\n\n# A remark.\ndef double(x):\n    """Twice."""\n    return 2 * x\n'
    assert language.docstrings(source) == "A module.\n\nTwice."
    assert language.code(source).split() == ["def", "double(x):", "return", "2", "*", "x"]
    for number, text in enumerate(["one\n\ntwo", "two\n\n three ", "f(", "four"]):
        (tmp_path / f"{number}.txt").write_text(text)
    files = sorted(tmp_path.iterdir())
    assert list(language.texts(files, str)) == [b"one\n\ntwo\n\n", b" three \n\n", b"f(\n\n", b"four\n\n"]
    assert b"f(" not in b"".join(language.texts(files[2:3], language.code))
    assert bytes(language.filled(language.texts(files, str), 7).tolist()) == b"one\n\ntw"


def test_language_finds_the_same_files_each_time(language: ModuleType) -> None:
    first, second = language.installed_files(), language.installed_files()
    assert first == second and any(file.suffix == ".py" for file in first)
    files = [file for file in first if file.suffix == ".py"]
    assert len(list(islice(language.texts(files, language.code), 3))) == 3


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    matplotlib.use("Agg")
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    notebook = json.loads((EXAMPLES / "images.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert notebook["nbformat"] == 4
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)
    names: dict[str, Any] = {}
    for number, cell in enumerate(cells):
        exec("".join(cell["source"]), names)
        if number == 0:
            assert {"TRAIN_PER_CLASS", "PASSES", "SEED"} <= set(names)
            names |= {"TRAIN_PER_CLASS": 4, "PASSES": 1}
    results = names["results"]
    assert list(results) == ["fine-tuning", "null space"]
    assert all([len(row) for row in table] == [1, 2] for table in results.values())
    assert all(0 <= value <= 100 for table in results.values() for row in table for value in row)
    assert results["fine-tuning"][0] == results["null space"][0]  # the first task is learned alike
    assert names["stream"].tasks[:2] == [[0, 1], [2, 3]]
    assert [line.get_label() for line in names["axes"].get_lines()] == list(results)
    printed = capsys.readouterr().out
    assert "task 2: Pullover and Dress" in printed and "after the second" in printed
    matplotlib.pyplot.close(names["figure"])
