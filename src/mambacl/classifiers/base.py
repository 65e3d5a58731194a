"""The interface of classifiers: modules that map features to one score per class seen so far. They depend neither on
the backbone nor on the method.

Some classifiers have parameters that train with the backbone: `TaskHeads` holds one head per task. A
`StatisticsClassifier` is computed from features when a task ends; during training, the method then uses heads of its
default classifier.

To add a classifier, derive from `StatisticsClassifier` or `TaskHeads` and call `CLASSIFIERS.add` in a new file in this
folder, or in another package that lists it in the entry point group `mambacl.classifiers`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mambacl.errors import UserError
from mambacl.ops.precision import at_least_float32, full_precision


@dataclass(frozen=True)
class NoOptions:
    """A classifier without options."""


class Classifier(nn.Module, ABC):
    """Labels number all classes from 0, in the order in which they were learned."""

    name: ClassVar[str]
    summary: ClassVar[str]
    options_class: ClassVar[type] = NoOptions
    """a dataclass; its fields are the constructor's keyword arguments after the number of features"""
    trains: ClassVar[bool]
    """whether its parameters train with the backbone"""
    updates: ClassVar[bool]
    """whether `update` gets each task's features when the task ends"""
    estimates_probabilities: ClassVar[bool] = False
    """whether scores estimate the classes' probabilities, as least squares do; otherwise they count as logits"""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    @property
    @abstractmethod
    def classes(self) -> int:
        """Number of classes so far, including the current task's."""

    @abstractmethod
    def add_task(self, classes: int, seed: int = 0) -> None:
        """Adds this many classes. Random values come from the seed."""

    @abstractmethod
    def forward(self, features: Tensor) -> Tensor:
        """Scores (b, classes) of features (b, d); the highest one is the prediction."""

    def scores(self, features: Tensor) -> Tensor:
        """`forward` in full precision, even under autocast: rounded scores can tie, which favours older classes."""
        with full_precision(features):
            return self(at_least_float32(features))

    def update(self, features: Tensor, labels: Tensor) -> None:
        """Adds features of a finished task. The order and the division into batches do not affect the state."""

    def finish_task(self) -> None:
        """Called after the last `update` of a task."""

    def favour_rare(self, first: int) -> None:
        """After `finish_task`: helps the classes from label `first` on that have fewer images than the others on
        average, until the next task. For classifiers whose scores grow with a class's share of the images."""

    @property
    def leaves_out(self) -> bool:
        """Whether it has a `left_out` for its `forward`, which calibrates its probabilities: a subclass with another
        `forward` needs another one."""
        own = {
            name: next(kind for kind in type(self).__mro__ if name in vars(kind)) for name in ("forward", "left_out")
        }
        return own["left_out"] is own["forward"]

    def left_out(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """What `forward` would say about images (n, views, d) that it was updated with, all their views among them, if
        it had never seen the image, and if it had never seen its class: scores (n, views, classes) twice, the second
        with minus infinity for the image's class. Each image is left out on its own. Only if `leaves_out`."""
        raise UserError(f"The classifier '{self.name}' cannot tell how it would answer without an image.")

    def merge(self, other: "Classifier") -> None:
        """Adds what another classifier of the same kind was updated with."""
        raise UserError(f"The classifier '{self.name}' is trained step by step and cannot be merged with another.")

    def for_scores(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The part of a state that `scores` needs. A classifier that has loaded it cannot be updated."""
        return dict(state)

    @property
    def nbytes(self) -> int:
        """Size of the state in bytes."""
        return sum(tensor.nbytes for tensor in self.state_dict().values())


def check_batch(features: Tensor, labels: Tensor, num_features: int) -> None:
    """Refuses what is not a batch of features with class numbers."""
    if features.dim() != 2 or features.shape[1] != num_features or labels.shape != features.shape[:1]:
        raise UserError(
            f"update needs features (b, {num_features}) and labels (b,), got {tuple(features.shape)} and "
            f"{tuple(labels.shape)}."
        )
    if labels.is_floating_point() or (len(labels) and int(labels.min()) < 0):
        raise UserError("Labels must be whole numbers from 0.")
    if not torch.isfinite(features).all():
        raise UserError("A feature is NaN or infinite: check the images and the model's weights.")


class StatisticsClassifier(Classifier):
    """A classifier computed from sums over features. Updates can come in any order and any division into batches, with
    new classes, more images of old classes or single images."""

    trains = False
    updates = True

    def checked(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The arguments of `update`, on the classifier's device, after adding classes that it does not know yet."""
        check_batch(features, labels, self.num_features)
        device = next(self.buffers()).device
        if len(labels):
            self.add_task(max(0, int(labels.max()) + 1 - self.classes))
        return features.to(device), labels.to(device)


class TaskHeads(Classifier):
    """One head per task, trained only in that task; scores are the concatenated logits of all heads.

    A subclass defines the head, which needs a `weight` with one row per class.
    """

    trains = True
    updates = False

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.heads = nn.ModuleList()

    @abstractmethod
    def new_head(self, classes: int, seed: int) -> nn.Module: ...

    @property
    def widths(self) -> list[int]:
        """Classes per task."""
        return [len(head.weight) for head in self.heads]  # type: ignore[arg-type]

    @property
    def classes(self) -> int:
        return sum(self.widths)

    def add_task(self, classes: int, seed: int = 0, warm_start: bool = False) -> None:
        """Adds a head; the earlier ones are fixed from now on. With `warm_start` it starts as a copy of the previous
        head, if that has the same number of classes."""
        head = self.new_head(classes, seed)
        if len(self.heads):
            before = self.heads[-1]
            before.requires_grad_(False)
            if warm_start and self.widths[-1] == classes:
                head.load_state_dict(before.state_dict())
            head.to(next(before.parameters()).device)
        self.heads.append(head)

    @torch.no_grad()
    def take_over(self, classifier: nn.Module) -> None:
        """Adds a linear classifier that was trained elsewhere as the next head, and fixes it."""
        if not isinstance(classifier, nn.Linear):
            raise UserError(
                f"take_over needs a linear classifier, got {type(classifier).__name__}: build the model with classes."
            )
        if classifier.in_features != self.num_features:
            raise UserError(
                f"The classifier takes {classifier.in_features} features, but the model has {self.num_features}: "
                "use the classifier that was trained with this model."
            )
        self.add_task(classifier.out_features)
        head: Any = self.heads[-1]
        head.weight.copy_(classifier.weight)
        if isinstance(head, nn.Linear) and head.bias is not None:
            head.bias.zero_() if classifier.bias is None else head.bias.copy_(classifier.bias)
        head.requires_grad_(False)

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters of the current head, by their names in the state."""
        last = len(self.heads) - 1
        return [(f"heads.{last}.{name}", parameter) for name, parameter in self.heads[last].named_parameters()]

    def task_logits(self, features: Tensor) -> Tensor:
        """Logits of the current task's classes, for training, in full precision."""
        with full_precision(features):
            return self.heads[-1](at_least_float32(features))

    def forward(self, features: Tensor) -> Tensor:
        return torch.cat([head(features) for head in self.heads], dim=1)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Replaces the heads by those of the state."""
        self.heads = nn.ModuleList()
        while (weight := state.get(f"heads.{len(self.heads)}.weight")) is not None:
            self.add_task(len(weight))
        return super().load_state_dict(state, strict, assign)
