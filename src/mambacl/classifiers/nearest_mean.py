"""The nearest class mean: predicts the class whose mean feature is closest, by distance or by angle.

Sums of features are stored as integer multiples of 2^-32. Integer sums do not depend on the order, so batches, merged
parts and resumed runs all give the same means.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mambacl.classifiers.base import Classifier, StatisticsClassifier
from mambacl.classifiers.cosine import cosines
from mambacl.classifiers.drift import DriftOptions, FollowsDrift
from mambacl.classifiers.left_out import without_own
from mambacl.classifiers.registry import CLASSIFIERS
from mambacl.errors import UserError
from mambacl.options import build_config

UNIT = 2.0**-32  # far below the rounding error of typical float32 features
LARGEST = 2.0**62  # limit of a sum in units; int64 overflows at 2^63


@dataclass(frozen=True)
class NearestMeanOptions(DriftOptions):
    """Options of the nearest class mean."""

    by: Literal["distance", "angle"] = "distance"
    """what is near: the mean at the smallest distance, or the one at the smallest angle, as in SimpleCIL"""


class NearestMean(FollowsDrift, StatisticsClassifier):
    """The class whose mean feature is closest. The sums are integers, so their order does not matter. Keywords are the
    options of `NearestMeanOptions`."""

    name = "nearest-mean"
    summary = "the closest class mean, computed from features when a task ends"
    options_class: ClassVar[type] = NearestMeanOptions
    sums: Tensor  # (classes, d), in units
    counts: Tensor  # (classes,)

    def __init__(self, num_features: int, **options: Any) -> None:
        super().__init__(num_features)
        self.options = build_config(self.options_class, options, self.name)
        self.register_buffer("sums", torch.zeros(0, num_features, dtype=torch.int64))
        self.register_buffer("counts", torch.zeros(0, dtype=torch.int64))
        self.prepare_drift()

    @property
    def classes(self) -> int:
        return len(self.counts)

    def add_task(self, classes: int, seed: int = 0) -> None:
        self.sums, self.counts = F.pad(self.sums, (0, 0, 0, classes)), F.pad(self.counts, (0, classes))

    @torch.no_grad()
    def update(self, features: Tensor, labels: Tensor) -> None:
        """Also accepts classes without `add_task`, and more images of old classes."""
        features, labels = self.checked(features, labels)
        if not len(labels):
            return
        units = (features.double() / UNIT).round()
        self._check_size(units.abs().sum(0).max() + self.sums.abs().max())
        self.sums.index_add_(0, labels, units.long())
        self.counts += torch.bincount(labels, minlength=self.classes)

    def merge(self, other: Classifier) -> None:
        if not isinstance(other, NearestMean) or other.num_features != self.num_features:
            raise UserError("Only another nearest-mean classifier with the same number of features can be merged.")
        self.add_task(max(0, other.classes - self.classes))
        self.sums[: other.classes] += other.sums.to(self.sums.device)
        self.counts[: other.classes] += other.counts.to(self.sums.device)

    def class_means(self) -> tuple[Tensor, Tensor]:
        return self.means(), self.counts

    @torch.no_grad()
    def transport(
        self, matrix: Tensor | None = None, offset: Tensor | None = None, residual: Tensor | None = None
    ) -> None:
        """Maps the means; covariances do not matter here."""
        if matrix is None and offset is None:  # nothing moves, not even by rounding
            return
        means = self.means() if matrix is None else self.means() @ matrix.to(self.sums.device, torch.float64)
        means = means if offset is None else means + offset.to(means)
        units = (means * self.counts[:, None] / UNIT).round()
        self._check_size(units.abs().max())
        self.sums = units.long()

    def _check_size(self, units: Tensor) -> None:
        if not units < LARGEST:
            raise UserError("The sum of a class's features is above 2^30: scale the features down.")

    def means(self) -> Tensor:
        """(classes, d) in float64; zeros for a class without images."""
        return self.sums.double() * UNIT / self.counts.clamp(min=1)[:, None]

    def forward(self, features: Tensor) -> Tensor:
        """Negative distances, or cosines; minus infinity for a class without images."""
        means = self.means().to(features.dtype)
        if self.options.by == "angle":
            scores = cosines(features, means)
        else:  # without matrix products, whose rounding errors would swamp small distances
            scores = -torch.cdist(features, means, compute_mode="donot_use_mm_for_euclid_dist")
        return scores.masked_fill(self.counts == 0, -torch.inf)

    @torch.no_grad()
    def left_out(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Only the mean of an image's own class changes without it."""
        features, labels = features.to(self.sums.device).double(), labels.to(self.sums.device)
        scores = self(features.flatten(0, 1)).unflatten(0, features.shape[:2])
        counts = (self.counts[labels] - features.shape[1]).clamp(min=1)[:, None]
        means = (self.sums[labels].double() * UNIT - features.sum(1)) / counts
        if self.options.by == "angle":
            own = F.cosine_similarity(features, means[:, None], dim=2, eps=1e-12)[:, :, None]
        else:
            own = -(features - means[:, None]).norm(dim=2, keepdim=True)
        columns = labels[:, None, None].expand(own.shape)
        return scores.scatter(2, columns, own), without_own(scores, labels)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Changes the number of classes to that of the state."""
        self.add_task(len(state["counts"]) - self.classes)  # a negative number removes classes
        return super().load_state_dict(state, strict, assign)


CLASSIFIERS.add(NearestMean.name, NearestMean)
