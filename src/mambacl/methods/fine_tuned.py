"""What EWC, LwF, iCaRL and DER share: parameters of the backbone train in every task, with one linear layer over all
classes; and, for the second and third, the model before the task teaches."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from mambacl.classifiers.base import Classifier, TaskHeads
from mambacl.classifiers.joint import JointHeads
from mambacl.classifiers.masked import masked_cross_entropy
from mambacl.classifiers.separate import SeparateHeads
from mambacl.errors import UserError
from mambacl.methods.base import Method, Task
from mambacl.nullspace import NullSpace
from mambacl.nullspace.description import in_one_line
from mambacl.ops.precision import at_least_float32, full_precision
from mambacl.options import Options
from mambacl.tuning import ModelParameters, Tuning
from mambacl.tuning.snapshots import output_with, snapshot

TEACHER = "teacher/"  # prefix of the teacher's parameters in a task's state


@dataclass(frozen=True)
class FineTunedOptions(Options):
    """Options of methods that train parameters of the backbone."""

    train: Literal["setting", "all"] = "setting"
    """setting: what the null-space setting names, as the method sequential does; all: every parameter, on any model"""


class FineTuned(Method):
    options_class: ClassVar[type] = FineTunedOptions

    def make_tuning(self) -> Tuning:
        return self.fine_tuned()

    def fine_tuned(self) -> ModelParameters:
        """The backbone's parameters that train."""
        self.space: NullSpace | None = None
        if self.options.train == "all":
            return ModelParameters(self.model, [name for name, _ in self.model.named_parameters()])
        try:
            self.space = NullSpace(self.model, self.setup.setting.without_projection())
        except UserError as error:
            raise UserError(f"{error} To train every parameter, set options.train to all.") from None
        return ModelParameters(self.model, self.space.trained_names())

    def make_heads(self) -> TaskHeads:
        return JointHeads(self.num_features)

    def make_classifier(self) -> Classifier:
        """Separate heads are one layer here, whose rows all train."""
        found = super().make_classifier()
        return JointHeads(self.num_features, found.start) if type(found) is SeparateHeads else found

    def overview(self) -> str:
        if self.space is not None:
            return in_one_line(self.space.describe())
        return f"All {sum(p.numel() for p in self.model.parameters()):,} values of the backbone train."

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer if self.space is None else self.space.wrap(optimizer)  # resets rows that do not train

    @property
    def known(self) -> int:
        """Number of classes of earlier tasks."""
        return sum(self.heads.widths[:-1])

    def classify(self, logits: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Cross-entropy over the classes from label `first` on, for logits of all classes, and the number of correct
        images."""
        correct = (logits[:, first:].argmax(1) + first == labels).sum()
        return masked_cross_entropy(logits, labels, first, logits.shape[1]), correct


class Taught(FineTuned):
    """From the second task on, `teacher` has the values that parameters had when the task started."""

    def make_tuning(self) -> Tuning:
        self.teacher: dict[str, Tensor] = {}
        return super().make_tuning()

    def start_task(self, task: Task) -> None:
        if task.index:
            self.teacher = snapshot(self._taught().items())
        super().start_task(task)

    def _taught(self) -> dict[str, nn.Parameter]:
        return {f"model.{name}": p for name, p in self.tuning.trained()} | dict(self.heads.trained())

    def teacher_logits(self, images: Tensor) -> Tensor:
        """Of the classes of earlier tasks, (b, known)."""
        own = {name.removeprefix("model."): t for name, t in self.teacher.items() if name.startswith("model.")}
        heads = {name: tensor for name, tensor in self.teacher.items() if not name.startswith("model.")}
        features = output_with(self.model, own, images)
        with full_precision(features):
            return output_with(self.heads, heads, at_least_float32(features))[:, : self.known]

    def task_state_dict(self) -> dict[str, Tensor]:
        """The next task's teacher is what this one has trained."""
        own = {TEACHER + name: parameter.detach() for name, parameter in self._taught().items()}
        return {**super().task_state_dict(), **own}

    def load_task_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_task_state_dict(state)
        own = {name.removeprefix(TEACHER): t for name, t in state.items() if name.startswith(TEACHER)}
        self.teacher = {name: tensor.to(self.device) for name, tensor in own.items()}

    def for_answers(
        self, state: Mapping[str, Tensor], task_state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """All but the teacher."""
        return super().for_answers(state, {n: t for n, t in task_state.items() if not n.startswith(TEACHER)})
