"""How far two computations of the same result may be apart on any machine.

Processors add the terms of a sum in different orders, and some fuse a product into it, so results differ by rounding
between machines. The rounding errors of a sum of n terms are up as often as down and grow as the root of n. The bound
is MARGIN * u * sqrt(n), relative to the largest value that is added, with the unit roundoff u of the type.

Recorded float32 numbers are compared with ours in float64: what differs is then the recording's own rounding, which is
the same on every machine.
"""

import torch
from torch import Tensor

MARGIN = 8  # for the largest of many errors, and a few roundings beside the sum


def rounding(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """The relative error that a sum of `terms` products may have; in a chain of layers, the terms of all sums count."""
    return MARGIN * torch.finfo(dtype).eps / 2 * terms**0.5


def assert_near(actual: Tensor, expected: Tensor, terms: int, what: str = "", size: float | None = None) -> None:
    """The largest difference is within the rounding of a sum of `terms` values, each at most the largest expected one.

    The coarser of both types counts. Where sums cancel, `size` is the largest value added.
    """
    assert actual.shape == expected.shape, what
    dtype = max(actual.dtype, expected.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    size = expected.abs().max().item() if size is None else size
    difference = (actual.detach().double() - expected.detach().double()).abs().max().item()
    allowed = rounding(terms, dtype) * size
    assert difference <= allowed, f"{what}: off by {difference:.3g} of {allowed:.3g}"


def assert_counts_alike(counts: list[int], others: list[int]) -> None:
    """Correct predictions of each task, in batches of two sizes. Sums are rounded differently, so an image whose best
    logits are equal up to rounding may fall either way: one of hundreds at most."""
    assert len(counts) == len(others)
    assert max(abs(one - other) for one, other in zip(counts, others, strict=True)) <= 1, f"{counts}, {others}"
