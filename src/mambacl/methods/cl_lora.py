"""CL-LoRA (He et al., CVPR 2025): low-rank changes of two kinds. All tasks share those of the first half of the blocks,
which train on; those of the second half belong to one task, with a learned weight per block.

From the second task on, each batch takes two steps. The first keeps what the shared changes know: the feature after
their blocks, normed, must get the same scores as with the changes before the task; rows of B that were long learn more.
The second is cross-entropy with a cosine head, and keeps the tasks' weights apart. A class is then its mean feature; at
test, a class gets its cosine with the feature that its own task's changes make.

Its recipe: SGD; CIFAR-100 rate 0.03, decay 1e-4, batch 64, 30 passes; ImageNet-R 0.05, 5e-4, 32, 20 passes, rank 10.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from mambacl.classifiers import subspaces
from mambacl.classifiers.cosine import cosines
from mambacl.methods.base import Method, Task
from mambacl.methods.registry import METHODS
from mambacl.methods.task_changes import LayersOptions
from mambacl.ops.precision import at_least_float32, full_precision
from mambacl.options import at_least, finite_from
from mambacl.tuning import AddedModules, Tuning
from mambacl.tuning.shared_lora import BEFORE, SharedAndOwn, soft_cross_entropy
from mambacl.tuning.task_lora import check_rank, places_of, usual_layers


@dataclass(frozen=True)
class CLLoraOptions(LayersOptions):
    """Options of CL-LoRA."""

    variant: Literal["paper", "public-code"] = "paper"
    """paper: a block has one weight, and what the scores should be is fixed; public-code: a block has a weight per
    layer, one for the unchanged keys among them, and the head also learns from what the scores should be"""
    rank: Annotated[int, at_least(1)] = 8
    """rows of A"""
    shared: Annotated[int | None, at_least(1)] = None
    """number of blocks, the first ones, with shared changes; half of them if null"""
    distillation: Annotated[float, finite_from(0)] = 5.0
    """weight of the first step's loss"""
    orthogonality: Annotated[float, finite_from(0)] = 1e-4
    """weight of the mean cosine between the task's weights and those of earlier tasks"""


class CLLora(Method):
    name = "cl-lora"
    summary = "low-rank changes, shared in the first blocks and per task in the last ones (CL-LoRA)"
    options_class: ClassVar[type] = CLLoraOptions
    own_classifier: ClassVar[str] = "cosine"
    own_answer: ClassVar[bool] = True
    recordable: ClassVar[bool] = False  # a batch takes two steps
    splits = False  # each call of loss takes a step of its own
    needs_task_state = True

    def make_tuning(self) -> Tuning:
        options = self.options
        layers = usual_layers(self.model, ("q", "v")) if options.layers is None else options.layers
        places = places_of(self.model, layers)
        check_rank(places, options.rank, "cl-lora: options.rank")
        each_layer = options.variant == "public-code"
        self.lora = SharedAndOwn(self.model, places, options.rank, options.shared, each_layer, self.setup.seed)
        self.prototypes = at_least_float32(next(self.model.parameters()).new_zeros(0, self.num_features))
        """of the classes of finished tasks, each with its task's own changes"""
        self.optimizer: torch.optim.Optimizer | None = None
        return AddedModules(self.model, lora=self.lora)

    def start_task(self, task: Task) -> None:
        self.lora.add(task.seed)
        super().start_task(task)
        self.lora.own.only = self.task

    def features(self, images: Tensor) -> Tensor:
        return self.lora.late(self.lora.early(images), self.task)

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        self.optimizer = optimizer
        return optimizer

    def distil(self, images: Tensor) -> Tensor:
        """The loss of the first step, without its weight, and its gradients."""
        lora = self.lora
        with torch.no_grad():
            before = lora.pooled(lora.early(images, BEFORE))
        now = lora.pooled(lora.early(images))
        wanted, scores = (self.heads.task_logits(feature) for feature in (before, now))
        wanted = wanted if self.options.variant == "public-code" else wanted.detach()
        loss = soft_cross_entropy(scores, wanted, temperature=2.0)
        (self.options.distillation * loss).backward()
        lora.reassign()
        return loss.detach()

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if self.task > 0 and self.optimizer is not None:
            self.optimizer.zero_grad()
            self.distil(images)
            self.optimizer.step()
        loss, correct = super().loss(images, labels)
        return loss + self.options.orthogonality * self.lora.overlap(), correct

    @torch.no_grad()
    def finish_task(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        started = time.perf_counter()
        first, classes = sum(self.heads.widths[:-1]), self.heads.widths[-1]
        sums = torch.zeros(classes, self.num_features, dtype=torch.float64, device=self.device)
        counts = torch.zeros(classes, dtype=torch.float64, device=self.device)
        for images, labels in batches:
            features = self.features(images.to(self.device))
            of_batch, of_class = subspaces.class_sums(features, labels.to(self.device) - first, classes)
            sums, counts = sums + of_batch, counts + of_class
        means = (sums / counts.clamp(min=1)[:, None]).to(self.prototypes)
        self.prototypes = torch.cat((self.prototypes[:first], means))
        return {"prototypes": time.perf_counter() - started}

    def predict(self, images: Tensor) -> Tensor:
        """Before the end of a task its classes have no prototypes; the weights of its head are used instead."""
        x, scores, first = self.lora.early(images), list[Tensor](), 0
        for task, head in enumerate(self.heads.heads):
            feature, width = at_least_float32(self.lora.late(x, task)), len(head.weight)  # type: ignore[arg-type]
            known = self.prototypes[first : first + width]
            with full_precision(feature):
                scores.append(cosines(feature, known if len(known) else head.weight.detach()))  # type: ignore[operator]
            first += width
        return torch.cat(scores, dim=1)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        self.lora.own.only = self.task

    def task_state_dict(self) -> dict[str, Tensor]:
        return {**super().task_state_dict(), "prototypes": self.prototypes}

    def load_task_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_task_state_dict(state)
        self.prototypes = state["prototypes"].to(self.device)


METHODS.add(CLLora.name, CLLora)
