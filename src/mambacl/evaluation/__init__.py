"""Counts of right predictions, and the metrics that follow from them."""

from mambacl.evaluation.counts import count_correct
from mambacl.evaluation.metrics import METRICS, OVER_IMAGES, accuracy_over_images, accuracy_over_tasks, all_metrics
from mambacl.evaluation.scenarios import SCENARIOS, Scenario, right

__all__ = [
    "METRICS", "OVER_IMAGES", "SCENARIOS", "Scenario", "accuracy_over_images", "accuracy_over_tasks", "all_metrics",
    "count_correct", "right",
]  # fmt: skip
