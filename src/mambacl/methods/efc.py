"""EFC++ (Magistri et al., *Elastic Feature Consolidation for Cold Start Exemplar-Free Incremental Learning*, ICLR 2024,
and its successor EFC++): the features of new images stay where the heads' answers depend on them. From the second task
on, the loss has

    mean over images of (f - f_old)^T (weight E + damping I) (f - f_old)

with the features f_old from before the task and the matrix E of `classifiers/drifts/efc.py`. When a task ends, the
classes' Gaussians follow the drift under E, and all heads are aligned on samples of them (`classifiers/aligned.py`).

Two forward passes per training image from the second task on, one per test image. State: E (d, d) and the trained
parameters from before the task.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from mambacl.classifiers.drifts.efc import elastic_sum, penalty
from mambacl.methods.registry import METHODS
from mambacl.methods.sequential import Sequential
from mambacl.ops.precision import at_least_float32, full_precision
from mambacl.options import Options, finite_from
from mambacl.tuning import Tuning

EFC_STATE = "efc/"  # prefix of its tensors in a task's state
MATRIX, BEFORE = "matrix", "before/"


@dataclass(frozen=True)
class EFCOptions(Options):
    """Options of EFC++. The defaults are the public code's."""

    weight: Annotated[float, finite_from(0)] = 10.0
    """weight of E"""
    damping: Annotated[float, finite_from(0)] = 0.1
    """weight of the squared distance of features"""


class EFC(Sequential):
    name = "efc"
    summary = "fine-tuning whose features stay where answers depend on them, heads aligned on Gaussians (EFC++)"
    options_class: ClassVar[type] = EFCOptions
    own_classifier: ClassVar[str] = "aligned"
    recordable: ClassVar[bool] = False

    def make_tuning(self) -> Tuning:
        self.matrix: Tensor | None = None
        """E of the last task; none in the first"""
        self.before: dict[str, Tensor] = {}
        """the trained parameters as the last task has left them"""
        return super().make_tuning()

    def classifier_defaults(self) -> dict[str, Any]:
        return {"drift": "efc", "own": 1.0, "pooled": 0.0, "ridge": 1e-5, "epochs": 50, "lr": 1e-3, "accumulate": True}

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if self.matrix is None:
            return super().loss(images, labels)
        with torch.no_grad(), self.with_values(self.before):
            old = self.features(images)
        features = self.features(images)
        loss, correct = self.task_loss(features, labels)
        with full_precision(features):
            new, old = at_least_float32(features), at_least_float32(old)
            return loss + penalty(new, old, self.matrix, self.options.weight, self.options.damping), correct

    @torch.no_grad()
    def finish_task(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        started = time.perf_counter()
        total, count = torch.zeros(self.num_features, self.num_features, device=self.device), 0
        for images, _ in batches:
            features = self.features(images.to(self.device))
            with full_precision(features):
                total += elastic_sum(at_least_float32(features), self.heads)
            count += len(images)
        self.matrix = total / max(1, count)
        self.before = {name: parameter.detach().clone() for name, parameter in self.tuning.trained()}
        return {"covariance": time.perf_counter() - started}

    def task_state_dict(self) -> dict[str, Tensor]:
        own = {} if self.matrix is None else {EFC_STATE + MATRIX: self.matrix}
        own |= {EFC_STATE + BEFORE + name: tensor for name, tensor in self.before.items()}
        return {**super().task_state_dict(), **own}

    def load_task_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_task_state_dict(state)
        own = {name.removeprefix(EFC_STATE): t for name, t in state.items() if name.startswith(EFC_STATE)}
        own = {name: tensor.to(self.device) for name, tensor in own.items()}
        self.matrix = own.pop(MATRIX, None)
        self.before = {name.removeprefix(BEFORE): tensor for name, tensor in own.items()}

    def for_answers(
        self, state: Mapping[str, Tensor], task_state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """All but what the next task needs."""
        state, task_state = super().for_answers(state, task_state)
        return state, {name: tensor for name, tensor in task_state.items() if not name.startswith(EFC_STATE)}


METHODS.add(EFC.name, EFC)
