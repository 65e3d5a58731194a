"""Analytic continual learning: nothing trains. A classifier computed from statistics of the fixed backbone's features
takes in each task in one pass; RanPAC and ACIL belong to this family."""

from typing import ClassVar

from mambacl.classifiers import SeparateHeads, TaskHeads
from mambacl.methods.base import Method, Task
from mambacl.methods.registry import METHODS


class Analytic(Method):
    name = "analytic"
    summary = "no training: a classifier from statistics of the fixed backbone's features"
    own_classifier: ClassVar[str] = "ridge"
    own_depths: ClassVar[str | int] = "all"
    trains: ClassVar[bool] = False
    takes_shards: ClassVar[bool] = True

    def make_heads(self) -> TaskHeads:
        return SeparateHeads(self.num_features)  # stays empty

    def start_task(self, task: Task) -> None:
        self.classifier.add_task(task.first_label + task.classes - self.classifier.classes, task.seed)
        self.classifier.to(self.device)

    def _follow_heads(self) -> None:
        """There are no heads."""
        self.classifier.to(self.device)


METHODS.add(Analytic.name, Analytic)
