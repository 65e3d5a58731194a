"""Optimal transport between the units of two layers: which unit of one corresponds to which of the other.

The plan is that of entropic regularisation, by Sinkhorn's iterations. It needs no solver for linear programs, which
takes too long for thousands of units.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def plan(cost: Tensor, source: Tensor, target: Tensor, entropy: float = 0.01, iterations: int = 500) -> Tensor:
    """(n, m), non-negative: the cheapest way, up to the entropy, to move weights `source` (n,) to `target` (m,), both
    positive with sum 1. Its column sums are `target`; its row sums are `source` up to what the iterations leave."""
    logits, rows = -cost / entropy, source.log()
    columns, f = target.log(), torch.zeros_like(source)
    for _ in range(iterations):
        g = columns - (logits + f[:, None]).logsumexp(0)
        f, before = rows - (logits + g).logsumexp(1), f
        if (f - before).abs().max() < 1e-6:
            break
    g = columns - (logits + f[:, None]).logsumexp(0)
    return (logits + f[:, None] + g).exp()


def alignment(new: Tensor, reference: Tensor) -> Tensor:
    """T (n, n) with columns that sum to 1: T^T new (n, c) has the rows of `new` in the order of `reference`'s.

    Costs are squared distances between rows of length 1; a row's weight is its share of the sum of magnitudes.
    """
    cost = torch.cdist(F.normalize(new, dim=1), F.normalize(reference, dim=1)).square()
    source, target = (rows.abs().sum(1).clamp(min=1e-12) for rows in (new, reference))
    moved = plan(cost, source / source.sum(), target / target.sum())
    return moved / moved.sum(0)
