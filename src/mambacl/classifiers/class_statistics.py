"""Sums of features per class, from which means, covariances and samples of class Gaussians follow.

The state is the number of images n, the sum of x and the sum of x x^T, in float64 and about zero. Sums can be added in
any order, merged, and mapped when the features move; a reference point would have to be agreed on beforehand.

Float64 makes up for the missing reference point. If features have mean m and spread s, rounding them to float32 changes
a variance by 2^-24 (m/s), relative to s^2, and the float64 sums by 2^-53 (m/s)^2. The second is smaller up to m/s =
2^29. `rounding` bounds the second, with a margin for many images and features. It is added to every variance, so that
no inverse is made of rounding errors; with 50,000 images of 384 features it is as large as s^2 at m/s = 10^5.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.classifiers.base import Classifier, StatisticsClassifier, check_batch
from mambacl.classifiers.drift import DriftOptions, FollowsDrift, transported
from mambacl.classifiers.sampling import draw, root
from mambacl.classifiers.subspaces import class_sums
from mambacl.errors import UserError
from mambacl.options import Must, build_config

Weight = float | Literal["auto"]
WEIGHT = Must("be auto, or finite and at least 0", lambda value: value == "auto" or 0 <= value < float("inf"))
MARGIN = 8  # over the typical rounding error of a sum, for the largest of many
PRIOR = 2  # the covariance within all classes counts as this many images per feature
SMALLEST = 1e-30  # a variance that keeps factors finite where every feature is zero


@dataclass(frozen=True)
class CovarianceOptions(DriftOptions):
    """How much a class's Gaussian takes from its own covariance and from that within all classes."""

    own: Annotated[Weight, WEIGHT] = "auto"
    """weight of the class's own covariance; auto: (n - 1) / (n - 1 + 2 d) for n images with d features"""
    pooled: Annotated[Weight, WEIGHT] = "auto"
    """weight of the covariance within all classes; auto: 2 d / (n - 1 + 2 d)"""


def symmetric(matrices: Tensor) -> Tensor:
    return (matrices + matrices.mT) / 2


def mean_variance(matrices: Tensor) -> Tensor:
    """The mean of the diagonal of each matrix."""
    return matrices.diagonal(dim1=-2, dim2=-1).mean(-1)


