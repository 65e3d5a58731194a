"""What APER and RanPAC share: adapters are tuned in the first task, with a cosine classifier; then nothing trains, and
a classifier is computed from features."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from mambacl.classifiers.base import TaskHeads
from mambacl.classifiers.cosine import CosineHeads
from mambacl.methods.base import HEADS, Method, Task
from mambacl.tuning import AdapterSets, ScaleShiftSets, Tuning
from mambacl.tuning.adapters import PlacedOptions, chosen_place


@dataclass(frozen=True)
class FirstTaskOptions(PlacedOptions):
    """Options of methods that tune adapters in the first task."""

    tune: Literal["adapter", "ssf"] = "adapter"
    """what the first task tunes: bottleneck adapters, or factors and offsets per channel (SSF)"""
    bottleneck: int = 64
    """channels between W_down and W_up; 64 in both papers' code"""


class FirstTask(Method):
    options_class: ClassVar[type] = FirstTaskOptions
    first_task_only: ClassVar[bool] = True

    def make_tuning(self) -> Tuning:
        self.adapters = self._new_sets()
        self.adapters.add(self.setup.seed)
        self.adapters.current = 0
        return self.adapters

    def _new_sets(self) -> AdapterSets:
        if self.options.tune == "ssf":
            return ScaleShiftSets(self.model)
        return AdapterSets(self.model, self.options, chosen_place(self.model, self.options))

    def overview(self) -> str:
        what = "Factors and offsets of channels" if self.options.tune == "ssf" else "Adapters"
        return f"{what} train in the first task; later tasks only add to the classifier."

    def make_heads(self) -> TaskHeads:
        return CosineHeads(self.num_features)

    def start_task(self, task: Task) -> None:
        if self.trains_in(task.index):
            self.heads.add_task(task.classes, task.seed)
            self.heads.to(self.device)
        self.classifier.add_task(task.first_label + task.classes - self.classifier.classes, task.seed)
        self.classifier.to(self.device)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        if len(self.adapters) != 1:
            raise KeyError("adapters")  # a state of another method

    def _follow_heads(self) -> None:
        """Only the first task has a head; in the middle of that task, the classifier has no state yet."""
        self.classifier.add_task(max(0, self.heads.classes - self.classifier.classes), self.setup.seed)
        self.classifier.to(self.device)

    def for_answers(
        self, state: Mapping[str, Tensor], task_state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """All but the head of the first task."""
        state, task_state = super().for_answers(state, task_state)
        return {name: tensor for name, tensor in state.items() if not name.startswith(HEADS)}, task_state
