"""Classifiers over a backbone's features that grow task by task."""

from mambacl.classifiers.cosine import CosineHead
from mambacl.classifiers.separate import SeparateHeads

__all__ = ["CosineHead", "SeparateHeads"]
