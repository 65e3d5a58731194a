"""The documentation's code runs, and its tables show what was recorded."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

import mambacl
from mambacl.bench.page import MARKED, accuracies, with_tables
from mambacl.errors import UserError

SOURCE = Path(__file__).parents[1]
DOCS = SOURCE / "docs"
WITH_TABLES = [page for page in [SOURCE / "README.md", *sorted(DOCS.glob("*.md"))] if MARKED.search(page.read_text())]
DEMO = json.loads((DOCS / "results" / "demo.json").read_text(encoding="utf-8"))["rows"]
MARGIN = 3  # points beyond the range that seeds and CPUs have given


def test_the_loop_of_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"```python\n(.*?)```", (DOCS / "python.md").read_text(encoding="utf-8"), re.S)[0]
    torch.manual_seed(0)
    names = {"tasks": [(torch.randn(10, 3, 16, 16), torch.arange(10) % (2 + task)) for task in range(2)]}
    exec(code, names)
    assert names["logits"].shape == (10, 5) and (tmp_path / "space.safetensors").exists()
    assert names["space"].tasks == 2


def test_classifiers_on_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "python.md").read_text(encoding="utf-8").partition("## Classifiers on your own features")[2]
    code = re.findall(r"```python\n(.*?)```", text, re.S)[0]
    generator = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(3, 64, generator=generator)
    labels = torch.arange(60) % 3
    features = centres[labels] + torch.randn(60, 64, generator=generator)
    names = {"batches": [(features[:30], labels[:30])], "others": features[30:]}
    exec(code, {**names, "more_features": features[30:], "more_labels": labels[30:]}, names)
    assert torch.equal(names["predictions"], labels[30:]) and names["elsewhere"].statistics.counts.tolist() == [20] * 3


# Tables


@pytest.mark.parametrize("page", WITH_TABLES, ids=lambda page: page.name)
def test_tables_show_what_was_recorded(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert with_tables(text, page.parent) == text, f"run python -m mambacl.bench.page {page.relative_to(SOURCE)}"


def test_pages_with_results_take_them_from_files() -> None:
    assert {"README.md", "settings.md", "speed.md"} <= {page.name for page in WITH_TABLES}


def test_a_table_of_accuracies() -> None:
    rows = {"a": {"what": "A", "final": [40.0, 0.26], "moved": "3%"}, "b": {"what": "B", "final": 7}, "c": {}}
    record = {"unit": "per cent", "rows": rows, "tables": {"some": {"columns": ["final", "moved"], "rows": ["b", "a"]}}}
    lines = ["| per cent | final | moved |", "| --- | --- | --- |", "| B | 7.0 |  |", "| A | 40.0±0.3 | 3% |", ""]
    assert accuracies(record, "some") == "\n".join(lines)
    with pytest.raises(UserError, match="no table 'other'; known: some"):
        accuracies(record, "other")


def speeds(file: str, systems: tuple[str, ...], call: str) -> dict[tuple[str, str], float]:
    """By shape and type of inputs: how many times as long the fastest of these systems takes."""
    found: dict[tuple[str, str], float] = {}
    for row in json.loads((DOCS / "results" / file).read_text(encoding="utf-8"))["rows"]:
        if row["system"] in systems:
            key = row["shape"], row["inputs"]
            found[key] = min(found.get(key, math.inf), row[f"theirs_/_ours_{call}"])
    return found


def test_the_page_quotes_the_recorded_speeds() -> None:
    line = next(line for line in (DOCS / "index.md").read_text(encoding="utf-8").split("\n") if "| speed |" in line)
    gpu = speeds("against-h200-before.json", ("mamba-ssm",), "forward_and_backward")
    gpu |= speeds("against-h200.json", ("mamba-ssm",), "forward_and_backward")
    cpu = speeds("against-cpu.json", ("ONNX Runtime", "OpenVINO"), "forward").values()
    stages = [value for (shape, _), value in gpu.items() if shape.startswith("vmamba")]
    shapes = ("defocus-l", "vim-s", "mambavision", "language")
    pairs = [[gpu[shape, inputs] for inputs in ("float32", "bfloat16")] for shape in shapes]
    quoted = [float(figure) for figure in re.findall(r"\b\d\.\d\b", line)]
    recorded = [*pairs[0], *pairs[1], min(stages), max(stages), *pairs[2], *pairs[3], min(cpu), max(cpu)]
    assert quoted == pytest.approx(recorded, abs=0.0501)  # one decimal


@pytest.mark.long
@pytest.mark.parametrize("row", [name for name, row in DEMO.items() if "run" in row])
def test_the_demo_gives_the_recorded_accuracy(row: str, tmp_path: Path) -> None:
    """Trained rows differ between CPUs and seeds; their range is recorded beside them."""
    low, high = DEMO[row]["range over seeds and CPUs"]
    mean = DEMO[row]["final accuracy"]
    assert low <= (mean[0] if isinstance(mean, list) else mean) <= high
    found = 100 * mambacl.train("demo", **DEMO[row]["run"], out=str(tmp_path / "run")).metrics["final_accuracy_tasks"]
    assert low - MARGIN <= found <= high + MARGIN
