"""Calibrated probabilities: the temperature of a softmax over scores, and how sure a classifier is of images that it
knows and of images that it does not.

    p = softmax(score / T)

T is fitted to scores that the classifier gives images as if it had never seen them (`left_out.py`), by maximum
likelihood. It changes no answer, only how sure it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

VERSION = 1
FEWEST = 50  # images that a calibration needs
HALVINGS = 60
NAMES = ("version", "temperature", "known", "foreign")


@dataclass(frozen=True)
class Rates:
    """What a threshold on the confidence does, as estimated from training images that were left out."""

    threshold: float
    """an image is unknown if its best class is less probable than this"""
    false_rejections: float
    """share of images of known classes that it calls unknown"""
    false_acceptances: float
    """share of images of other classes that it does not call unknown"""
    images: int
    """from which the two shares were estimated"""


@dataclass(frozen=True)
class Calibration:
    temperature: float
    known: Tensor
    """confidences in images that were left out, rising"""
    foreign: Tensor
    """confidences in the same images if their class had never been learned, rising"""

    def probabilities(self, scores: Tensor) -> Tensor:
        """(b, classes) in float64, in the order of the scores."""
        return torch.softmax(scores.double() / self.temperature, dim=1)

    def rates(self, threshold: float) -> Rates:
        rejected = float((self.known < threshold).double().mean())
        accepted = float((self.foreign >= threshold).double().mean())
        return Rates(threshold, rejected, accepted, len(self.known))

    def rejecting(self, share: float) -> Rates:
        """The highest threshold that calls at most this share of images of known classes unknown."""
        place = int(share * len(self.known) + 1e-9)
        return self.rates(1.0 if place >= len(self.known) else float(self.known[place]))

    def state_dict(self) -> dict[str, Tensor]:
        numbers = {"version": torch.tensor(VERSION), "temperature": torch.tensor(self.temperature, dtype=torch.float64)}
        return {**numbers, "known": self.known, "foreign": self.foreign}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> "Calibration | None":
        """None if there is none, or one of another version."""
        if not state.keys() >= set(NAMES) or int(state["version"]) != VERSION:
            return None
        return cls(float(state["temperature"]), state["known"].cpu(), state["foreign"].cpu())


def calibrated(known: Tensor, foreign: Tensor, labels: Tensor) -> Calibration | None:
    """From the scores (n, classes) of images that were left out, of the same images without their class, and their
    labels; None if there are too few. A class without images scores minus infinity."""
    if len(labels) < FEWEST or known.shape[1] < 2:
        return None
    temperature = fit_temperature(known, labels)

    def confidences(scores: Tensor) -> Tensor:
        return torch.softmax(scores.double() / temperature, dim=1).amax(1).sort().values.cpu()

    return Calibration(temperature, confidences(known), confidences(foreign))


def fit_temperature(scores: Tensor, labels: Tensor) -> float:
    """The T with the highest likelihood of the labels, each of which counts as (n + 1) / (n + 2) of an image and the
    rest as one of any class (after Platt, 1999): images that are all classified right would want T = 0.

    The mean log-likelihood is concave in b = 1 / T. Its derivative, the mean target score less the mean expected score,
    falls, so that halving an interval finds the root.
    """
    scores = scores.double()
    finite = scores.isfinite()
    scores = scores - scores.masked_fill(~finite, 0).sum(1, keepdim=True) / finite.sum(1, keepdim=True)
    scale = float(scores[finite].square().mean().sqrt()) or 1.0
    sure = (len(labels) + 1) / (len(labels) + 2)
    target = sure * scores.gather(1, labels[:, None])[:, 0]  # the mean over all classes is 0

    def rises(inverse: float) -> bool:
        expected = (torch.softmax(inverse * scores, dim=1) * scores.masked_fill(~finite, 0)).sum(1)
        return bool((target - expected).mean() > 0)

    low, high = -12.0, 12.0  # log2 of b times the scale
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if rises(2.0**middle / scale) else (low, middle)
    return scale / 2.0 ** ((low + high) / 2)
