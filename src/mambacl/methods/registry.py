"""The methods by name, each in the file of that name. Without PyTorch: a wrong name is refused before it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mambacl.lazy import members
from mambacl.registry import Registry

if TYPE_CHECKING:
    from mambacl.methods.base import Method

METHODS: Registry[type[Method]] = Registry(
    "method", "mambacl.methods", members("mambacl.methods", __file__, besides=("base", "registry"))
)
