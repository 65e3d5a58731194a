"""The exact protection of A, element by element, and its bounded relaxation.

exp(delta_t A) for old inputs stays the same only if A does, wherever delta was active: delta is positive and multiplies
A element by element, so there is no direction to project onto. A `Box` says how far each value of A_log may move:
nowhere where delta was active; by the relaxation's radius if one is wanted; freely where delta was not. The bound
behind the radius is derived in docs/exact.md.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mambacl.nullspace.statistics import Accumulator

ACTIVE = 1e-7  # float32 cannot tell a channel whose delta adds up to less over an image from one that stands still
MARGIN = 0.25  # the bound holds for changes of A_log up to this


class Activity(Accumulator):
    """The longest time of each channel, (d,): max over images of sum_t delta_t; and, for a relaxation, sums of squares
    over all tokens of the sensitivity k (d, n) and of the scan's output y (d,)."""

    largest = ("time",)

    def __init__(self, delta: str, scan: str, relaxed: bool) -> None:
        """`delta`, `scan`: the block's names for them."""
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
    """Where each value of A_log may be; both ends infinite where it is free."""

    lower: Tensor
    upper: Tensor

    def within(self, other: "Box | None") -> "Box":
        """What both allow."""
        if other is None:
            return self
        return Box(torch.maximum(self.lower, other.lower), torch.minimum(self.upper, other.upper))

    def protects(self) -> Tensor:
        return torch.isfinite(self.lower)

    def to(self, device: torch.device) -> "Box":
        return Box(self.lower.to(device), self.upper.to(device))


def box(A_log: Tensor, totals: Mapping[str, Tensor], relax: float) -> Box:
    """The box of one task, from the totals of its `Activity`: where delta was active, A_log stays, or moves so little
    that no channel of the scan's output can change by more than the share `relax` of its norm."""
    a, column = A_log.double().exp(), (slice(None),) + (None,) * (A_log.dim() - 1)
    radius = torch.zeros_like(a)
    if relax > 0:
        share = relax / A_log.shape[1]  # each state may cause as much
        bound = share * totals["y"][column].sqrt() / totals["k"].sqrt().clamp(min=torch.finfo(a.dtype).tiny)
        radius = bound.clamp(max=MARGIN)
    radius = torch.where(totals["time"][column] * a.clamp(min=1.0) > ACTIVE, radius, torch.inf)
    lower, upper = A_log.double() - radius, A_log.double() + radius
    return Box(_rounded(lower, A_log, torch.lt), _rounded(upper, A_log, torch.gt))


def _rounded(end: Tensor, A_log: Tensor, outside: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """An end of a box in the precision of A_log, rounded towards A_log."""
    near = end.to(A_log.dtype)
    return torch.where(outside(near.double(), end), torch.nextafter(near, A_log), near)
