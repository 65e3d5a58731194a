"""Packages whose names are loaded when first used, so that checking an option does not load PyTorch."""

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any


def attributes(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__`: `homes` has the module inside `package` that defines each name."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return find


def members(package: str, file: str, besides: Collection[str]) -> dict[str, str]:
    """For a folder with one thing per file, the module of each by name: mamba_cl.py has "mamba-cl". `file` is one of
    the folder's own, `besides` those that hold something else. Nothing is imported."""
    stems = sorted(path.stem for path in Path(file).parent.glob("*.py"))
    chosen = [stem for stem in stems if stem not in ("__init__", *besides)]
    return {stem.replace("_", "-"): f"{package}.{stem}" for stem in chosen}
