"""iCaRL (Rebuffi et al., CVPR 2017): stored images join the batches, the old model's answers are kept, and an image
gets the class whose stored images have the nearest mean feature.

A reference: it stores training images of earlier tasks, unlike most methods here. Two forward passes per training
image from the second task on, one per test image.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mambacl.classifiers.distillation import distillation
from mambacl.classifiers.exemplars import MemoryOptions
from mambacl.classifiers.nearest_mean import NearestMean
from mambacl.methods.fine_tuned import FineTunedOptions, Taught
from mambacl.methods.registry import METHODS
from mambacl.methods.rehearsing import Rehearsing
from mambacl.tuning import Tuning

MEANS = "means/"  # prefix of the classes' means in a task's state


@dataclass(frozen=True)
class ICaRLOptions(MemoryOptions, FineTunedOptions):
    """Options of iCaRL."""

    variant: Literal["paper", "public-code"] = "paper"
    """paper: a binary cross-entropy per class, with the old model's sigmoids as targets of old classes; public-code:
    cross-entropy over all classes plus the distance from the old model's softmax at temperature 2, as in PyCIL"""


class ICaRL(Rehearsing, Taught):
    name = "icarl"
    summary = "stores images; distillation and the nearest mean of stored images (iCaRL)"
    options_class: ClassVar[type] = ICaRLOptions
    stores_images: ClassVar[bool] = True

    def make_tuning(self) -> Tuning:
        self.means = self._no_means()
        return super().make_tuning()

    def _no_means(self) -> NearestMean:
        return NearestMean(self.num_features, by="angle").to(self.device)

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        teacher = self.teacher_logits(images) if self.teacher else None
        return self.loss_of(self.heads.scores(self.features(images)), labels, teacher)

    def loss_of(self, logits: Tensor, labels: Tensor, teacher: Tensor | None) -> tuple[Tensor, Tensor]:
        """From the logits of all classes and the teacher's of the old ones; None in the first task."""
        loss, correct = self.classify(logits, labels, 0)
        if self.options.variant == "public-code":
            return (
                loss if teacher is None else loss + distillation(logits[:, : teacher.shape[1]], teacher, 2)
            ), correct
        targets = (labels[:, None] == torch.arange(logits.shape[1], device=labels.device)).to(logits.dtype)
        if teacher is not None:
            targets = torch.cat((teacher.sigmoid(), targets[:, teacher.shape[1] :]), dim=1)
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / len(labels), correct

    def learn_stored(self, features: Tensor, labels: Tensor) -> None:
        self.means = self._no_means()
        self.means.add_task(self.heads.classes)
        self.means.to(self.device).update(features, labels)

    def predict(self, images: Tensor) -> Tensor:
        """Cosines with the means, which order classes as distances between unit vectors do. Before the end of a task
        its classes have no means, and the logits answer."""
        features = self.features(images)
        return (self.means if self.means.classes == self.heads.classes else self.heads).scores(features)

    def task_state_dict(self) -> dict[str, Tensor]:
        return {**super().task_state_dict(), **{MEANS + name: t for name, t in self.means.state_dict().items()}}

    def load_task_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_task_state_dict(state)
        self.means.load_state_dict({name.removeprefix(MEANS): t for name, t in state.items() if name.startswith(MEANS)})
        self.means.to(self.device)


METHODS.add(ICaRL.name, ICaRL)
