"""Metrics on recorded and on hand-made matrices."""

import json
import math
import random
from pathlib import Path

import pytest

from mambacl.training.metrics import (
    METRICS,
    accuracy_matrix,
    accuracy_over_images,
    accuracy_over_tasks,
    all_metrics,
    forgetting,
    forgetting_by_task,
    forgetting_public,
    list_metrics,
    mean,
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
        "forgetting_first_to_last": pytest.approx((0.1 + 0.3) / 2),
        "average_incremental_accuracy": pytest.approx((0.9 + 22 / 30 + 0.75) / 3),
        "average_incremental_accuracy_tasks": pytest.approx((0.9 + 0.7 + 2.2 / 3) / 3),
        "learning_accuracy": pytest.approx((0.9 + 0.8 + 0.9) / 3),
        "backward_transfer": pytest.approx((-0.1 - 0.3) / 2),
        "performance_drop": pytest.approx(0.9 - 0.75),
    }


def test_a_task_that_improves_at_the_end_tells_the_two_forgettings_apart() -> None:
    correct = [[5], [9, 9]]
    assert forgetting(correct, [10, 10]) == pytest.approx(-0.4)
    assert forgetting_public(correct, [10, 10]) == 0.0


def test_three_code_bases_call_three_figures_forgetting() -> None:
    R = [[0.80], [0.90, 0.70], [0.86, 0.78, 0.60], [0.84, 0.74, 0.66, 0.90]]
    found = all_metrics(R, [1] * 4)
    assert found["forgetting"] == pytest.approx((0.06 + 0.04 - 0.06) / 3)  # best of the rows before the last
    assert found["forgetting_public"] == pytest.approx((0.06 + 0.04 + 0.0) / 3)  # and of the last as well
    assert found["forgetting_first_to_last"] == pytest.approx((-0.04 - 0.04 - 0.06) / 3)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_where_nothing_changes_nothing_is_forgotten(share: float) -> None:
    correct, total = [[share * n for n in (8, 20, 40, 4)[: t + 1]] for t in range(4)], [8, 20, 40, 4]
    for name, value in all_metrics(correct, total).items():
        assert value == pytest.approx(share if "accuracy" in name else 0.0), name


def test_properties_of_any_matrix() -> None:
    draw = random.Random(0)
    for tasks in range(2, 8):
        total = [draw.randint(1, 50) for _ in range(tasks)]
        correct = [[draw.randint(0, n) for n in total[: t + 1]] for t in range(tasks)]
        found = all_metrics(correct, total)
        assert found["forgetting_public"] >= max(0.0, found["forgetting"], found["forgetting_first_to_last"]) - 1e-12
        assert found["forgetting_first_to_last"] == -found["backward_transfer"]
        assert all(0 <= value <= 1 for name, value in found.items() if "accuracy" in name)
        # the same accuracies on ten times the images are the same figures
        again = all_metrics([[10 * right for right in row] for row in correct], [10 * n for n in total])
        assert again == {name: pytest.approx(value) for name, value in found.items()}
        # R alone gives all but those over images, and those too where the tasks are of one size
        alone = all_metrics(accuracy_matrix(correct, total), [1] * tasks)
        assert all(alone[m.name] == pytest.approx(found[m.name]) for m in list_metrics() if m.needs == "R")
        assert alone["final_accuracy_images"] == pytest.approx(alone["final_accuracy_tasks"])


def test_the_documentation_lists_every_metric_as_the_registry_has_it() -> None:
    words = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = "\n".join(f"| `{metric.name}` | {metric.formula} | {metric.used_by} |" for metric in list_metrics())
    assert f"| name | formula | used by |\n|---|---|---|\n{rows}\n\n" in words


@pytest.mark.parametrize("name", METRICS.names())
def test_one_task_forgets_nothing(name: str) -> None:
    value = METRICS.get(name).function([[7]], [10])
    assert value == (0.7 if "accuracy" in name else 0.0)


def test_a_task_without_test_images_counts_in_no_mean() -> None:
    correct, total = [[9], [8, 0], [5, 0, 30]], [10, 0, 40]
    assert accuracy_over_tasks(correct, total) == pytest.approx([0.9, 0.8, (0.5 + 0.75) / 2])
    assert forgetting_by_task(correct, total)[0] == pytest.approx(0.4)
    assert forgetting(correct, total) == pytest.approx(0.4)
    assert mean([]) == 0.0 and math.isnan(mean([math.nan])) and math.isnan(accuracy_over_images([[0]], [0])[0])


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
