"""LwF, Learning without Forgetting (Li and Hoiem, ECCV 2016): on the images of a new task, the logits of old classes
stay close to those of the model before the task.

Two forward passes per training image from the second task on, one per test image. No image is stored.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from torch import Tensor

from mambacl.classifiers.distillation import Distance, distillation
from mambacl.methods.fine_tuned import FineTunedOptions, Taught
from mambacl.methods.registry import METHODS
from mambacl.options import Must, finite_from


@dataclass(frozen=True)
class LwFOptions(FineTunedOptions):
    """Options of LwF. The defaults are PyCIL's."""

    strength: Annotated[float, finite_from(0)] = 3.0
    """weight of the distance from the old logits"""
    temperature: Annotated[float, Must("be positive and finite", lambda t: 0 < t < float("inf"))] = 2.0
    """both sides' logits are divided by it"""
    distance: Distance = "cross-entropy"
    """the loss; kl is the same minus the entropy of the old answers, which changes no gradient"""
    over: Literal["task", "seen"] = "task"
    """classes of the cross-entropy for the labels: of the current task, or of all tasks so far"""


class LwF(Taught):
    name = "lwf"
    summary = "fine-tuning that keeps the old classes' logits on new images (LwF)"
    options_class: ClassVar[type] = LwFOptions

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        teacher = self.teacher_logits(images) if self.teacher else None
        return self.loss_of(self.heads.scores(self.features(images)), labels, teacher)

    def loss_of(self, logits: Tensor, labels: Tensor, teacher: Tensor | None) -> tuple[Tensor, Tensor]:
        """From the logits of all classes and the teacher's of the old ones; None in the first task."""
        options: LwFOptions = self.options
        known = 0 if teacher is None else teacher.shape[1]
        loss, correct = self.classify(logits, labels, known if options.over == "task" else 0)
        if teacher is not None:
            far = distillation(logits[:, :known], teacher, options.temperature, options.distance)
            loss = loss + options.strength * far
        return loss, correct


METHODS.add(LwF.name, LwF)
