"""TRGP, Trust Region Gradient Projection (Lin et al., ICLR 2022): GPM, and scales within the input subspaces of the
earlier tasks that a new one trusts.

A layer trusts an earlier task if more than half of the gradient of the new task lies in its subspace; the two with the
largest share get a square matrix each, which trains with the weights. Its recipe: SGD at 0.01 without momentum, batches
of 64, 200 passes, an AlexNet from random weights.

The paper knows the task of a test image and applies that task's scales. Here the logits of each task come from a pass
with its scales: with `stream.scenario: task` that is the paper's answer. `scales: last` is one pass with the latest.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from mambacl.methods.base import Task
from mambacl.methods.gpm import GPM, GPMOptions
from mambacl.methods.registry import METHODS
from mambacl.nullspace.subspaces import grown, nothing
from mambacl.ops.precision import at_least_float32, full_precision
from mambacl.options import at_least, between
from mambacl.tuning import Tuning
from mambacl.tuning.trusted_scales import PREFIX, TrustedScales, WithScales, trusted


@dataclass(frozen=True)
class TRGPOptions(GPMOptions):
    """Options of TRGP."""

    threshold: Annotated[float, between(0, 1)] = 0.5
    """a task is trusted if its subspace holds more than this share of the gradient's norm"""
    images: Annotated[int, at_least(1)] = 125
    """images of a new task that this gradient is computed from, at least one batch"""
    scales: Literal["each", "last"] = "each"
    """each: a pass per task with its scales; last: one pass with the latest"""


class TRGP(GPM):
    name = "trgp"
    summary = "GPM with scales within the subspaces of trusted tasks (TRGP)"
    options_class: ClassVar[type] = TRGPOptions
    own_answer: ClassVar[bool] = True
    needs_task_state = True
    recordable: ClassVar[bool] = False  # layers differ in whom they trust

    def make_tuning(self) -> Tuning:
        own = super().make_tuning()
        layers = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear) and f"{name}.weight" in self.space.trained_names()
        }
        self.scales = TrustedScales(layers)
        self.parts = {p.part.parameter: p.name for p in reversed(self.space.selection.protections)}
        return WithScales(own, self.scales)

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        self.scales.add_task(task.index)

    def start_epoch(self, epoch: int, batches: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> None:
        """Before the first epoch of a later task: which tasks each layer trusts."""
        task = self.task
        if epoch or task not in self.scales.scales:
            return
        weights = {name: layer.weight for name, layer in self.scales.layers.items()}
        gradients, seen = {name: torch.zeros_like(weight) for name, weight in weights.items()}, 0
        with self.scales.using(None):
            for images, labels in batches():
                loss, _ = self.loss(images.to(self.device), labels.to(self.device))
                found = torch.autograd.grad(loss, list(weights.values()))
                for name, gradient in zip(weights, found, strict=True):
                    gradients[name] += gradient * len(images)
                seen += len(images)
                if seen >= self.options.images:
                    break
        earlier = sorted(self.scales.bases)
        for name, gradient in gradients.items():
            bases = [self.scales.bases[number][name] for number in earlier]
            chosen = trusted(gradient, bases, self.options.threshold)
            self.scales.trust(task, name, [earlier[number] for number in chosen])

    def finish_task(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        before = {name: covariance.clone() for name, covariance in self.space.covariances().items()}
        seconds = super().finish_task(batches)
        now, share = self.space.covariances(), float(self.space.setting.rank_at(self.task).partition(":")[2])
        below, own = self.space.setting.below_at_first, self.scales.bases.setdefault(self.task, {})
        for name, layer in self.scales.layers.items():
            part = self.parts[f"{name}.weight"]
            moment = (now[part] - before[part] if part in before else now[part]).to(self.device)
            space = grown(nothing(len(moment), moment), moment, share, below_at_first=below)
            own[name] = space.basis.to(layer.weight)
        return seconds

    def predict(self, images: Tensor) -> Tensor:
        if self.options.scales == "last":
            return super().predict(images)
        logits = []
        for number, head in enumerate(self.heads.heads):
            with self.scales.using(number):
                features = self.features(images)
            with full_precision(features):
                logits.append(head(at_least_float32(features)))
        return torch.cat(logits, dim=1)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        self.scales.active = self.task

    def task_state_dict(self) -> dict[str, Tensor]:
        return {**super().task_state_dict(), **self.scales.state_dict()}

    def load_task_state_dict(self, state: Mapping[str, Tensor]) -> None:
        scales = {name: tensor for name, tensor in state.items() if name.startswith(PREFIX)}
        super().load_task_state_dict({name: tensor for name, tensor in state.items() if name not in scales})
        self.scales.load_state_dict(scales)

    def for_answers(
        self, state: Mapping[str, Tensor], task_state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """All but the null space."""
        own, kept = super().for_answers(state, task_state)
        return own, {**kept, **{name: t for name, t in task_state.items() if name.startswith(PREFIX)}}


METHODS.add(TRGP.name, TRGP)
