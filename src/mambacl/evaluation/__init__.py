"""Counts of right predictions, and the metrics that follow from them."""

from mambacl.evaluation.counts import count_correct
from mambacl.evaluation.metrics import METRICS, OVER_IMAGES, accuracy_over_images, accuracy_over_tasks, all_metrics

__all__ = ["METRICS", "OVER_IMAGES", "accuracy_over_images", "accuracy_over_tasks", "all_metrics", "count_correct"]
