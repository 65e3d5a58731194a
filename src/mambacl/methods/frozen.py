"""Mamba-fixed: only the classifiers train; the backbone is fixed."""

from mambacl.methods.base import Method
from mambacl.methods.registry import METHODS


class Frozen(Method):
    name = "frozen"
    summary = "classifiers only, the backbone does not change (Mamba-fixed)"
    takes_shards = True


METHODS.add(Frozen.name, Frozen)
