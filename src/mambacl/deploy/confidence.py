"""Turns scores into probabilities."""

from dataclasses import dataclass

from mambacl.classifiers import Classifier


@dataclass(frozen=True)
class Confidence:
    """Probabilities are the softmax of scores divided by `temperature`."""

    temperature: float = 1.0
    threshold: float = 0.0
    """images with a lower best probability are unknown"""
    rejected: float = 0.0
    """the share of images of known classes below the threshold, as estimated"""
    calibrated: bool = False
    """whether the temperature was estimated, or is 1 because nothing is known"""


def confidence_of(classifier: Classifier) -> Confidence:
    return Confidence()
