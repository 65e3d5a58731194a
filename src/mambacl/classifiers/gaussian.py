"""One Gaussian per class, with a covariance that is shrunk: FeCAM (Goswami et al., NeurIPS 2023) and regularised
Gaussian discriminant analysis.

A class's covariance S_c and that within all classes, S, give

    B = own S_c + pooled S
    B <- B + variance mean(diagonal of B) I + covariance mean(off-diagonal of B) (1 - I)      `rounds` times
    S' = B + identity I, divided by its own standard deviations if `correlation`

and the score is -(f - mu_c)^T S'^-1 (f - mu_c) / 2, less log det S' / 2 if `log_det`.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mambacl.classifiers.base import Classifier
from mambacl.classifiers.class_statistics import (
    ClassStatisticsClassifier,
    CovarianceOptions,
    mean_variance,
    whitening,
)
from mambacl.classifiers.registry import CLASSIFIERS
from mambacl.classifiers.subspaces import class_sums
from mambacl.errors import UserError
from mambacl.ops.precision import float32_products
from mambacl.options import Must, at_least, finite_from

PLAIN = (
    "Only Gaussians of plain features follow a drift: set drift to none, or tukey to 1 and unit to none or distance."
)
AT_ONCE = 1 << 24  # values of the largest intermediate tensor


@dataclass(frozen=True)
class GaussianOptions(CovarianceOptions):
    """Options of the classifier with one Gaussian per class."""

    variance: Annotated[float, finite_from(0)] = 0.1
    """share of the mean variance that is added to every variance"""
    covariance: Annotated[float, finite_from(0)] = 0.0
    """share of the mean covariance of two features that is added to every such covariance"""
    rounds: Annotated[int, at_least(1)] = 1
    """how often these two are added"""
    identity: Annotated[float, finite_from(0)] = 0.0
    """number that is added to every variance"""
    correlation: bool = False
    """divide each covariance by its own standard deviations, so that only correlations count"""
    log_det: bool = True
    """subtract half of the covariance's log-determinant, as a density has it"""
    tukey: Annotated[float, Must("be above 0 and at most 1", lambda value: 0 < value <= 1)] = 1.0
    """power of each value of a feature; signs are kept"""
    unit: Literal["none", "features", "distance"] = "none"
    """features: divide each feature by its length; distance: divide features and means, but not what the covariances
    are computed from"""

    def check(self) -> None:
        super().check()
        if self.drift != "none" and not self.plain:
            raise UserError(PLAIN)

    @property
    def plain(self) -> bool:
        """Whether the statistics are those of the features themselves."""
        return self.tukey == 1 and self.unit != "features"


FECAM = GaussianOptions(
    own=1.0, pooled=0.0, variance=1.0, covariance=1.0, rounds=2, correlation=True, log_det=False, tukey=0.5,
    unit="distance",
)  # fmt: skip
"""FeCAM's public code for convolutional networks, whose features are positive"""
FECAM_VIT = GaussianOptions(own=1.0, pooled=0.0, variance=1.0, correlation=True, log_det=False, unit="features")
"""FeCAM's public code for vision transformers"""
ADAGAUSS = GaussianOptions(
    own=1.0, pooled=0.0, variance=3.0, correlation=True, log_det=False, unit="distance", drift="adagauss",
)  # fmt: skip
"""AdaGauss's public code"""
RGDA = GaussianOptions(own=0.2, pooled=0.2, variance=0.0, identity=0.2)
"""regularised Gaussian discriminant analysis, as in the public code of LR-RGDA"""


def mean_covariance(matrices: Tensor) -> Tensor:
    """The mean of the off-diagonal values of each matrix that are not zero."""
    off = matrices - torch.diag_embed(matrices.diagonal(dim1=-2, dim2=-1))
    return off.sum((-2, -1)) / (off != 0).sum((-2, -1)).clamp(min=1)


def shrunk(blend: Tensor, options: GaussianOptions) -> Tensor:
    """S' of each B (classes, d, d)."""
    identity = torch.eye(blend.shape[-1], dtype=blend.dtype, device=blend.device)
    for _ in range(options.rounds):
        variance = options.variance * mean_variance(blend)[:, None, None]
        covariance = options.covariance * mean_covariance(blend)[:, None, None]
        blend = blend + variance * identity + covariance * (1 - identity)
    blend = blend + options.identity * identity
    if options.correlation:
        deviations = blend.diagonal(dim1=-2, dim2=-1).sqrt()
        blend = blend / (deviations[:, :, None] * deviations[:, None])
    return blend


def tukey(features: Tensor, power: float) -> Tensor:
    return features if power == 1 else features.sign() * features.abs().pow(power)


