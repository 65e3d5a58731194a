"""EASE (Zhou et al., CVPR 2024) on a Mamba backbone: a set of adapters, and so a feature space, for each task.

A task trains its set with a cosine classifier. Then each of its classes gets a prototype in every
subspace, its mean feature there; the classes of earlier tasks get one in the new subspace from those of the new
classes, by similarity. An image is classified by its cosines with the prototypes, a class's own subspace first.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mambacl.classifiers import subspaces
from mambacl.classifiers.cosine import CosineHeads
from mambacl.errors import UserError
from mambacl.methods.base import Method, Task
from mambacl.methods.registry import METHODS
from mambacl.ops.precision import at_least_float32, full_precision
from mambacl.tuning import AdapterOptions, AdapterSets, Tuning


@dataclass(frozen=True)
class EaseOptions(AdapterOptions):
    """Options of EASE."""

    alpha: float = 0.1
    """weight of the subspaces that are not a class's own"""
    others: Literal["sum", "mean"] = "sum"
    """whether alpha counts for each of them, as in EASE's paper, or for all together, as in its public code"""
    mapped_by: Literal["new", "later"] = "new"
    """an old class's prototype in a subspace comes from the classes of that subspace's own task, once, as in EASE's
    paper; or again after each task, from all classes since, as in its public code (`recalc_sim`)"""
    cosine_scale: float = 1.0
    """what the classifiers' learned scale starts from; 1 in EASE's public code"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha < float("inf"):
            raise UserError(f"options.alpha must not be negative, got {self.alpha}.")
        if self.others not in ("sum", "mean"):
            raise UserError(f"options.others is 'sum' or 'mean', got {self.others!r}.")
        if self.mapped_by not in ("new", "later"):
            raise UserError(f"options.mapped_by is 'new' or 'later', got {self.mapped_by!r}.")
        if not 0 < self.cosine_scale < float("inf"):
            raise UserError(f"options.cosine_scale must be positive, got {self.cosine_scale}.")


class Ease(Method):
    name = "ease"
    summary = "adapters and prototypes for each task, joined by similarity (EASE-Mamba)"
    options_class: ClassVar[type] = EaseOptions
    needs_task_state = True

    def make_tuning(self) -> Tuning:
        self.adapters = AdapterSets(self.model, self.options)
        self.prototypes = torch.zeros(0, 0, self.num_features, device=self.device)
        """of the classes of finished tasks: see `classifiers.subspaces`"""
        self.training: dict[str, Tensor] = {}
        """of a checkpoint: the part of the task that was under way"""
        return self.adapters

    def make_classifier(self) -> CosineHeads:
        if self.setup.classifier != "auto" or self.setup.classifier_options:
            raise UserError("The method 'ease' answers with its prototypes: leave classifier at auto, without options.")
        return CosineHeads(self.num_features, self.options.cosine_scale)

    def start_task(self, task: Task) -> None:
        self.adapters.add(task.seed)
        if task.index < self.known_tasks:  # nothing is trained: its subspace is that of the backbone
            super().start_task(task)
        else:
            self.heads.add_task(task.classes, task.seed)
            self.heads.to(self.device)

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        self.adapters.current = len(self.adapters) - 1  # until after the backward, which may compute blocks again
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
        fill = subspaces.completed if self.options.mapped_by == "new" else subspaces.completed_by_later
        self.prototypes = fill(torch.cat((before, means)), widths)
        self.adapters.current = None  # between tasks the model is the backbone
        return {"prototypes": time.perf_counter() - started}

    def predict(self, images: Tensor) -> Tensor:
        """Before the end of a task its classes have no prototypes; its classifier's weights stand in for them."""
        options, features = self.options, self._subspaces(images)
        prototypes = subspaces.with_stand_ins(self.prototypes, [head.weight for head in self.heads.heads])  # type: ignore[misc]
        weights = subspaces.weights_of_subspaces(self.heads.widths, options.alpha, options.others == "mean")
        with full_precision(prototypes):
            return subspaces.ensemble(features, prototypes, weights.to(self.device))

    def _subspaces(self, images: Tensor) -> list[Tensor]:
        """The features (b, d) in each subspace."""
        features = []
        for k in range(len(self.adapters)):
            with self.adapters.using(k):
                features.append(at_least_float32(self.features(images)))
        return features

    # What finished tasks have left never changes: it is kept once per task, and what trains each epoch.

    @property
    def finished(self) -> int:
        """Tasks with prototypes."""
        return self.prototypes.shape[1]

    def _of_tasks(self, tasks: range) -> dict[str, Tensor]:
        """Adapters and heads of these tasks; their names begin with adapters.TASK and heads.TASK."""
        return {name: tensor for name, tensor in super().state_dict().items() if int(name.split(".")[1]) in tasks}

    def state_dict(self) -> dict[str, Tensor]:
        current = self._of_tasks(range(self.finished, len(self.adapters)))
        return {**current, "finished": torch.tensor(self.finished)}

    def task_state_dict(self) -> dict[str, Tensor]:
        return {**self._of_tasks(range(self.finished)), "prototypes": self.prototypes}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.training = {name: tensor for name, tensor in state.items() if name != "finished"}
        if int(state["finished"]) == 0:  # else the other tasks' state comes first
            super().load_state_dict(self.training)

    def load_task_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.prototypes = state["prototypes"].to(self.device)
        old = {name: tensor for name, tensor in state.items() if name != "prototypes"}
        super().load_state_dict({**old, **self.training})


METHODS.add(Ease.name, Ease)
