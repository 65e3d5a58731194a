"""What a test image's answer is chosen from, and when it is right: the three scenarios of incremental learning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Scenario = Literal["class", "task", "domain"]

SCENARIOS: dict[str, str] = {  # what the model does with a test image, in words
    "class": "chooses among all classes seen",
    "task": "is told the task of each image and chooses among the classes of that task",
    "domain": "chooses among the classes, which all tasks share, without being told the domain of an image",
}


def right(logits: Tensor, labels: Tensor, scenario: Scenario, sizes: Sequence[int], task: int) -> Tensor:
    """Which images of one task are right. Logits (b, labels seen) and labels count task after task, `sizes` of them in
    each. Of domains, in which every class has a label anew, the largest logit of a class speaks for it."""
    if scenario == "task":
        first = sum(sizes[:task])
        return logits[:, first : first + sizes[task]].argmax(dim=1) + first == labels
    chosen = logits.argmax(dim=1)
    if scenario == "domain":
        return chosen % sizes[task] == labels % sizes[task]
    return chosen == labels
