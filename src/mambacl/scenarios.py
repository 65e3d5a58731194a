"""The scenarios of incremental learning: which classes the model chooses among, and when an answer is correct."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Scenario = Literal["class", "task", "domain", "few-shot"]

SCENARIOS: dict[str, str] = {  # completes "the model ..."
    "class": "chooses among all classes seen",
    "task": "is told the task of each image and chooses among the classes of that task",
    "domain": "chooses among the classes, which all tasks share, without being told the domain of an image",
    "few-shot": "chooses among all classes seen, and has seen few images of each class after the first task",
}

AMONG_ALL = ("class", "few-shot")
"""in which the model chooses among all classes seen, and each class belongs to one task"""


def right(logits: Tensor, labels: Tensor, scenario: Scenario, sizes: Sequence[int], task: int) -> Tensor:
    """Which images of one task are classified correctly."""
    return chosen(logits, scenario, sizes, task) == labels


def chosen(logits: Tensor, scenario: Scenario, sizes: Sequence[int], task: int) -> Tensor:
    """The labels that the model chooses for images of one task. Logits (b, labels seen) and labels are numbered task
    after task, with `sizes` labels per task. With domains, every class has one label per domain, and the largest logit
    counts; the answer is the label of that class in the image's own domain."""
    first = sum(sizes[:task])
    if scenario == "task":
        return logits[:, first : first + sizes[task]].argmax(dim=1) + first
    answer = logits.argmax(dim=1)
    return answer % sizes[task] + first if scenario == "domain" else answer