def whitening(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """W with W^T W = S^-1, and log det S, for symmetric matrices (c, d, d). Eigenvalues that are negative or zero to
    rounding are raised to the rounding of the largest."""
    factors, failed = torch.linalg.cholesky_ex(matrices)
    identity = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    whiteners = torch.linalg.solve_triangular(factors, identity, upper=False)
    log_det = 2 * factors.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    for row in failed.nonzero()[:, 0].tolist():
        values, vectors = torch.linalg.eigh(matrices[row])
        values = values.clamp(min=len(values) * torch.finfo(values.dtype).eps * float(values.abs().max()))
        whiteners[row], log_det[row] = (vectors / values.sqrt()).T, values.log().sum()
    return whiteners, log_det


class ClassStatistics(nn.Module):
    """With `covariance="class"`, second moments per class; with `"pooled"`, only their sum, which gives the covariance
    within all classes."""

    counts: Tensor  # (classes,)
    sums: Tensor  # (classes, d)
    moments: Tensor  # (classes, d, d), or (1, d, d) if pooled

    def __init__(self, num_features: int, covariance: Literal["class", "pooled"] = "class") -> None:
        super().__init__()
        self.num_features, self.per_class = num_features, covariance == "class"
        d = num_features
        self.register_buffer("counts", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("sums", torch.zeros(0, d, dtype=torch.float64))
        self.register_buffer("moments", torch.zeros(0 if self.per_class else 1, d, d, dtype=torch.float64))

    @property
    def classes(self) -> int:
        return len(self.counts)

    def resize(self, classes: int) -> None:
        """Adds classes without images, or removes the last ones."""
        more = classes - self.classes
        if more == 0:  # padding would copy everything
            return
        self.counts, self.sums = F.pad(self.counts, (0, more)), F.pad(self.sums, (0, 0, 0, more))
        if self.per_class:
            self.moments = F.pad(self.moments, (0, 0, 0, 0, 0, more))

    @torch.no_grad()
    def update(self, features: Tensor, labels: Tensor) -> None:
        """Adds a batch; new classes and more images of old ones alike."""
        check_batch(features, labels, self.num_features)
        if not len(labels):
            return
        features, labels = features.to(self.sums.device, torch.float64), labels.to(self.sums.device)
        if int(labels.max()) >= self.classes:
            self.resize(int(labels.max()) + 1)
        sums, _ = class_sums(features, labels, self.classes)
        counts = torch.bincount(labels, minlength=self.classes)
        self.sums += sums
        self.counts += counts
        if self.per_class:
            parts = features[labels.argsort(stable=True)].split(counts.tolist())
            for label, part in enumerate(parts):
                if len(part):
                    self.moments[label].addmm_(part.T, part)
        else:
            self.moments[0].addmm_(features.T, features)

    def merge(self, other: "ClassStatistics") -> None:
        """Adds what another one was updated with."""
        if other.num_features != self.num_features or other.per_class != self.per_class:
            raise UserError("Only class statistics with the same number of features and kind of covariance can merge.")
        device = self.sums.device
        self.resize(max(self.classes, other.classes))
        self.counts[: other.classes] += other.counts.to(device)
        self.sums[: other.classes] += other.sums.to(device)
        self.moments[: len(other.moments)] += other.moments.to(device)

    @torch.no_grad()
    def transport(
        self, matrix: Tensor | None = None, offset: Tensor | None = None, residual: Tensor | None = None
    ) -> None:
        """Follows features that moved from x to x A + b, up to a residual with covariance R: every mean becomes mu A +
        b and every covariance A^T S A + R. `matrix` is A (d, d), `offset` b (d,) or one per class (classes, d),
        `residual` R (d, d)."""
        d = self.num_features
        if matrix is None and offset is None and residual is None:  # nothing moves, not even by rounding
            return
        a = None if matrix is None else self._checked("matrix", matrix, (d, d))
        r = None if residual is None else self._checked("residual", residual, (d, d))
        b = torch.zeros(d) if offset is None else offset
        b = self._checked("offset", b, (self.classes, d) if b.dim() == 2 else (d,)).expand(self.classes, d)
        mapped, counts = self.sums if a is None else self.sums @ a, self.counts.double()
        for row in range(len(self.moments)):
            rows = slice(row, row + 1) if self.per_class else slice(None)
            moment = transported(self.moments[row], mapped[rows], counts[rows], b[rows], a)
            self.moments[row] = moment if r is None else moment + self.freedom()[rows].sum() * r
        self.sums = mapped + counts[:, None] * b

    @torch.no_grad()
    def set_covariances(self, covariances: Tensor) -> None:
        """Gives the classes these covariances (classes, d, d); means and counts stay. Pooled statistics get their
        mean, weighted by degrees of freedom."""
        c, d = self.classes, self.num_features
        scatter = self.freedom()[:, None, None] * symmetric(self._checked("covariance", covariances, (c, d, d)))
        if self.per_class:
            self.moments = scatter + self.sums[:, :, None] * self.means()[:, None]
        else:
            self.moments = (scatter.sum(0) + self.sums.T @ self.means())[None]

    def _checked(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        if tensor.shape != shape or not torch.isfinite(tensor).all():
            raise UserError(f"transport needs a finite {name} {shape}, got one of shape {tuple(tensor.shape)}.")
        return tensor.to(self.sums)

    # What follows from the sums

    def means(self) -> Tensor:
        """(classes, d); zeros for a class without images."""
        return self.sums / self.counts.clamp(min=1)[:, None]

    def freedom(self) -> Tensor:
        """Degrees of freedom of each class's covariance: its images less one."""
        return (self.counts - 1).clamp(min=0).double()

    def covariances(self, rows: slice = slice(None)) -> Tensor:
        """(classes, d, d) with divisor n - 1; zeros for a class with one image or none."""
        if not self.per_class:
            raise UserError("These statistics hold no covariance per class: build them with covariance='class'.")
        sums, means = self.sums[rows], self.means()[rows]
        scatter = self.moments[rows] - sums[:, :, None] * means[:, None]
        return symmetric(scatter) / self.freedom()[rows].clamp(min=1)[:, None, None]

    def within(self) -> Tensor:
        """(d, d): the covariance within all classes; its divisor is the number of images less the classes."""
        scatter = self.moments.sum(0) - self.sums.T @ self.means()
        return symmetric(scatter) / self.freedom().sum().clamp(min=1)

    def rounding(self) -> Tensor:
        """A bound of the rounding error in the eigenvalues of `within`, from the size of the sums."""
        size = self.moments.sum(0).trace() / self.freedom().sum().clamp(min=1)
        return (self._relative_rounding() * size).clamp(min=SMALLEST)

    def _relative_rounding(self) -> Tensor:
        return MARGIN * torch.finfo(torch.float64).eps / 2 * self.counts.sum().double().sqrt()

    def blended(
        self, own: Weight = "auto", pooled: Weight = "auto", rows: slice = slice(None), within: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(classes, d, d): own S_c + pooled S, with S_c the class's covariance and S that within all classes, and a
        bound (classes,) of the rounding error in their eigenvalues. A class with one image has no S_c: S stands in.
        `within` is S, if it is known."""
        freedom = self.freedom()[rows]
        auto = freedom / (freedom + PRIOR * self.num_features)
        of_own = auto if own == "auto" else torch.full_like(auto, own)
        of_pooled = 1 - auto if pooled == "auto" else torch.full_like(auto, pooled)
        none = freedom == 0
        of_own, of_pooled = of_own.masked_fill(none, 0), torch.where(none & (of_pooled == 0), 1.0, of_pooled)
        within = self.within() if within is None else within
        blend = of_own[:, None, None] * self.covariances(rows) + of_pooled[:, None, None] * within
        sizes = self.moments[rows].diagonal(dim1=-2, dim2=-1).sum(-1) / freedom.clamp(min=1)
        errors = of_own * self._relative_rounding() * sizes + of_pooled * self.rounding()
        return blend, errors.clamp(min=SMALLEST)

    def roots(self, own: Weight = "auto", pooled: Weight = "auto", ridge: float = 0.0) -> Tensor:
        """(classes, d, d): a root of each blended covariance, with `ridge` added to every variance."""
        blend, errors = self.blended(own, pooled)
        blend.diagonal(dim1=-2, dim2=-1).add_(errors[:, None] + ridge)
        return root(blend)

    @torch.no_grad()
    def sample(
        self, count: int, seed: int, own: Weight = "auto", pooled: Weight = "auto", ridge: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Features (classes * count, d) and labels: `count` samples from the Gaussian of each class with images."""
        seen = self.counts.nonzero()[:, 0]
        generator = torch.Generator().manual_seed(seed)
        features = draw(self.means()[seen], self.roots(own, pooled, ridge)[seen], count, generator)
        return features.flatten(0, 1), seen.repeat_interleave(count)


class FollowsWithStatistics(FollowsDrift):
    """A classifier that follows a drift with its `ClassStatistics`."""

    statistics: ClassStatistics
    follows_covariances = True

    def class_means(self) -> tuple[Tensor, Tensor]:
        return self.statistics.means(), self.statistics.counts

    def transport(
        self, matrix: Tensor | None = None, offset: Tensor | None = None, residual: Tensor | None = None
    ) -> None:
        self.statistics.transport(matrix, offset, residual)

    def class_covariances(self) -> Tensor:
        """Pooled statistics have the same for all classes."""
        statistics, d = self.statistics, self.num_features
        return (
            statistics.covariances() if statistics.per_class else statistics.within().expand(statistics.classes, d, d)
        )

    def set_covariances(self, covariances: Tensor) -> None:
        self.statistics.set_covariances(covariances)


class ClassStatisticsClassifier(FollowsWithStatistics, StatisticsClassifier):
    """A classifier whose state is `ClassStatistics`. A subclass writes `solve`, whose result is kept until the
    statistics change, and `forward`."""

    covariance: Literal["class", "pooled"] = "class"

    def __init__(self, num_features: int, **options: Any) -> None:
        super().__init__(num_features)
        self.options = build_config(self.options_class, options, self.name)
        self.statistics = ClassStatistics(num_features, self.covariance)
        self._solved: dict[Any, tuple[Tensor, ...]] = {}
        self.prepare_drift()

    def solve(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The tensors that `forward` needs, on the statistics' device."""
        raise NotImplementedError

    def solution(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        key = self.statistics.sums.device, dtype
        if key not in self._solved:
            with torch.no_grad(), torch.inference_mode(False):
                self._solved = {key: self.solve(dtype)}
        return self._solved[key]

    @property
    def classes(self) -> int:
        return self.statistics.classes

    def add_task(self, classes: int, seed: int = 0) -> None:
        self.statistics.resize(self.classes + classes)
        self._solved.clear()

    def update(self, features: Tensor, labels: Tensor) -> None:
        features, labels = self.checked(features, labels)
        self.statistics.update(features, labels)
        self._solved.clear()

    def merge(self, other: Classifier) -> None:
        if type(other) is not type(self) or other.num_features != self.num_features or other.options != self.options:
            raise UserError(f"Only another classifier '{self.name}' with the same features and options can be merged.")
        self.statistics.merge(other.statistics)
        self._solved.clear()

    def transport(
        self, matrix: Tensor | None = None, offset: Tensor | None = None, residual: Tensor | None = None
    ) -> None:
        super().transport(matrix, offset, residual)
        self._solved.clear()

    def set_covariances(self, covariances: Tensor) -> None:
        super().set_covariances(covariances)
        self._solved.clear()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Changes the number of classes to that of the state."""
        self.statistics.resize(len(state["statistics.counts"]))
        self._solved.clear()
        return super().load_state_dict(state, strict, assign)
