"""EASE (Zhou et al., CVPR 2024): one set of adapters, and so one feature space, per task. They are parallel to the MLPs
of a ViT, as published, or to the mixers of a Mamba backbone.

A task trains its adapters with a cosine classifier. Each of its classes then gets a prototype in every subspace: its
mean feature. Classes of earlier tasks get one in the new subspace, estimated from the new classes by similarity. An
image is classified by its cosines with the prototypes; a class's own subspace has the largest weight.

Its recipe: SGD, cosine, 20 passes, 64 channels; CIFAR-100 rate 0.025, decay 5e-4, batch 48; ImageNet-R 0.05, 5e-3, 16.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mambacl.classifiers import subspaces
from mambacl.classifiers.cosine import CosineHeads
from mambacl.errors import UserError
from mambacl.methods.base import Method, Task
from mambacl.methods.registry import METHODS
from mambacl.ops.precision import at_least_float32, full_precision
from mambacl.options import finite_from
from mambacl.tuning import AdapterSets, Tuning
from mambacl.tuning.adapters import POSITIVE, PlacedOptions, chosen_place


@dataclass(frozen=True)
class EaseOptions(PlacedOptions):
    """Options of EASE."""

    alpha: Annotated[float, finite_from(0)] = 0.1
    """weight of the subspaces of other tasks"""
    variant: Literal["paper", "public-code"] = "paper"
    """what `others` and `mapped_by` are if they are auto"""
    others: Literal["auto", "sum", "mean"] = "auto"
    """sum: alpha is the weight of each of them (paper); mean: of all together (public-code)"""
    mapped_by: Literal["auto", "new", "later"] = "auto"
    """how an old class gets its prototype in a new subspace. new: once, from the classes of that subspace's task
    (paper); later: again after each task, from all classes since (public-code, where it is called `recalc_sim`)"""
    cosine_scale: Annotated[float, POSITIVE] = 1.0
    """initial value of the classifiers' learned scale; 1 in EASE's public code"""


class Ease(Method):
    name = "ease"
    summary = "adapters and prototypes for each task, joined by similarity (EASE)"
    options_class: ClassVar[type] = EaseOptions
    own_answer: ClassVar[bool] = True
    needs_task_state = True

    def make_tuning(self) -> Tuning:
        self.adapters = AdapterSets(self.model, self.options, chosen_place(self.model, self.options))
        self.public = self.options.variant == "public-code"
        self.prototypes = at_least_float32(next(self.model.parameters()).new_zeros(0, 0, self.num_features))
        """of the classes of finished tasks: see `classifiers.subspaces`"""
        self.training: dict[str, Tensor] = {}
        """from a checkpoint: the state of the unfinished task"""
        return self.adapters

    def make_classifier(self) -> CosineHeads:
        if self.setup.classifier != "auto" or self.setup.classifier_options:
            raise UserError("The method 'ease' predicts by its prototypes: leave classifier at auto, without options.")
        if self.reader.indices:
            raise UserError("The method 'ease' has prototypes of the final feature only: set features.depths to final.")
        return CosineHeads(self.num_features, self.options.cosine_scale)

    def start_task(self, task: Task) -> None:
        self.adapters.add(task.seed)
        if task.index < self.known_tasks:  # nothing trains: its subspace is that of the backbone
            super().start_task(task)
        else:
            self.heads.add_task(task.classes, task.seed)
            self.heads.to(self.device)

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        self.adapters.current = len(self.adapters) - 1  # stays until after the backward, which can recompute blocks
        return super().loss(images, labels)

    @torch.no_grad()
    def finish_task(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        started = time.perf_counter()
        widths, spaces = self.heads.widths, range(len(self.adapters))
        first, classes = sum(widths[:-1]), widths[-1]
        sums = torch.zeros(classes, len(spaces), self.num_features, dtype=torch.float64, device=self.device)
        counts = torch.zeros(classes, dtype=torch.float64, device=self.device)
        for images, labels in batches:
            labels = labels.to(self.device) - first
            for k, features in enumerate(self._subspaces(images.to(self.device))):
                of_batch, of_class = subspaces.class_sums(features, labels, classes)
                sums[:, k] += of_batch
            counts += of_class
        means = (sums / counts.clamp(min=1)[:, None, None]).to(self.prototypes.dtype)
        before = F.pad(self.prototypes, (0, 0, 0, 1))  # one more subspace
        later = {"new": False, "later": True}.get(self.options.mapped_by, self.public)
        fill = subspaces.completed_by_later if later else subspaces.completed
        self.prototypes = fill(torch.cat((before, means)), widths)
        self.adapters.current = None  # between tasks the model has no adapters
        return {"prototypes": time.perf_counter() - started}

    def predict(self, images: Tensor) -> Tensor:
        """Before the end of a task its classes have no prototypes; the weights of its head are used instead."""
        options, features = self.options, self._subspaces(images)
        prototypes = subspaces.with_stand_ins(self.prototypes, [head.weight for head in self.heads.heads])  # type: ignore[misc]
        mean = {"sum": False, "mean": True}.get(options.others, self.public)
        weights = subspaces.weights_of_subspaces(self.heads.widths, options.alpha, mean)
        with full_precision(prototypes):
            return subspaces.ensemble(features, prototypes, weights.to(self.device))

    def _subspaces(self, images: Tensor) -> list[Tensor]:
        """The features (b, d) in each subspace."""
        features = []
        for k in range(len(self.adapters)):
            with self.adapters.using(k):
                features.append(at_least_float32(self.features(images)))
        return features

    # The state of finished tasks never changes: it is saved once per task, the rest once per epoch.

    @property
    def finished(self) -> int:
        """Number of tasks with prototypes."""
        return self.prototypes.shape[1]

    def _of_tasks(self, tasks: range) -> dict[str, Tensor]:
        """Adapters and heads of these tasks, named adapters.TASK... and heads.TASK..."""
        return {name: tensor for name, tensor in super().state_dict().items() if int(name.split(".")[1]) in tasks}

    def state_dict(self) -> dict[str, Tensor]:
        current = self._of_tasks(range(self.finished, len(self.adapters)))
        return {**current, "finished": torch.tensor(self.finished)}

    def task_state_dict(self) -> dict[str, Tensor]:
        return {**self._of_tasks(range(self.finished)), "prototypes": self.prototypes}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.training = {name: tensor for name, tensor in state.items() if name != "finished"}
        if int(state["finished"]) == 0:  # otherwise `load_task_state_dict` loads both
            super().load_state_dict(self.training)

    def load_task_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.prototypes = state["prototypes"].to(self.device)
        old = {name: tensor for name, tensor in state.items() if name != "prototypes"}
        super().load_state_dict({**old, **self.training})


METHODS.add(Ease.name, Ease)
