"""The methods by name, one file each. Does not import PyTorch, so that a wrong name is rejected at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mambacl.lazy import members
from mambacl.registry import Registry

if TYPE_CHECKING:
    from mambacl.methods.base import Method

METHODS: Registry[type[Method]] = Registry(
    "method", "mambacl.methods", members("mambacl.methods", __file__, besides=("base", "registry"))
)
