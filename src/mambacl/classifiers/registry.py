"""The classifiers by name, each in the file of that name. Without PyTorch, so that a wrong name is refused at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mambacl.lazy import members
from mambacl.registry import Registry

if TYPE_CHECKING:
    from mambacl.classifiers.base import Classifier

CLASSIFIERS: Registry[type[Classifier]] = Registry(
    "classifier",
    "mambacl.classifiers",
    members("mambacl.classifiers", __file__, besides=("base", "registry", "subspaces")),
)
