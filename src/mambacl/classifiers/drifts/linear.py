"""A linear map from sums, whose ridge is chosen on new classes that were left out: y - x = x W + b. Acts on means and
covariances; see `drift.py`."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mambacl.classifiers.drifts.base import Drift, Move, TaskEnd
from mambacl.classifiers.drifts.shift import ENOUGH, best

RIDGES = [10.0**step for step in range(1, -14, -1)]  # times the mean diagonal of the matrix to invert
FIXED_RIDGE = 0.1  # for tasks with fewer than ENOUGH classes


def regularised(gram: Tensor, ridge: float) -> Tensor | None:
    """The Cholesky factor of `gram` plus a ridge; None if rounding has made it indefinite."""
    lower, failed = torch.linalg.cholesky_ex(gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device))
    return None if failed else lower


class Linear(Drift):
    """Holds sums only: of x x^T and x (y - x)^T over each half of the classes, of (y - x) (y - x)^T, and of x and y - x
    per class."""

    name = "linear"

    def __init__(self, options: Any = None, end: TaskEnd | None = None) -> None:
        super().__init__(options, end)
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

    def move(self, means: Tensor, covariances: Tensor | None = None) -> Move:
        assert self.grams is not None
        ridge = self._choice()
        if ridge == math.inf:
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
        return Move(matrix, scale * fitted[-1], (residual + residual.T) / 2, choice=ridge)

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
