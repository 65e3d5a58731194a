"""The methods by name, one file each. Does not import PyTorch, so that a wrong name is rejected at once."""

from typing import Any

from mambacl.lazy import constant, members
from mambacl.registry import Registry

SHARED = ("base", "fine_tuned", "first_task", "projected", "rehearsing")  # what several methods derive from

METHODS: Registry[Any] = Registry(  # of subclasses of `methods.base.Method`
    "method",
    "mambacl.methods",
    members(
        "mambacl.methods", __file__, besides=("base", "fine_tuned", "first_task", "projected", "registry", "rehearsing")
    ),
)


def summaries() -> dict[str, str]:
    """One phrase per method. Those of this package are read from the source."""
    return {
        name: constant(METHODS.own[name], "summary") if name in METHODS.own else METHODS.get(name).summary
        for name in METHODS.names()
    }
