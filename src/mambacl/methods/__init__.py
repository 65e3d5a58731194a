"""Continual-learning methods, one file each."""

from typing import TYPE_CHECKING

from mambacl.lazy import attributes
from mambacl.methods.registry import METHODS

if TYPE_CHECKING:
    from mambacl.methods.base import HeadPerTask, Method, Setup, Task

__all__ = ["METHODS", "HeadPerTask", "Method", "Setup", "Task"]

__getattr__ = attributes(__name__, dict.fromkeys(("HeadPerTask", "Method", "Setup", "Task"), "base"))
