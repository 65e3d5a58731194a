"""Turns scores into probabilities."""

import torch
from torch import Tensor


def as_probabilities(scores: Tensor, estimates: bool) -> Tensor:
    """Probabilities (b, classes) in float64, in the order of the scores.

    `estimates`: the scores are themselves estimates of the probabilities, such as the ridge classifier's, whose targets
    are 0 and 1; but they can be negative. Other scores count as logits.
    """
    scores = scores.double()
    return onto_simplex(scores) if estimates else torch.softmax(scores, dim=1)


def onto_simplex(scores: Tensor) -> Tensor:
    """The nearest rows that are not negative and add up to 1: each row less a number, and zero where that is negative
    (Held, Wolfe and Crowder, 1974)."""
    scores = scores.clamp(min=scores.amax(1, keepdim=True) - 1)  # lower ones, as minus infinity, become zero anyway
    falling = scores.sort(dim=1, descending=True).values
    count = torch.arange(1, scores.shape[1] + 1, dtype=scores.dtype, device=scores.device)
    shifts = (falling.cumsum(1) - 1) / count  # if that many classes stay above zero
    kept = (falling > shifts).sum(1, keepdim=True)
    return (scores - shifts.gather(1, kept - 1)).clamp(min=0)
