"""Classifiers over a backbone's features that grow task by task."""

from mambacl.classifiers.separate import SeparateHeads

__all__ = ["SeparateHeads"]
