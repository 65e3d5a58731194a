"""Packages whose names are imported on first use, so that checking an option does not import PyTorch."""

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any


def attributes(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__`; `homes` maps each name to the module inside `package` that defines it."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return find


def members(package: str, file: str, besides: Collection[str]) -> dict[str, str]:
    """The modules of a folder with one entry per file, by the entry's name: mamba_cl.py defines "mamba-cl". `file` is
    any file of the folder; `besides` are modules that define something else. Imports nothing."""
    stems = sorted(path.stem for path in Path(file).parent.glob("*.py"))
    chosen = [stem for stem in stems if stem not in ("__init__", *besides)]
    return {stem.replace("_", "-"): f"{package}.{stem}" for stem in chosen}
