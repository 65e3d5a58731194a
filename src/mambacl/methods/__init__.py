"""Continual-learning methods, one file each."""

from mambacl.methods import ease, frozen, mamba_cl, seq_adapter, sequential  # noqa: F401  (register themselves)
from mambacl.methods.base import METHODS, HeadPerTask, Method, Setup, Task

__all__ = ["METHODS", "HeadPerTask", "Method", "Setup", "Task"]
