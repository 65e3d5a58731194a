"""The methods by name. Without PyTorch: a wrong name is refused before it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mambacl.registry import Registry

if TYPE_CHECKING:
    from mambacl.methods.base import Method

METHODS: Registry[type[Method]] = Registry(
    "method",
    "mambacl.methods",
    {
        "ease": "mambacl.methods.ease",
        "frozen": "mambacl.methods.frozen",
        "mamba-cl": "mambacl.methods.mamba_cl",
        "seq-adapter": "mambacl.methods.seq_adapter",
        "sequential": "mambacl.methods.sequential",
    },
)
