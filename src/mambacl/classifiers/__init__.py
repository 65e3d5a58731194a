"""Classifiers over a backbone's features that grow task by task, one file each."""

from typing import TYPE_CHECKING

from mambacl.classifiers.registry import CLASSIFIERS
from mambacl.lazy import attributes

if TYPE_CHECKING:
    from mambacl.classifiers.base import Classifier, StatisticsClassifier, TaskHeads
    from mambacl.classifiers.cosine import CosineHeads
    from mambacl.classifiers.nearest_mean import NearestMean
    from mambacl.classifiers.ridge import Ridge
    from mambacl.classifiers.separate import SeparateHeads

__all__ = [
    "CLASSIFIERS",
    "Classifier",
    "CosineHeads",
    "NearestMean",
    "Ridge",
    "SeparateHeads",
    "StatisticsClassifier",
    "TaskHeads",
]

__getattr__ = attributes(
    __name__,
    {
        **dict.fromkeys(("Classifier", "StatisticsClassifier", "TaskHeads"), "base"),
        "CosineHeads": "cosine",
        "NearestMean": "nearest_mean",
        "Ridge": "ridge",
        "SeparateHeads": "separate",
    },
)
