"""A metric that only the registry knows appears on every page and in every table."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from reports_help import make_run

from mambacl.cli import main
from mambacl.paper.comparison import MetricNames, compare_with_paper
from mambacl.paper.page import write_paper_table
from mambacl.reports import comparison_table, load_run, write_report
from mambacl.reports.importing import import_records
from mambacl.reports.tables import metrics_table
from mambacl.training.metrics import METRICS, Counts, Totals, accuracy_matrix, all_metrics, metric

COUNTS, TOTAL = [[9], [6, 16]], [10, 20]


@pytest.fixture
def worst_task() -> Iterator[str]:
    @metric("worst task", "min_j R[T, j]", "the lowest accuracy of a task after the last", "nobody yet", better="max")
    def worst_task(correct: Counts, total: Totals) -> float:
        return min(accuracy_matrix(correct, total)[-1])

    yield "worst_task"
    del METRICS._entries["worst_task"]


def test_a_run_stores_it(worst_task: str) -> None:
    assert all_metrics(COUNTS, TOTAL)[worst_task] == pytest.approx(0.6)


def test_it_appears_everywhere(worst_task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make_run(tmp_path / "runs" / f"{method}-{seed}", COUNTS, TOTAL, seed=seed, method=method)
            for seed, method in ((0, "mamba-cl"), (1, "mamba-cl"), (0, "sequential"))]  # fmt: skip
    records = [load_run(folder) for folder in runs]
    (tmp_path / "other.csv").write_text("# benchmark: bench\n90\n30 80\n")
    imported = import_records([tmp_path / "other.csv"])
    assert imported[0].metric(worst_task) == pytest.approx(0.3)

    assert ("worst_task", "the lowest accuracy of a task after the last") in [
        (row[0], row[2]) for row in metrics_table(records[0]).rows
    ]
    table = comparison_table([*records, *imported])
    (column,) = (i for i, column in enumerate(table.columns) if column.title == "worst task")
    assert [table.shown(row[column]) for row in table.rows] == ["60.0 ± 0.0", "60.0", "30.0"]
    assert table.is_best(0, column) and "worst task: the lowest accuracy of a task after the last" in table.notes

    assert "worst_<wbr>task" in write_report(runs[0]).read_text()
    assert "worst task" in write_report(runs, tmp_path / "all", imported).read_text()
    compared = compare_with_paper("main", [*records, *imported], MetricNames(accuracy=worst_task))
    page = write_paper_table(compared, tmp_path / "paper").read_text()
    assert "worst_task: the lowest accuracy of a task after the last" in page and "60.00" in page
    names = [str(folder) for folder in runs]
    assert main(["report", "--table", "main", *names, "--accuracy", worst_task, "--out", str(tmp_path / "cli")]) == 0
    assert "accuracy, ours, is worst_task" in capsys.readouterr().out


def test_runs_that_did_not_store_it_have_it_from_their_counts(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    old = make_run(tmp_path / "old", COUNTS, TOTAL)  # written before the metric was there
    assert load_run(old).metric(request.getfixturevalue("worst_task")) == pytest.approx(0.6)
