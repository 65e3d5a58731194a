"""Calibrated probabilities: a softmax over scores with a temperature and a knee, and how sure a classifier is of images
that it knows and of images that it does not.

    p = softmax(k / T asinh(score / k))       score / T for small scores, and logarithmic above the knee k

Both are fitted to scores that the classifier gives images as if it had never seen them (`left_out.py`), by maximum
likelihood. They change no answer, only how sure it is.

Logits have no knee. Scores that estimate probabilities, such as the ridge classifier's, need one: the probability grows
more slowly than an exponential of them. On De-focus nano's features of CIFAR-100 (40 images per class for 50 and 100
classes, 3,000 units, 500 of these left out for the fit), judged by 20 other training images per class, the expected
calibration error was 7.4 and 8.4% with a temperature alone and 4.0 and 4.1% with a knee; 3.3 and 2.8% would be measured
if the probabilities were exact. Four times as many images for the fit changed that by less than a point.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

VERSION = 1
FEWEST = 50  # images that a calibration needs
KNEES = [2.0 ** (step / 2) for step in range(-2, 9)]  # times the root of the mean square score
HALVINGS = 26
NAMES = ("version", "temperature", "knee", "known", "foreign")


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
    knee: float
    """infinite for none"""
    known: Tensor
    """confidences in images that were left out, rising"""
    foreign: Tensor
    """confidences in the same images if their class had never been learned, rising"""

    def probabilities(self, scores: Tensor) -> Tensor:
        """(b, classes) in float64, in the order of the scores."""
        return torch.softmax(bent(scores.double(), self.knee) / self.temperature, dim=1)

    def rates(self, threshold: float) -> Rates:
        rejected = float((self.known < threshold).double().mean())
        accepted = float((self.foreign >= threshold).double().mean())
        return Rates(threshold, rejected, accepted, len(self.known))

    def rejecting(self, share: float) -> Rates:
        """The highest threshold that calls at most this share of images of known classes unknown."""
        place = int(share * len(self.known) + 1e-9)
        return self.rates(1.0 if place >= len(self.known) else float(self.known[place]))

    def state_dict(self) -> dict[str, Tensor]:
        shape = torch.tensor([self.temperature, self.knee], dtype=torch.float64)
        tensors = (torch.tensor(VERSION), shape[0], shape[1], self.known, self.foreign)
        return {name: tensor.clone() for name, tensor in zip(NAMES, tensors, strict=True)}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> "Calibration | None":
        """None if there is none, or one of another version."""
        if not state.keys() >= set(NAMES) or int(state["version"]) != VERSION:
            return None
        shape = float(state["temperature"]), float(state["knee"])
        return cls(*shape, state["known"].cpu(), state["foreign"].cpu())


def bent(scores: Tensor, knee: float) -> Tensor:
    """k asinh(scores / k), a rising function; the scores themselves without a knee."""
    return scores if math.isinf(knee) else knee * torch.asinh(scores / knee)


def calibrated(known: Tensor, foreign: Tensor, labels: Tensor, estimates: bool) -> Calibration | None:
    """From the scores (n, classes) of images that were left out, of the same images without their class, and their
    labels; None if there are too few. `estimates`: the scores estimate probabilities, and may have a knee. A class
    without images scores minus infinity."""
    if len(labels) < FEWEST or known.shape[1] < 2:
        return None
    known, foreign, knees = known.double(), foreign.double(), [math.inf]
    if estimates:
        knees += [float(known[known.isfinite()].square().mean().sqrt()) * factor for factor in KNEES]
    fits = [(fit_temperature(bent(known, knee), labels), knee) for knee in knees if knee]
    (temperature, knee) = min(fits, key=lambda fit: _loss(bent(known, fit[1]) / fit[0], labels))

    def confidences(scores: Tensor) -> Tensor:
        return torch.softmax(bent(scores, knee) / temperature, dim=1).amax(1).sort().values.cpu()

    return Calibration(temperature, knee, confidences(known), confidences(foreign))


def _sure(labels: Tensor) -> float:
    """How much of an image its label counts; the rest is one of any class (after Platt, 1999). Images that are all
    classified right would otherwise want a temperature of 0."""
    return (len(labels) + 1) / (len(labels) + 2)


def _loss(logits: Tensor, labels: Tensor) -> float:
    """The mean of minus the log-likelihood."""
    finite = logits.isfinite()
    logs = torch.log_softmax(logits, dim=1)
    spread = logs.masked_fill(~finite, 0).sum(1) / finite.sum(1)
    sure = _sure(labels)
    return -float((sure * logs.gather(1, labels[:, None])[:, 0] + (1 - sure) * spread).mean())


def fit_temperature(scores: Tensor, labels: Tensor) -> float:
    """The T with the highest likelihood of the labels.

    The log-likelihood is concave in b = 1 / T. Its derivative, the mean target score less the mean expected score,
    falls, so that halving an interval finds the root.
    """
    scores = scores.double()
    finite = scores.isfinite()
    scores = scores - scores.masked_fill(~finite, 0).sum(1, keepdim=True) / finite.sum(1, keepdim=True)
    zeroed = scores.masked_fill(~finite, 0)
    scale = float(scores[finite].square().mean().sqrt()) or 1.0
    target = _sure(labels) * scores.gather(1, labels[:, None])[:, 0].mean()  # the mean over all classes is 0

    def rises(inverse: float) -> bool:
        return bool(target > (torch.softmax(inverse * scores, dim=1) * zeroed).sum(1).mean())

    low, high = -12.0, 12.0  # log2 of b times the scale
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if rises(2.0**middle / scale) else (low, middle)
    return scale / 2.0 ** ((low + high) / 2)