class Gaussian(ClassStatisticsClassifier):
    """One Gaussian per class, with a shrunk covariance. Keywords are the options of `GaussianOptions`."""

    name = "gaussian"
    summary = "one Gaussian per class with a shrunk covariance, computed from features when a task ends"
    options_class: ClassVar[type] = GaussianOptions
    plain_sums: Tensor  # (classes, d)

    def __init__(self, num_features: int, **options: Any) -> None:
        super().__init__(num_features, **options)
        if self.options.tukey != 1:  # as in FeCAM, a mean is the power of the mean, not the mean of powers
            self.register_buffer("plain_sums", torch.zeros(0, num_features, dtype=torch.float64))

    # The statistics are those of transformed features.

    def transformed(self, features: Tensor) -> Tensor:
        features = F.normalize(features, dim=1) if self.options.unit == "features" else features
        return tukey(features, self.options.tukey)

    def add_task(self, classes: int, seed: int = 0) -> None:
        super().add_task(classes, seed)
        self._resize_plain_sums()

    def update(self, features: Tensor, labels: Tensor) -> None:
        features, labels = self.checked(features, labels)
        features = features.double()
        if self.options.tukey != 1:
            unit = F.normalize(features, dim=1) if self.options.unit == "features" else features
            self.plain_sums += class_sums(unit, labels, self.classes)[0]
        super().update(self.transformed(features), labels)

    def merge(self, other: Classifier) -> None:
        super().merge(other)
        if self.options.tukey != 1:
            assert isinstance(other, Gaussian)
            self._resize_plain_sums()
            self.plain_sums[: other.classes] += other.plain_sums.to(self.plain_sums.device)

    def transport(
        self, matrix: Tensor | None = None, offset: Tensor | None = None, residual: Tensor | None = None
    ) -> None:
        if not self.options.plain:
            raise UserError(PLAIN)
        super().transport(matrix, offset, residual)

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        self.statistics.resize(len(state["statistics.counts"]))
        self._resize_plain_sums()
        return super().load_state_dict(state, strict, assign)

    def _resize_plain_sums(self) -> None:
        if self.options.tukey != 1:
            self.plain_sums = F.pad(self.plain_sums, (0, 0, 0, self.classes - len(self.plain_sums)))

    # Scores

    def means(self) -> Tensor:
        """(classes, d) in the space of distances."""
        if self.options.tukey == 1:
            means = self.statistics.means()
        else:
            means = tukey(self.plain_sums / self.statistics.counts.clamp(min=1)[:, None], self.options.tukey)
        return F.normalize(means, dim=1) if self.options.unit == "distance" else means

    def covariances(self, rows: slice = slice(None), within: Tensor | None = None) -> Tensor:
        """S' (classes, d, d); the identity if no class varies."""
        blend, errors = self.statistics.blended(self.options.own, self.options.pooled, rows, within)
        identity = torch.eye(self.num_features, dtype=blend.dtype, device=blend.device)
        constant = mean_variance(blend) <= 2 * errors
        blend.diagonal(dim1=-2, dim2=-1).add_(errors[:, None])
        return shrunk(torch.where(constant[:, None, None], identity, blend), self.options)

    def solve(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """A centre, the whitening matrix of each class, the whitened means, and what is added to each score. The
        centre is rounded first, so that its rounding is no error."""
        means, seen = self.means(), self.statistics.counts > 0
        centre = (means.sum(0) / seen.sum().clamp(min=1)).to(dtype)
        means = torch.where(seen[:, None], means - centre.double(), 0.0)
        d, device = self.num_features, means.device
        whiteners = torch.empty(self.classes, d, d, dtype=dtype, device=device)
        whitened = torch.empty(self.classes, d, dtype=dtype, device=device)
        biases = torch.zeros(self.classes, dtype=torch.float64, device=device)
        within, step = self.statistics.within(), max(1, AT_ONCE // d**2)
        for first in range(0, self.classes, step):
            rows = slice(first, first + step)
            matrices, log_det = whitening(self.covariances(rows, within))
            whiteners[rows] = matrices.to(dtype)
            whitened[rows] = (matrices @ means[rows, :, None])[:, :, 0].to(dtype)
            biases[rows] = -log_det / 2 if self.options.log_det else 0.0
        return centre, whiteners, whitened, biases.masked_fill(~seen, -torch.inf).to(dtype)

    def forward(self, features: Tensor) -> Tensor:
        """Minus infinity for a class without images."""
        features = self.transformed(features)
        features = F.normalize(features, dim=1) if self.options.unit == "distance" else features
        centre, whiteners, whitened, biases = self.solution(features.dtype)
        features = features - centre
        scores = []
        step = max(1, AT_ONCE // max(1, features.numel()))
        with float32_products(tf32=False):  # TF32 would round away small differences between distances
            for matrices, means in zip(whiteners.split(step), whitened.split(step), strict=True):
                places = (features @ matrices.flatten(0, 1).T).view(len(features), *means.shape)  # (b, classes, d)
                scores.append((places - means).square().sum(2))
        return biases - torch.cat(scores, dim=1) / 2


CLASSIFIERS.add(Gaussian.name, Gaussian)
