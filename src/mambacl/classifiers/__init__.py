"""Classifiers over a backbone's features that grow task by task, one file each."""

from typing import TYPE_CHECKING

from mambacl.classifiers.registry import CLASSIFIERS
from mambacl.lazy import attributes

if TYPE_CHECKING:
    from mambacl.classifiers.aligned import AlignedHeads
    from mambacl.classifiers.base import Classifier, StatisticsClassifier, TaskHeads
    from mambacl.classifiers.class_statistics import ClassStatistics
    from mambacl.classifiers.cosine import CosineHeads
    from mambacl.classifiers.gaussian import Gaussian
    from mambacl.classifiers.kac import KacHeads
    from mambacl.classifiers.lda import LDA
    from mambacl.classifiers.nearest_mean import NearestMean
    from mambacl.classifiers.ridge import Ridge
    from mambacl.classifiers.separate import SeparateHeads

__all__ = [
    "CLASSIFIERS",
    "LDA",
    "AlignedHeads",
    "ClassStatistics",
    "Classifier",
    "CosineHeads",
    "Gaussian",
    "KacHeads",
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
        "AlignedHeads": "aligned",
        "ClassStatistics": "class_statistics",
        "CosineHeads": "cosine",
        "Gaussian": "gaussian",
        "KacHeads": "kac",
        "LDA": "lda",
        "NearestMean": "nearest_mean",
        "Ridge": "ridge",
        "SeparateHeads": "separate",
    },
)
