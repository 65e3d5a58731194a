"""Continual-learning methods, one file each."""

from typing import TYPE_CHECKING

from mambacl.lazy import attributes
from mambacl.methods.registry import METHODS

if TYPE_CHECKING:
    from mambacl.methods.base import Method, Setup, Task

__all__ = ["METHODS", "Method", "Setup", "Task"]

__getattr__ = attributes(__name__, dict.fromkeys(("Method", "Setup", "Task"), "base"))
