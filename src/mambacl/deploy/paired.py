"""The statistics of two models on the same images: pure functions of counts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist

BINS = 15  # of confidence, as is usual for the expected calibration error
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Pairs:
    """How many images two models, old and new, classify right and wrong."""

    both: int = 0
    """right before, right now"""
    lost: int = 0
    """right before, wrong now: negative flips"""
    gained: int = 0
    """wrong before, right now: positive flips"""
    neither: int = 0

    @classmethod
    def of(cls, answers: Iterable[tuple[bool, bool]]) -> Pairs:
        """From whether the old and the new model are right, image by image."""
        found = {(True, True): 0, (True, False): 0, (False, True): 0, (False, False): 0}
        for old, new in answers:
            found[old, new] += 1
        return cls(*found.values())

    @property
    def images(self) -> int:
        return self.both + self.lost + self.gained + self.neither

    @property
    def old_accuracy(self) -> float:
        return _share(self.both + self.lost, self.images)

    @property
    def new_accuracy(self) -> float:
        return _share(self.both + self.gained, self.images)

    @property
    def change(self) -> float:
        """Accuracy now minus accuracy before, from the counts: it rounds only once."""
        return _share(self.gained - self.lost, self.images)

    @property
    def negative_flip_rate(self) -> float:
        return _share(self.lost, self.images)

    @property
    def positive_flip_rate(self) -> float:
        return _share(self.gained, self.images)

    @property
    def p_value(self) -> float:
        return mcnemar(self.lost, self.gained)

    @property
    def interval(self) -> tuple[float, float]:
        """Of `change`."""
        return newcombe(self)


def _share(count: int, total: int) -> float:
    return count / total if total else math.nan


def mcnemar(lost: int, gained: int) -> float:
    """The two-sided p-value of McNemar's exact test: how probable such uneven flips are if both kinds are equally
    likely. Whole numbers until the last division."""
    flips = lost + gained
    term, total = 1, 0  # term: flips choose k
    for k in range(min(lost, gained) + 1):
        total += term
        term = term * (flips - k) // (k + 1)
    return min(1.0, 2 * total / 2**flips)


def wilson(right: int, images: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's score interval of an accuracy."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    middle = right + z * z / 2
    spread = z * math.sqrt(right * (images - right) / images + z * z / 4)
    # exact at the ends, where rounding would leave the accuracy outside
    low = 0.0 if right == 0 else (middle - spread) / (images + z * z)
    high = 1.0 if right == images else (middle + spread) / (images + z * z)
    return low, high


def newcombe(pairs: Pairs, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The interval of the new accuracy minus the old one on the same images: method 10 of Newcombe (Statistics in
    Medicine 17, 1998, p. 2635). It combines Wilson's intervals of both accuracies with their correlation, and holds
    for few images and for accuracies of 0 and 1."""
    n = pairs.images
    if not n:
        return math.nan, math.nan
    old, new = pairs.old_accuracy, pairs.new_accuracy
    old_low, old_high = wilson(pairs.both + pairs.lost, n, confidence)
    new_low, new_high = wilson(pairs.both + pairs.gained, n, confidence)
    r = _correlation(pairs)
    below, above = new - new_low, old_high - old
    down = math.sqrt(max(0.0, below**2 - 2 * r * below * above + above**2))
    below, above = old - old_low, new_high - new
    up = math.sqrt(max(0.0, above**2 - 2 * r * above * below + below**2))
    return pairs.change - down, pairs.change + up


def _correlation(pairs: Pairs) -> float:
    """Of being right before and now, with a continuity correction if it is positive."""
    old, new, n = pairs.both + pairs.lost, pairs.both + pairs.gained, pairs.images
    below = old * (n - old) * new * (n - new)
    if not below:
        return 0.0
    above: float = pairs.both * pairs.neither - pairs.lost * pairs.gained
    if above > 0:
        above = max(above - n / 2, 0.0)
    return above / math.sqrt(below)


def calibration_error(confidences: Iterable[float], right: Iterable[bool], bins: int = BINS) -> float:
    """The expected calibration error: images are put into bins of equal width by the probability of their best class;
    the mean distance between a bin's mean probability and its accuracy, weighted by its images."""
    pairs = list(zip(confidences, right, strict=True))
    gaps = [0.0] * bins
    for confidence, hit in pairs:
        place = math.ceil(confidence * bins) - 1  # the first bin is (0, 1/bins]
        gaps[min(max(place, 0), bins - 1)] += confidence - hit
    return sum(map(abs, gaps)) / len(pairs) if pairs else math.nan
