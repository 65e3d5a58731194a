"""Corrects the statistics of old classes when training moves the features.

The images of old classes are gone. The new task's images are there, and have features x under the weights from before
the task and y under those after it. What happens to them, y - x, says where old classes have gone. Two kinds choose
their own settings:

    shift    class c moves by b_c = sum_i w_ci (y_i - x_i) / sum_i w_ci,  w_ci = exp(-|x_i - m_c|^2 / (2 s^2)), where
             m_c is its mean: SDC (Yu et al., CVPR 2020)
    linear   y - x = x W + b, by ridge regression: a mean m becomes m (I + W) + b, a covariance S becomes
             (I + W)^T S (I + W) + R, where R is the covariance of what the map leaves over

The ridge acts on W and b, so directions in which new images do not vary stay where they are. Ridge and s are chosen by
leaving out classes of the new task and predicting how far their means move, which is the question that old classes ask.
If no choice predicts it better than "not at all", nothing changes. Tasks with fewer than ENOUGH classes get fixed
values: training pulls two classes apart, so that neither says how the other moves.

The others are published systems with the settings of their public code, one file each in `drifts/`: `sdc`, `ldc`, `adc`
and `efc` move means, `adagauss`, `dpcr`, `sldc-linear` and `sldc` means and covariances.

x and y are what a classifier has sums of: features, or lifted features for the ridge classifier. Lifted, a linear map
is the conditional mean embedding of the new features given the old ones. If no feature has moved, nothing changes.

Memory in bytes, while a task ends, for d features or units: up to 120 d^2 with `linear`, of which 40 d^2 are sums;
up to 32 n d for n images with `shift` and the kinds that train a map.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from mambacl.classifiers.base import check_batch
from mambacl.classifiers.drifts import KINDS
from mambacl.classifiers.drifts.base import Drift, Move, TaskEnd
from mambacl.errors import UserError
from mambacl.ops.precision import full_precision
from mambacl.options import Options, build_config


@dataclass(frozen=True)
class DriftOptions(Options):
    """What becomes of old classes when training moves the features."""

    drift: Literal["none", "shift", "linear", "sdc", "ldc", "adc", "efc", "adagauss", "dpcr", "sldc-linear", "sldc"] = (
        "none"
    )
    """how statistics of old classes follow when training moves the features: not at all, by a shift per class, by a
    linear map, or as a published system does it; fitted to the new task's images"""
    drift_options: dict[str, Any] = field(default_factory=dict)
    """options of this kind, where they differ from the public code's"""

    def check(self) -> None:
        if self.drift != "none":
            build_config(KINDS[self.drift].options_class, self.drift_options, f"drift {self.drift}")
        elif self.drift_options:
            raise UserError("drift_options belong to a kind of drift: set drift as well, or leave them out.")


def transported(moment: Tensor, sums: Tensor, counts: Tensor, offset: Tensor, matrix: Tensor | None = None) -> Tensor:
    """The sum of (x A + b_c) (x A + b_c)^T over images of some classes, from the sum of x x^T. `sums` are those of x A
    per class (classes, d), `offset` is b (classes, d)."""
    mapped = moment if matrix is None else matrix.T @ moment @ matrix
    cross = sums.T @ offset
    return mapped + cross + cross.T + offset.T @ (counts[:, None] * offset)


class FollowsDrift(ABC):
    """A classifier whose statistics can follow the features; its options include `DriftOptions`. It calls
    `prepare_drift` when it is built."""

    name: ClassVar[str]
    options: Any
    num_features: int
    drift_matrix: Tensor  # (d, d): what a kind keeps from one task to the next; zeros before the first
    follows_covariances: ClassVar[bool] = False
    """whether it holds covariances: `class_covariances` and `set_covariances`"""
    follows_features: ClassVar[bool] = True
    """whether the statistics are of the features themselves, not of lifted ones"""

    def prepare_drift(self) -> None:
        """Refuses a kind that this classifier cannot follow, and makes room for what a kind keeps between tasks."""
        kind = KINDS.get(self.options.drift)
        if kind is None:
            return
        if not self.can_follow(kind):
            what = "covariances of classes" if kind.needs_covariances else "statistics of the features themselves"
            able = ", ".join(name for name, other in KINDS.items() if self.can_follow(other))
            raise UserError(
                f"The drift {kind.name} needs {what}, which {self.name} does not have: choose gaussian, lda or aligned "
                f"as classifier, or one of the drifts {able}."
            )
        if kind.keeps_matrix:
            d = self.num_features
            self.register_buffer("drift_matrix", torch.zeros(d, d, dtype=torch.float64))  # type: ignore[attr-defined]

    def can_follow(self, kind: type[Drift]) -> bool:
        has = self.follows_covariances, self.follows_features
        return has[0] >= kind.needs_covariances and has[1] >= kind.needs_features

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

    def class_covariances(self) -> Tensor:
        """(classes, d, d), with `follows_covariances`."""
        raise NotImplementedError

    def set_covariances(self, covariances: Tensor) -> None:
        """Replaces them, with `follows_covariances`; the means stay."""
        raise NotImplementedError

    @torch.no_grad()
    def follow(self, pairs: Iterable[tuple[Tensor, Tensor, Tensor]], end: TaskEnd | None = None) -> Move:
        """Corrects the statistics before a task's images are added to them. `pairs`: the images' features (b, d) before
        the task trained and after it, and their labels, in batches. They are read only if there is something to do.
        `end` is what some kinds need beside them."""
        means, counts = self.class_means()
        seen, kind = counts > 0, KINDS.get(self.options.drift)
        if kind is None or not (kind.keeps_matrix or seen.any()):
            return Move()
        fit, moved, some = kind(self.options.drift_options, end), False, False
        for old, new, labels in pairs:
            for features in (old, new):
                check_batch(features, labels, self.num_features)
            if len(labels):
                with full_precision(means):
                    x, y = (self.drift_features(features.to(means.device)).double() for features in (old, new))
                    fit.update(x, y, labels.to(means.device))
                    moved, some = moved or not torch.equal(x, y), True
        moved = moved and bool(seen.any())
        if not some or not (moved or kind.keeps_matrix):
            return Move()
        with full_precision(means):
            if kind.keeps_matrix and self.drift_matrix.any():
                fit.matrix = self.drift_matrix
            found = fit.move(means[seen], self.class_covariances()[seen] if kind.needs_covariances else None)
            if kind.keeps_matrix:
                assert fit.matrix is not None
                self.drift_matrix = fit.matrix
            if not moved:
                return Move()
            self._take(found, means, seen)
        return found

    def _take(self, found: Move, means: Tensor, seen: Tensor) -> None:
        offset = found.offset
        if offset is not None and offset.dim() == 2:  # of the classes seen
            offset = torch.zeros_like(means).masked_scatter(seen[:, None], offset)
        self.transport(found.matrix, offset, found.residual)
        if found.covariances is not None:
            covariances = self.class_covariances().clone()
            covariances[seen] = found.covariances
            self.set_covariances(covariances)
