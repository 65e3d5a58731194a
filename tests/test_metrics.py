"""Metrics on recorded and on hand-made matrices."""

import json
from pathlib import Path

import pytest

from mambacl.evaluation import all_metrics
from mambacl.evaluation.metrics import (
    METRICS,
    accuracy_matrix,
    accuracy_over_images,
    accuracy_over_tasks,
    forgetting,
    forgetting_public,
)

CORRECT = [[9], [6, 16], [8, 10, 27]]
TOTAL = [10, 20, 30]
# R = [[.9], [.6, .8], [.8, .5, .9]]


def test_every_metric_of_a_hand_made_matrix() -> None:
    assert accuracy_matrix(CORRECT, TOTAL) == [[0.9], [0.6, 0.8], [0.8, 0.5, 0.9]]
    assert accuracy_over_tasks(CORRECT, TOTAL) == pytest.approx([0.9, 0.7, 2.2 / 3])
    assert accuracy_over_images(CORRECT, TOTAL) == pytest.approx([0.9, 22 / 30, 45 / 60])
    assert all_metrics(CORRECT, TOTAL) == {
        "final_accuracy_tasks": pytest.approx(2.2 / 3),
        "final_accuracy_images": pytest.approx(0.75),
        "forgetting": pytest.approx((0.1 + 0.3) / 2),
        "forgetting_public": pytest.approx((0.1 + 0.3) / 2),
        "average_incremental_accuracy": pytest.approx((0.9 + 22 / 30 + 0.75) / 3),
        "learning_accuracy": pytest.approx((0.9 + 0.8 + 0.9) / 3),
        "backward_transfer": pytest.approx((-0.1 - 0.3) / 2),
    }


def test_a_task_that_improves_at_the_end_tells_the_two_forgettings_apart() -> None:
    correct = [[5], [9, 9]]
    assert forgetting(correct, [10, 10]) == pytest.approx(-0.4)
    assert forgetting_public(correct, [10, 10]) == 0.0


@pytest.mark.parametrize("metric", METRICS)
def test_one_task_forgets_nothing(metric: str) -> None:
    value = METRICS[metric]([[7]], [10])
    assert value == (0.7 if "accuracy" in metric else 0.0)


def test_no_task_yet() -> None:
    assert set(all_metrics([], [10, 10]).values()) == {0.0}


def test_forgetting_of_the_public_code(goldens: Path) -> None:
    """Recorded from the released `calc_forgetting`, in a live run: rows of the future are empty."""
    table = json.loads((goldens / "mambacl_run" / "forgetting_table.json").read_text())
    assert len(table) > 3
    for entry in table:
        scale = 10**9  # the recorded accuracies are any fractions; counts of a large set stand for them
        for t, expected in enumerate(entry["calc_forgetting_with_future_rows_zeroed"]):
            rows = [[round(a * scale) for a in row[: i + 1]] for i, row in enumerate(entry["acc_matrix"][: t + 1])]
            assert forgetting_public(rows, [scale] * (t + 1)) == pytest.approx(expected, abs=1e-8)
