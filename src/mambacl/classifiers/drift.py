"""Corrects the statistics of old classes when training moves the features.

The images of old classes are gone. The new task's images are there, and have features x under the weights from before
the task and y under those after it. What happens to them, y - x, says where old classes have gone:

    shift    class c moves by b_c = sum_i w_ci (y_i - x_i) / sum_i w_ci,  w_ci = exp(-|x_i - m_c|^2 / (2 s^2)), where
             m_c is its mean: SDC (Yu et al., CVPR 2020)
    linear   y - x = x W + b, by ridge regression: a mean m becomes m (I + W) + b, a covariance S becomes
             (I + W)^T S (I + W) + R, where R is the covariance of what the map leaves over

The ridge acts on W and b, so directions in which new images do not vary stay where they are. Ridge and s are chosen by
leaving out classes of the new task and predicting how far their means move, which is the question that old classes ask.
If no choice predicts it better than "not at all", nothing changes. Tasks with fewer than ENOUGH classes get fixed
values: training pulls two classes apart, so that neither says how the other moves.

x and y are what a classifier has sums of: features, or lifted features for the ridge classifier. Lifted, the map is the
conditional mean embedding of the new features given the old ones.

Memory in bytes, while a task ends, for d features or units: up to 120 d^2 with `linear`, of which 40 d^2 are sums;
up to 32 n d for n images with `shift`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mambacl.classifiers.base import check_batch
from mambacl.ops.precision import full_precision
from mambacl.options import Options

RIDGES = [10.0**step for step in range(1, -14, -1)]  # times the mean diagonal of the matrix to invert
WIDTHS = [4.0**step for step in range(1, -6, -1)]  # s^2, as a share of the variance of the new images' features
ENOUGH = 4  # classes, to judge by some of them
FIXED_RIDGE, FIXED_WIDTH = 0.1, 0.25  # for tasks with fewer
PATIENCE = 2  # values in a row that are worse than the best, before the search ends


@dataclass(frozen=True)
class DriftOptions(Options):
    """What becomes of old classes when training moves the features."""

    drift: Literal["none", "shift", "linear"] = "none"
    """how statistics of old classes follow when training moves the features: not at all, by a shift per class (SDC), or
    by a linear map; both are fitted to the new task's images"""


@dataclass(frozen=True)
class Move:
    """Features x of class c have become x A + b_c, up to a residual with covariance R."""

    matrix: Tensor | None = None  # A (d, d); None: the identity
    offset: Tensor | None = None  # b (d,), or (classes, d)
    residual: Tensor | None = None  # R (d, d)
    choice: float = math.inf
    """the ridge or s^2, in units of the data; infinite if nothing moves"""


# Mathematics


def kernel_shift(old: Tensor, moved: Tensor, points: Tensor, variance: float) -> Tensor:
    """How far points (c, d) move: the mean of `moved` (n, d), weighted by a Gaussian kernel of the distance to `old`
    (n, d). Weights are relative to the closest, so that far points move as well."""
    distances = torch.cdist(points, old).square()
    return torch.softmax(-distances / (2 * variance), dim=1) @ moved


def regularised(gram: Tensor, ridge: float) -> Tensor | None:
    """The Cholesky factor of `gram` plus a ridge; None if rounding has made it indefinite."""
    lower, failed = torch.linalg.cholesky_ex(gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device))
    return None if failed else lower


def transported(moment: Tensor, sums: Tensor, counts: Tensor, offset: Tensor, matrix: Tensor | None = None) -> Tensor:
    """The sum of (x A + b_c) (x A + b_c)^T over images of some classes, from the sum of x x^T. `sums` are those of x A
    per class (classes, d), `offset` is b (classes, d)."""
    mapped = moment if matrix is None else matrix.T @ moment @ matrix
    cross = sums.T @ offset
    return mapped + cross + cross.T + offset.T @ (counts[:, None] * offset)


