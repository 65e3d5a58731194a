"""Counts of right predictions, and the metrics that follow from them."""

from typing import TYPE_CHECKING

from mambacl.evaluation.metrics import METRICS, OVER_IMAGES, accuracy_over_images, accuracy_over_tasks, all_metrics
from mambacl.evaluation.scenarios import SCENARIOS, Scenario, right
from mambacl.lazy import attributes

if TYPE_CHECKING:
    from mambacl.evaluation.counts import count_correct

__all__ = [
    "METRICS", "OVER_IMAGES", "SCENARIOS", "Scenario", "accuracy_over_images", "accuracy_over_tasks", "all_metrics",
    "count_correct", "right",
]  # fmt: skip

__getattr__ = attributes(__name__, {"count_correct": "counts"})
