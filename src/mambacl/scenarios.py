"""The three scenarios of incremental learning: which classes the model chooses among, and when an answer is correct."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Scenario = Literal["class", "task", "domain"]

SCENARIOS: dict[str, str] = {  # completes "the model ..."
    "class": "chooses among all classes seen",
    "task": "is told the task of each image and chooses among the classes of that task",
    "domain": "chooses among the classes, which all tasks share, without being told the domain of an image",
}


def right(logits: Tensor, labels: Tensor, scenario: Scenario, sizes: Sequence[int], task: int) -> Tensor:
    """Which images of one task are classified correctly. Logits (b, labels seen) and labels are numbered task after
    task, with `sizes` labels per task. With domains, every class has one label per domain, and the largest logit
    counts."""
    if scenario == "task":
        first = sum(sizes[:task])
        return logits[:, first : first + sizes[task]].argmax(dim=1) + first == labels
    chosen = logits.argmax(dim=1)
    if scenario == "domain":
        return chosen % sizes[task] == labels % sizes[task]
    return chosen == labels