def best(values: Iterable[float], error: Callable[[float], float], none: float) -> float:
    """The value with the smallest error; infinite if none is below `none`. Ends after a few that are worse."""
    chosen, least, worse = math.inf, none, 0
    for value in values:
        found = error(value)
        if found < least:
            chosen, least, worse = value, found, 0
        elif chosen < math.inf:
            worse += 1
            if worse == PATIENCE:
                break
    return chosen


# Fits


class Drift(ABC):
    """Fitted to the new task's images, in any order and division into batches."""

    @abstractmethod
    def update(self, old: Tensor, new: Tensor, labels: Tensor) -> None:
        """Adds images: their features (b, d) before and after the task, in float64."""

    @abstractmethod
    def move(self, means: Tensor) -> Move:
        """What happened to old classes with these means (classes, d)."""


class Shift(Drift):
    def __init__(self) -> None:
        self.parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def update(self, old: Tensor, new: Tensor, labels: Tensor) -> None:
        self.parts.append((old.float(), (new - old).float(), labels))

    def move(self, means: Tensor) -> Move:
        if not self.parts:
            return Move()
        old, moved, labels = (torch.cat(tensors) for tensors in zip(*self.parts, strict=True))
        old, moved = old.double(), moved.double()
        unit = float((old - old.mean(0)).square().sum(1).mean()) or 1.0
        groups = [labels == label for label in labels.unique()]

        def error(width: float) -> float:
            """Of the predicted means' moves, each from the images of other classes."""
            total = 0.0
            for own in groups:
                expected = kernel_shift(old[~own], moved[~own], old[own].mean(0, keepdim=True), width * unit)
                total += float((moved[own].mean(0) - expected[0]).square().sum()) * int(own.sum())
            return total

        none = sum(float(moved[own].mean(0).square().sum()) * int(own.sum()) for own in groups)
        width = best(WIDTHS, error, none) if len(groups) >= ENOUGH else FIXED_WIDTH
        if width == math.inf or not moved.any():
            return Move()
        return Move(offset=kernel_shift(old, moved, means, width * unit), choice=width * unit)


