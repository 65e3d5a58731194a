"""How far two results of the same sum may be apart on any machine.

A processor adds the terms of a sum in an order of its own and may fuse a product into it, so that results differ between
machines by rounding. Rounding errors of a sum of n terms grow as the root of n (each is as often up as down), so the bound
is u * sqrt(n) * MARGIN of the largest value that is added, with the unit roundoff u of the type. No test compares a
float32 result of one machine with that of another more narrowly than this; where a recorded number allows it, our side is
computed in float64, and what is left is the recording's own rounding, which no machine changes.
"""

import torch
from torch import Tensor

MARGIN = 8  # largest of many errors, a handful of roundings beside the sum


def rounding(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """The relative error that a sum of `terms` products may have; for a chain of layers, the terms of all their sums."""
    return MARGIN * torch.finfo(dtype).eps / 2 * terms**0.5


def assert_near(actual: Tensor, expected: Tensor, terms: int, what: str = "", size: float | None = None) -> None:
    """The largest difference, against the rounding of a sum of `terms` values as large as the largest expected one.

    The coarser of both types counts. `size` is that of the largest value added, where sums cancel.
    """
    assert actual.shape == expected.shape, what
    dtype = max(actual.dtype, expected.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    size = expected.abs().max().item() if size is None else size
    difference = (actual.detach().double() - expected.detach().double()).abs().max().item()
    allowed = rounding(terms, dtype) * size
    assert difference <= allowed, f"{what}: off by {difference:.3g} of {allowed:.3g}"
