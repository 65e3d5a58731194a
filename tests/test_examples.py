"""The examples run, in their smallest form."""

import importlib.util
import json
import sys
from pathlib import Path

import matplotlib
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
def test_the_language_example_prints_every_domain_after_every_domain(monkeypatch, capsys):
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("language", EXAMPLES / "language.py")
    language = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(language)
    library = language.modeling_mamba  # the example puts our scan into it: other tests have its own again
    monkeypatch.setattr(library, "mamba_selective_scan", library.mamba_selective_scan)
    monkeypatch.setattr(sys, "argv", ["language.py", "--steps", "2", "--bytes", "3000"])
    language.main()
    header, *rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert header[-3:] == ["docstrings", "licences", "code"]
    assert [row[1] for row in rows] == [name for name in header[-3:] for _ in range(2)]
    values = [[float(word) for word in row if word.replace(".", "").isdigit()] for row in rows]
    assert [len(row) for row in values] == [1, 1, 2, 2, 3, 3]
    assert all(1 < value < 1000 for row in values for value in row)
    assert values[0] == values[1]  # both start from the same model


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
def test_the_notebook(monkeypatch):
    matplotlib.use("Agg")
    notebook = json.loads((EXAMPLES / "images.ipynb").read_text())
    first, *cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code")
    names: dict = {}
    exec(first, names)
    names |= {"IMAGES_PER_CLASS": 5, "PASSES": 1}
    import matplotlib.pyplot as plt

    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf().axes[0].lines))
    for cell in cells:
        exec(cell, names)
    assert names["results"].keys() == {"freely", "in the null space"} and len(shown[0]) == 2
    assert all(0 <= value <= 1 for accuracy in names["results"].values() for value in accuracy)
    plt.close("all")
