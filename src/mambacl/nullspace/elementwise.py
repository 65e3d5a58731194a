"""The exact protection of A, element by element, and its bounded relaxation.

Delta is positive and multiplies A element by element, so no direction of A is null: where delta was active,
exp(delta_t A) stays the same for old inputs only if A does. A `Box` says how far each value of A_log can move: not at
all where delta was active, or up to the relaxation's radius; freely where it was not. docs/exact.md derives the radius.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mambacl.nullspace.statistics import Accumulator

ACTIVE = 1e-7  # if delta sums to less over an image, float32 cannot tell the decay from 1
MARGIN = 0.25  # the bound holds for changes of A_log up to this size


class Activity(Accumulator):
    """`time` of each channel, (d,): the maximum over images of sum_t delta_t. For a relaxation also the sums over all
    tokens of k^2 (d, n), the sensitivity, and y^2 (d,), the scan's output."""

    largest = ("time",)

    def __init__(self, delta: str, scan: str, relaxed: bool) -> None:
        """`delta`, `scan`: the block's names for these features."""
        super().__init__([scan if relaxed else delta])
        self.relaxed = relaxed

    def contribution(self, feature: Any) -> dict[str, Tensor]:
        return activity_and_sensitivity(feature) if self.relaxed else activity(feature)


def activity(delta: Tensor) -> dict[str, Tensor]:
    return {"time": delta.double().sum(1).amax(0)}


def activity_and_sensitivity(scan: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    x, delta, A_log, B, C = (values.double() for values in scan)
    k, y = sensitivity(x, delta, A_log, B, C)
    return {"time": delta.sum(1).amax(0), "k": k, "y": y}


def sensitivity(
    x: Tensor, delta: Tensor, A_log: Tensor, B: Tensor, C: Tensor, margin: float = MARGIN
) -> tuple[Tensor, Tensor]:
    """Sums over images and tokens of k^2 (d, n) and y^2 (d,).

    k_{t,c,n} bounds the change of the scan's output: |y'_t,c - y_t,c| <= sum_n |dA_log_{c,n}| k_{t,c,n} whenever
    |dA_log| <= margin. x, delta (b, l, d); B, C (b, l, n); A_log (d, n).
    """
    a = A_log.exp()
    slow, most = a * math.exp(-margin), a * math.exp(margin)
    h = G = H = x.new_zeros(x.shape[0], *A_log.shape)  # (b, d, n)
    k_sum, y_sum = torch.zeros_like(A_log), torch.zeros_like(A_log[:, 0])
    for t in range(x.shape[1]):
        dt = delta[:, t, :, None]
        entering = dt * x[:, t, :, None] * B[:, t, None, :]
        decay = torch.exp(-slow * dt)
        G = decay * (G + dt * H)  # sum_s S exp(-slow S) |entering_s| with S = delta_{s+1} + ... + delta_t
        H = decay * H + entering.abs()
        h = torch.exp(-a * dt) * h + entering
        c = C[:, t, None, :]
        k_sum += (c.abs() * most * G).square().sum(0)
        y_sum += (c * h).sum(-1).square().sum(0)
    return k_sum, y_sum


@dataclass(frozen=True)
class Box:
    """The range of each value of A_log; infinite where it is free."""

    lower: Tensor
    upper: Tensor

    def within(self, other: "Box | None") -> "Box":
        """The intersection of both."""
        if other is None:
            return self
        return Box(torch.maximum(self.lower, other.lower), torch.minimum(self.upper, other.upper))

    def protects(self) -> Tensor:
        return torch.isfinite(self.lower)

    def to(self, device: torch.device) -> "Box":
        return Box(self.lower.to(device), self.upper.to(device))


def box(A_log: Tensor, totals: Mapping[str, Tensor], relax: float) -> Box:
    """The box of one task, from the totals of its `Activity`. Where delta was active, A_log is fixed, or moves so
    little that no channel of the scan's output changes by more than the share `relax` of its norm."""
    a, column = A_log.double().exp(), (slice(None),) + (None,) * (A_log.dim() - 1)
    radius = torch.zeros_like(a)
    if relax > 0:
        share = relax / A_log.shape[1]  # split evenly over the states
        bound = share * totals["y"][column].sqrt() / totals["k"].sqrt().clamp(min=torch.finfo(a.dtype).tiny)
        radius = bound.clamp(max=MARGIN)
    radius = torch.where(totals["time"][column] * a.clamp(min=1.0) > ACTIVE, radius, torch.inf)
    lower, upper = A_log.double() - radius, A_log.double() + radius
    return Box(_rounded(lower, A_log, torch.lt), _rounded(upper, A_log, torch.gt))


def _rounded(end: Tensor, A_log: Tensor, outside: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """An end of a box in the precision of A_log, rounded towards A_log."""
    near = end.to(A_log.dtype)
    return torch.where(outside(near.double(), end), torch.nextafter(near, A_log), near)
