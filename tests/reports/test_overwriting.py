"""A report never replaces the report of other runs unasked."""

import json
from pathlib import Path

import pytest
from reports_help import make_run

from mambacl.cli import main
from mambacl.errors import UserError
from mambacl.reports import write_report


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [make_run(tmp_path / "runs" / name, [[90], [80, 70]], [100, 100]) for name in "abc"]


def test_other_runs_get_another_folder(runs: list[Path]) -> None:
    first = write_report(runs[:2])
    assert first == runs[0].parent / "comparison" / "report.html"
    assert json.loads((first.parent / "runs.json").read_text()) == {"report.html": ["../a", "../b"]}
    before = first.read_bytes()
    other = write_report(runs)
    assert other == runs[0].parent / "comparison-2" / "report.html" and first.read_bytes() == before
    assert write_report(runs[1:]).parent.name == "comparison-3"
    assert write_report([runs[1], runs[0]]) == first  # the same runs again
    assert write_report(runs) == other


def test_a_named_folder_is_replaced_only_if_asked(runs: list[Path], tmp_path: Path, capsys) -> None:
    out = tmp_path / "mine"
    write_report(runs[:2], out)
    write_report(runs[:2], out)
    with pytest.raises(UserError, match="mine has a report of other runs: choose another --out, or replace it with"):
        write_report(runs, out)
    with pytest.raises(UserError, match="has a report of other runs"):
        write_report(runs[2], out)
    assert main(["report", *map(str, runs), "--out", str(out), "--overwrite"]) == 0
    assert "../runs/c" in (out / "runs.json").read_text()
    write_report(runs[0])
    with pytest.raises(UserError, match="has a report of other runs"):
        write_report(runs, runs[0])  # a run's folder has the run's own report
    assert write_report(runs[0]) == write_report(runs[0], runs[0]) and not (runs[0] / "runs.json").exists()


def test_tables_of_the_paper_stand_beside_the_report(runs: list[Path], capsys) -> None:
    write_report(runs[:2])
    for chosen in (runs[:2], runs, runs[:2]):
        assert main(["report", "--table", "main", *map(str, chosen)]) == 0
    made = {path.parent.name for path in runs[0].parent.glob("*/paper-main.html")}
    assert made == {"comparison", "comparison-2"}
    assert set(json.loads((runs[0].parent / "comparison" / "runs.json").read_text())) == {
        "report.html",
        "paper-main.html",
    }
