"""Tests over seeds: p-values of printed tables, pairing by seed, and the table on a page."""

import math

import pytest
from reports_help import make_run

from mambacl.reports import load_run
from mambacl.reports.groups import group_runs
from mambacl.reports.significance import holm, incomplete_beta, significance_table, student_p, t_test


@pytest.mark.parametrize(
    ("t", "freedom", "p"),
    [(12.706205, 1, 0.05), (4.302653, 2, 0.05), (9.924843, 2, 0.01), (2.262157, 9, 0.05), (3.645959, 30, 0.001)],
)
def test_students_t_as_in_printed_tables(t, freedom, p):
    assert student_p(t, freedom) == pytest.approx(p, rel=1e-3)
    assert student_p(-t, freedom) == student_p(t, freedom)


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0, 5.0, 80.0])
def test_students_t_in_closed_form(t):
    """With one and two degrees of freedom the distribution has a formula."""
    assert student_p(t, 1) == pytest.approx(1 - 2 * math.atan(t) / math.pi, rel=1e-9, abs=1e-12)
    assert student_p(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-9, abs=1e-12)


def test_the_incomplete_beta_function_is_symmetric_and_ends_at_one():
    assert incomplete_beta(2, 3, 0) == 0 and incomplete_beta(2, 3, 1) == 1
    assert incomplete_beta(2, 3, 0.4) == pytest.approx(1 - incomplete_beta(3, 2, 0.6))
    assert incomplete_beta(1, 1, 0.3) == pytest.approx(0.3)


def test_paired_by_seed_if_possible():
    first, second = {"0": 80.0, "1": 84.0, "2": 88.0}, {"0": 81.0, "1": 86.0, "2": 89.0}
    paired = t_test(first, second)
    assert paired is not None and paired.name == "paired t-test" and paired.n == "3 seeds"
    assert paired.difference == pytest.approx(4 / 3) and paired.p == pytest.approx(student_p(4.0, 2))  # 4/3 / (1/3)
    other = t_test(first, {"3": 81.0, "4": 86.0, "5": 89.0})
    assert other is not None and other.name == "Welch's t-test" and other.n == "3 and 3 seeds"
    assert other.p > paired.p  # it does not know that the seeds belong together
    assert t_test({"0": 1.0}, {"0": 2.0}) is None and t_test({"0": 1.0, "1": 2.0}, {"0": 2.0, "1": 3.0}) is None


def test_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []


def test_the_table_names_test_and_n(tmp_path):
    counts = {"a": [(90, 40), (92, 41), (94, 44)], "b": [(80, 30), (83, 30), (84, 31)]}
    folders = [
        make_run(tmp_path / f"{method}-{seed}", [[first], [first - 5, second]], [100, 50], seed=seed, method=method)
        for method, seeds in counts.items()
        for seed, (first, second) in enumerate(seeds)
    ]
    table = significance_table(group_runs([load_run(folder) for folder in folders]))
    assert table is not None
    (row, *_) = table.rows
    assert row[:3] == ("final accuracy", "a", "b") and row[4:6] == ("paired t-test", "3 seeds")
    assert row[3].startswith("\N{MINUS SIGN}") and row[-1] in ("yes", "no")
    assert any("Holm" in note for note in table.notes) and any("does not mean equal" in note for note in table.notes)
    alone = significance_table(group_runs([load_run(folder) for folder in folders[:3]]))
    assert alone is None
