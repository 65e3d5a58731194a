"""The methods by name, one file each. Does not import PyTorch, so that a wrong name is rejected at once."""

from typing import Any

from mambacl.lazy import constant, members
from mambacl.registry import Registry

# what several methods derive from
SHARED = ("base", "fine_tuned", "first_task", "projected", "rehearsing", "task_changes")

METHODS: Registry[Any] = Registry(  # of subclasses of `methods.base.Method`
    "method",
    "mambacl.methods",
    members("mambacl.methods", __file__, besides=(*SHARED, "registry")),
)


def stores_images(name: str) -> bool:
    """Whether a method keeps images of earlier tasks. Read from the source for those of this package."""
    if name not in METHODS.own:
        return bool(getattr(METHODS.get(name), "stores_images", False))
    try:
        return bool(constant(METHODS.own[name], "stores_images"))
    except LookupError:
        return False


def summaries() -> dict[str, str]:
    """One phrase per method. Those of this package are read from the source."""
    return {
        name: constant(METHODS.own[name], "summary") if name in METHODS.own else METHODS.get(name).summary
        for name in METHODS.names()
    }
