"""The classifiers by name. Without PyTorch: a wrong name is refused before it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mambacl.registry import Registry

if TYPE_CHECKING:
    from mambacl.classifiers.base import Classifier

CLASSIFIERS: Registry[type[Classifier]] = Registry(
    "classifier",
    "mambacl.classifiers",
    {
        "cosine": "mambacl.classifiers.cosine",
        "nearest-mean": "mambacl.classifiers.nearest_mean",
        "separate": "mambacl.classifiers.separate",
    },
)
