"""Mamba-fixed: the backbone stays as it is, only the classifiers are trained."""

from mambacl.methods.base import METHODS, HeadPerTask


class Frozen(HeadPerTask):
    name = "frozen"
    summary = "classifiers only, the backbone stays as it is (Mamba-fixed)"


METHODS.add(Frozen.name, Frozen)