class Linear(Drift):
    """Holds sums only: of x x^T and x (y - x)^T over each half of the classes, of (y - x) (y - x)^T, and of x and y - x
    per class."""

    def __init__(self) -> None:
        self.grams: Tensor | None = None  # (2, d, d)

    def update(self, old: Tensor, new: Tensor, labels: Tensor) -> None:
        moved, d = new - old, old.shape[1]
        if self.grams is None:
            self.grams, self.crosses = old.new_zeros(2, d, d), old.new_zeros(2, d, d)
            self.noise = old.new_zeros(d, d)
            self.sums, self.moved = old.new_zeros(0, d), old.new_zeros(0, d)
            self.counts = labels.new_zeros(0)
        more = max(0, int(labels.max()) + 1 - len(self.counts))
        rows = (0, 0, 0, more)
        self.sums, self.moved = F.pad(self.sums, rows), F.pad(self.moved, rows)
        self.counts = F.pad(self.counts, (0, more))
        members = F.one_hot(labels, len(self.counts)).T.to(old)
        self.sums += members @ old
        self.moved += members @ moved
        self.counts += torch.bincount(labels, minlength=len(self.counts))
        self.noise.addmm_(moved.T, moved)
        for half in range(2):
            x, m = old[labels % 2 == half], moved[labels % 2 == half]
            self.grams[half].addmm_(x.T, x)
            self.crosses[half].addmm_(x.T, m)

    def move(self, means: Tensor) -> Move:
        if self.grams is None:
            return Move()
        ridge = self._choice()
        if ridge == math.inf or not self.noise.any():
            return Move()
        x, y, n = self.sums.sum(0), self.moved.sum(0), int(self.counts.sum())
        scale = self._constant()
        gram, cross = self._with_constant(self.grams.sum(0), x, n, scale), self.crosses.sum(0)
        cross = torch.cat([cross, scale * y[None]])
        ridge *= float(gram.diagonal().mean())
        lower = regularised(gram, ridge)
        if lower is None:
            return Move()
        fitted = torch.cholesky_solve(cross, lower)  # W, and b / scale
        product = fitted.T @ cross
        left = (y - torch.cat([x, x.new_tensor([scale * n])]) @ fitted) / n
        residual = (self.noise - product - product.T + fitted.T @ (gram @ fitted)) / n - torch.outer(left, left)
        matrix = fitted[:-1] + torch.eye(len(x), dtype=x.dtype, device=x.device)
        return Move(matrix, scale * fitted[-1], (residual + residual.T) / 2, ridge)

    def _constant(self) -> float:
        """The value of the constant beside the features: as large as a typical one."""
        assert self.grams is not None
        return float(self.grams.sum(0).diagonal().mean() / self.counts.sum()) ** 0.5 or 1.0

    def _with_constant(self, gram: Tensor, sums: Tensor, count: int, scale: float) -> Tensor:
        wider = F.pad(gram, (0, 1, 0, 1))
        wider[-1, :-1] = wider[:-1, -1] = scale * sums
        wider[-1, -1] = scale**2 * count
        return wider

    def _choice(self) -> float:
        """The ridge, relative to the mean diagonal, whose map from one half of the classes best predicts how the means
        of the other half move."""
        assert self.grams is not None
        halves, scale = torch.arange(len(self.counts), device=self.counts.device) % 2, self._constant()
        seen = self.counts > 0
        if min(int((seen & (halves == half)).sum()) for half in range(2)) < ENOUGH // 2:
            return FIXED_RIDGE
        fits = []
        for half in range(2):
            own, other = halves == half, seen & (halves != half)
            n = int(self.counts[own].sum())
            gram = self._with_constant(self.grams[half], self.sums[own].sum(0), n, scale)
            cross = torch.cat([self.crosses[half], scale * self.moved[own].sum(0)[None]])
            weights = self.counts[other].double()[:, None]
            means = F.pad(self.sums[other] / weights, (0, 1), value=scale)
            fits.append((gram, float(gram.diagonal().mean()), cross, means, self.moved[other] / weights, weights))

        def error(ridge: float) -> float:
            total = 0.0
            for gram, unit, cross, means, moves, weights in fits:
                lower = regularised(gram, ridge * unit)
                if lower is None:
                    return math.inf
                expected = torch.cholesky_solve(means.T, lower).T @ cross
                total += float((weights * (moves - expected).square()).sum())
            return total

        none = sum(float((weights * moves.square()).sum()) for _, _, _, _, moves, weights in fits)
        return best(RIDGES, error, none)


FITS: dict[str, type[Drift]] = {"shift": Shift, "linear": Linear}


class FollowsDrift(ABC):
    """A classifier whose statistics can follow the features; its options include `DriftOptions`."""

    options: Any
    num_features: int

    def drift_features(self, features: Tensor) -> Tensor:
        """What the statistics are sums of: (b, d) -> (b, d or units)."""
        return features

    @abstractmethod
    def class_means(self) -> tuple[Tensor, Tensor]:
        """The means of what the statistics are sums of, (classes, d or units), and the number of images per class."""

    @abstractmethod
    def transport(
        self, matrix: Tensor | None = None, offset: Tensor | None = None, residual: Tensor | None = None
    ) -> None:
        """Follows features that moved from x to x A + b, up to a residual with covariance R: see `Move`."""

    @torch.no_grad()
    def follow(self, pairs: Iterable[tuple[Tensor, Tensor, Tensor]]) -> Move:
        """Corrects the statistics before a task's images are added to them. `pairs`: the images' features (b, d) before
        the task trained and after it, and their labels, in batches. They are read only if there is something to do."""
        means, counts = self.class_means()
        if self.options.drift == "none" or not int(counts.sum()):
            return Move()
        fit = FITS[self.options.drift]()
        for old, new, labels in pairs:
            for features in (old, new):
                check_batch(features, labels, self.num_features)
            if len(labels):
                with full_precision(means):
                    x, y = (self.drift_features(features.to(means.device)).double() for features in (old, new))
                    fit.update(x, y, labels.to(means.device))
        with full_precision(means):
            found = fit.move(means)
            self.transport(found.matrix, found.offset, found.residual)
        return found
