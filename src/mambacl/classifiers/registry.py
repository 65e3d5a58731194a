"""The classifiers by name, one file each. Does not import PyTorch, so that a wrong name is rejected at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mambacl.lazy import members
from mambacl.registry import Registry

if TYPE_CHECKING:
    from mambacl.classifiers.base import Classifier

CLASSIFIERS: Registry[type[Classifier]] = Registry(
    "classifier",
    "mambacl.classifiers",
    members(
        "mambacl.classifiers",
        __file__,
        besides=(
            "base",
            "calibration",
            "class_statistics",
            "composition",
            "distillation",
            "drift",
            "etf",
            "exemplars",
            "factor",
            "gram",
            "joint",
            "kept",
            "least_squares",
            "left_out",
            "lift",
            "masked",
            "normed",
            "outliers",
            "registry",
            "ridge_options",
            "sampling",
            "subspaces",
            "triplet",
        ),
    ),
)
