"""Linear discriminant analysis: Gaussians with different means and one shrunk covariance. Scores are linear in the
feature."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from mambacl.classifiers.class_statistics import ClassStatisticsClassifier, mean_variance
from mambacl.classifiers.drift import DriftOptions
from mambacl.classifiers.left_out import without_own
from mambacl.classifiers.registry import CLASSIFIERS
from mambacl.options import Must


def oas(covariance: Tensor, freedom: Tensor | float) -> Tensor:
    """The share of the identity in a covariance (d, d) with this many degrees of freedom: the oracle approximating
    shrinkage of Chen, Wiesel, Eldar and Hero (2010), eq. 23. It needs nothing but the covariance; Ledoit and Wolf's
    rule needs fourth moments, which the sums do not hold."""
    d = len(covariance)
    square, trace = covariance.square().sum(), covariance.trace()  # tr(S S), tr(S)
    above = (1 - 2 / d) * square + trace.square()
    below = (freedom + 1 - 2 / d) * (square - trace.square() / d)
    return torch.where(below > above, above / below, 1.0)


@dataclass(frozen=True)
class LDAOptions(DriftOptions):
    """Options of linear discriminant analysis."""

    shrinkage: Annotated[
        float | Literal["auto"],
        Must("be auto, or at least 0 and at most 1", lambda value: value == "auto" or 0 <= value <= 1),
    ] = "auto"
    """a in S = (1 - a) S_within + a T; auto: the oracle approximating shrinkage (OAS)"""
    target: Literal["variance", "identity"] = "variance"
    """T: the identity times the mean variance, or the identity itself, as in the code of LR-RGDA (there a = 0.3)"""
    balanced: bool = True
    """every class is equally likely; false: in proportion to its images"""


class LDA(ClassStatisticsClassifier):
    """Linear discriminant analysis with a shrunk covariance. Keywords are the options of `LDAOptions`, e.g.
    `shrinkage=0.1`."""

    name = "lda"
    summary = "linear discriminant analysis with a shrunk covariance, computed from features when a task ends"
    options_class: ClassVar[type] = LDAOptions
    covariance = "pooled"

    def shrunk(self) -> Tensor:
        """S (d, d); the identity if no class varies, which makes this the nearest class mean."""
        return self._shrunk()[0]

    def _shrunk(self, fewer: int = 0) -> tuple[Tensor, Tensor]:
        """S and 1 - a, or 0 if S is the identity. `fewer`: divide the sums by this many degrees of freedom less."""
        within, freedom, error = self.statistics.within(), self.statistics.freedom().sum(), self.statistics.rounding()
        identity = torch.eye(len(within), dtype=within.dtype, device=within.device)
        variance = mean_variance(within)
        a = oas(within, freedom) if self.options.shrinkage == "auto" else within.new_tensor(self.options.shrinkage)
        target = variance * identity if self.options.target == "variance" else identity
        within = within * (freedom / (freedom - fewer).clamp(min=1))
        varies = variance > 2 * error
        matrix = torch.where(varies, (1 - a) * within + a * target + error * identity, identity)
        return matrix, torch.where(varies, 1 - a, 0.0)

    def solve(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The centre of the means, weights and biases. Relative to the centre, scores stay small and exact even if
        features are far from zero."""
        counts, means = self.statistics.counts, self.statistics.means()
        seen = counts > 0
        centre = means.sum(0) / seen.sum().clamp(min=1)
        means = torch.where(seen[:, None], means - centre, 0.0)
        weights = torch.cholesky_solve(means.T, torch.linalg.cholesky(self.shrunk())).T  # (classes, d)
        biases = -(weights * means).sum(1) / 2
        if not self.options.balanced:
            biases = biases + (counts.double() / counts.sum().clamp(min=1)).log()
        return centre, weights, biases.masked_fill(~seen, -torch.inf)

    def forward(self, features: Tensor) -> Tensor:
        """Log-probabilities up to a term that all classes share; minus infinity for a class without images. Computed
        in float64, which costs little beside a backbone."""
        centre, weights, biases = self.solution(torch.float64)
        return torch.addmm(biases, features.double() - centre, weights.T).to(features.dtype)

    @torch.no_grad()
    def left_out(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Without an image, the mean of its class changes, and S loses as many directions D as the image has views:

            S' = S - D^T K D,  K = (1 - a) / f (I + 1 1^T / (n - views)),  D = the views less the mean of their class

        for f degrees of freedom without it and n views of the class, so that S'^-1 follows from S^-1. The shrinkage a
        and the mean variance stay as they are. Without its class, the scores of the others are the same.
        """
        counts, means = self.statistics.counts, self.statistics.means()
        x, labels, views = features.to(means), labels.to(means.device), features.shape[1]
        centre = means[counts > 0].mean(0)
        means, x = means - centre, x - centre
        matrix, share = self._shrunk(fewer=views)
        lower, left = torch.linalg.cholesky(matrix), (counts[labels] - views).clamp(min=1)

        def solved(rows: Tensor) -> Tensor:
            return torch.cholesky_solve(rows.flatten(0, -2).T, lower).T.view(rows.shape)

        deviations = x - means[labels][:, None]  # D (n, views, d)
        directions = solved(deviations)
        identity, freedom = torch.eye(views).to(x), (self.statistics.freedom().sum() - views).clamp(min=1)
        inner = share / freedom * (identity + 1 / left[:, None, None])  # K (n, views, views)
        # S'^-1 = S^-1 + directions^T core directions
        core = inner @ torch.linalg.inv(identity - deviations @ directions.mT @ inner)

        def scores(of: Tensor) -> Tensor:
            """(n, views, k) for means (k, d) or (n, k, d)"""
            weights, along = solved(of), of @ directions.mT
            plain = x @ weights.mT - (weights * of).sum(-1)[..., None, :] / 2
            return plain + x @ directions.mT @ core @ along.mT - ((along @ core) * along).sum(-1)[:, None] / 2

        own = means[labels] - deviations.sum(1) / left[:, None]
        columns = labels[:, None, None].expand(-1, views, 1)
        known = scores(means).scatter(2, columns, scores(own[:, None])).masked_fill(counts == 0, -torch.inf)
        if not self.options.balanced:
            known = known + counts.double().clamp(min=1).log()
            fewer = (left.double() / counts[labels]).log()
            known = known.scatter_add(2, columns, fewer[:, None, None].expand(columns.shape))
        return known, without_own(known, labels)


CLASSIFIERS.add(LDA.name, LDA)
