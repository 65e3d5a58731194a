"""Mamba-fixed: the backbone does not change, only the classifiers are trained."""

from mambacl.methods.base import Method
from mambacl.methods.registry import METHODS


class Frozen(Method):
    name = "frozen"
    summary = "classifiers only, the backbone does not change (Mamba-fixed)"


METHODS.add(Frozen.name, Frozen)
