"""The methods by name, one file each. Does not import PyTorch, so that a wrong name is rejected at once."""

from typing import Any

from mambacl.lazy import members
from mambacl.registry import Registry

METHODS: Registry[Any] = Registry(  # of subclasses of `methods.base.Method`
    "method", "mambacl.methods", members("mambacl.methods", __file__, besides=("base", "registry"))
)
