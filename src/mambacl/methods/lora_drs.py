"""LoRA-DRS (Liu and Chang, *LoRA Subtraction for Drift-Resistant Space in Exemplar-Free Continual Learning*, CVPR
2025): a low-rank change per task, trained in the directions of the task's inputs to the model *minus* earlier tasks'
changes.

Before a task, one pass over its images through W - sum_{j<t} B_j A_j gives the second moment of each layer's inputs.
Finished updates of A and B keep their share in its leading directions only. A triplet loss separates classes, also from
the stored means of old ones; the nearest class mean predicts.

Its recipe: Adam, no weight decay, batches of 128, rate 5e-4, the schedule coda-cosine; CIFAR-100 20 passes and 2e-3 for
the head, ImageNet-R 50 (40 in the first task) and 5e-4.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from mambacl.classifiers.base import Classifier, TaskHeads
from mambacl.classifiers.nearest_mean import NearestMean
from mambacl.classifiers.separate import SeparateHeads
from mambacl.classifiers.triplet import augmented_triplet
from mambacl.errors import UserError
from mambacl.methods.base import Task
from mambacl.methods.registry import METHODS
from mambacl.methods.task_changes import ChangesLayers, LayersOptions
from mambacl.nullspace.blocks import Part
from mambacl.nullspace.principal import PrincipalSpace, principal
from mambacl.nullspace.projectors import basis_dtype
from mambacl.ops.precision import at_least_float32, full_precision
from mambacl.options import Must, at_least, finite_from
from mambacl.tuning import Tuning
from mambacl.tuning.lora import LowRank
from mambacl.tuning.task_lora import Place, check_rank

SPACE = "space/"  # prefix of the current task's directions in the state


@dataclass(frozen=True)
class LoraDrsOptions(LayersOptions):
    """Options of LoRA-DRS."""

    variant: Literal["paper", "public-code"] = "paper"
    """paper: updates are projected; public-code: and divided by the root of the number of directions"""
    rank: Annotated[int, at_least(1)] = 10
    """rows of A"""
    share: Annotated[float, Must("be above 0 and at most 1", lambda share: 0 < share <= 1)] = 0.99
    """updates stay in the directions that hold this share of the sum of eigenvalues"""
    triplet: Annotated[float, finite_from(0)] = 0.05
    """weight of the triplet loss: 0.05 for CIFAR-100, 0.2 for ImageNet-R"""
    margin: Annotated[float, finite_from(0)] = 1.0
    """margin of the triplet loss: 1 for CIFAR-100, 2 for ImageNet-R"""


class LoraDrs(ChangesLayers):
    name = "lora-drs"
    summary = "a low-rank change per task, trained where the model without earlier ones is active (LoRA-DRS)"
    options_class: ClassVar[type] = LoraDrsOptions
    splits = False  # triplets within a batch
    own_classifier: ClassVar[str] = "nearest-mean"
    own_answer: ClassVar[bool] = True

    def check_places(self, places: list[Place]) -> None:
        check_rank(places, self.options.rank, "lora-drs: options.rank")

    def make_tuning(self) -> Tuning:
        tuning, parts = super().make_tuning(), dict[str, list[Part]]()
        for index, place in enumerate(self.changes.places):
            own = parts.setdefault(place.layer_name, [])
            own.append(Part("linear", f"{index}.A"))
            if place.inputs == place.outputs:  # otherwise B has other rows than the inputs have channels
                own.append(Part("linear", f"{index}.B", side="left"))
        self.space = PrincipalSpace(parts, frobenius=self.options.variant == "public-code")
        """of the current task; empty in the first"""
        return tuning

    def make_heads(self) -> TaskHeads:
        return SeparateHeads(self.num_features)

    def classifier_defaults(self) -> dict[str, Any]:
        return {"by": "angle"}

    def make_classifier(self) -> Classifier:
        if self.setup.classifier not in ("auto", "nearest-mean"):
            raise UserError("The method 'lora-drs' trains with class means: leave classifier at auto or nearest-mean.")
        return super().make_classifier()

    def new_change(self, place: Place, task: int, generator: torch.Generator) -> nn.Module:
        """B starts with one small value per column."""
        change = LowRank(place.inputs, place.outputs, self.options.rank, generator)
        if self.trains_in(task):
            rows = torch.randint(place.outputs, (self.options.rank,), generator=generator)
            change.B.data[rows, torch.arange(len(rows))] = 0.01 * torch.randn(len(rows), generator=generator)
        return change

    def start_task(self, task: Task) -> None:
        self.space.forget()
        super().start_task(task)

    def current_changes(self) -> dict[str, Tensor]:
        return dict(self.changes.tasks[-1].named_parameters())

    @torch.no_grad()
    def start_epoch(self, epoch: int, batches: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> None:
        if epoch == 0 and self.task > 0:
            with self.changes.times([-1.0] * self.task + [0.0]):
                moments = self.moments(batches())
            dtype, share = basis_dtype(self.model, "float32"), self.options.share
            spaces = {name: principal(moment, share, dtype) for name, moment in moments.items()}
            self.space.confine(spaces, self.current_changes())

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        self.space.wrap(optimizer, self.current_changes())
        return optimizer

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(images)
        loss, correct = self.task_loss(features, labels)
        return loss + self.options.triplet * self.triplet(features, labels), correct

    def triplet(self, features: Tensor, labels: Tensor) -> Tensor:
        assert isinstance(self.classifier, NearestMean)
        old = self.heads.classes - self.heads.widths[-1]
        means, counts = self.classifier.means()[:old], self.classifier.counts[:old]
        with full_precision(features):
            return augmented_triplet(at_least_float32(features), labels, means, counts > 0, self.options.margin)

    def free(self) -> dict[str, float]:
        return {name: one.rank / one.spectrum.numel() for name, one in self.space.spaces.items()}

    def state_dict(self) -> dict[str, Tensor]:
        return {**super().state_dict(), **{SPACE + name: t for name, t in self.space.state_dict().items()}}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        own = {name: tensor for name, tensor in state.items() if name.startswith(SPACE)}
        super().load_state_dict({name: tensor for name, tensor in state.items() if name not in own})
        if len(self.changes.tasks):
            own = {name.removeprefix(SPACE): tensor for name, tensor in own.items()}
            self.space.load_state_dict(own, self.current_changes())

    def for_answers(
        self, state: Mapping[str, Tensor], task_state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """All but the directions of the current task."""
        return super().for_answers({n: t for n, t in state.items() if not n.startswith(SPACE)}, task_state)


METHODS.add(LoraDrs.name, LoraDrs)
