"""SDC (Yu et al., *Semantic Drift Compensation for Class-Incremental Learning*, CVPR 2020): class c moves by the mean
movement of the new images, weighted by a Gaussian kernel of their distance to its mean m_c:

    b_c = sum_i w_ci (y_i - x_i) / sum_i w_ci,  w_ci = exp(-|x_i - m_c|^2 / (2 s^2))

Acts on means. `sdc` has the s of the public code, `shift` chooses it: see `drift.py`.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mambacl.classifiers.drifts.base import Drift, Move, TaskEnd, WithPairs
from mambacl.options import Must, Options, finite_from

WIDTHS = [4.0**step for step in range(1, -6, -1)]  # s^2, as a share of the variance of the new images' features
ENOUGH = 4  # classes, to judge by some of them
FIXED_WIDTH = 0.25  # for tasks with fewer
PATIENCE = 2  # values in a row that are worse than the best, before the search ends

positive = Must("be finite and above 0", lambda value: 0 < value < math.inf)


def kernel_shift(old: Tensor, moved: Tensor, points: Tensor, variance: float, floor: float = 0.0) -> Tensor:
    """How far points (c, d) move: the mean of `moved` (n, d), weighted by a Gaussian kernel of the distance to `old`
    (n, d). Without a floor, weights are relative to the closest, so that far points move as well; `floor` is added to
    each."""
    exponents = -torch.cdist(points, old).square() / (2 * variance)
    weights = F.normalize(exponents.exp() + floor, p=1, dim=1) if floor else torch.softmax(exponents, dim=1)
    return weights @ moved


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


class Shift(Drift):
    name = "shift"

    def __init__(self, options: Any = None, end: TaskEnd | None = None) -> None:
        super().__init__(options, end)
        self.parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def update(self, old: Tensor, new: Tensor, labels: Tensor) -> None:
        self.parts.append((old.float(), (new - old).float(), labels))

    def move(self, means: Tensor, covariances: Tensor | None = None) -> Move:
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
        if width == math.inf:
            return Move()
        return Move(offset=kernel_shift(old, moved, means, width * unit), choice=width * unit)


@dataclass(frozen=True)
class SDCOptions(Options):
    """Options of the drift sdc."""

    sigma: Annotated[float, positive] = 0.3
    """the kernel's width s"""
    unit: bool = True
    """distances are between features and means of length 1, for which the public code's s is meant"""
    floor: Annotated[float, finite_from(0)] = 0.0
    """is added to each weight; 1e-5 in the code of ADC and LDC, which lets far classes follow the mean movement"""


class SDC(WithPairs):
    name = "sdc"
    options_class: ClassVar[type] = SDCOptions

    def move(self, means: Tensor, covariances: Tensor | None = None) -> Move:
        x, y = (features.double() for features in self.pairs())
        at, to = (F.normalize(x, dim=1), F.normalize(means, dim=1)) if self.options.unit else (x, means)
        return Move(offset=kernel_shift(at, y - x, to, self.options.sigma**2, self.options.floor))
