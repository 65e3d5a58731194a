"""Packages whose names are imported on first use, so that checking an option does not import PyTorch. What can be known
of them without importing them."""

import ast
import gc
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
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


@contextmanager
def loading_pytorch() -> Iterator[None]:
    """For the imports inside, which take seconds. Python's garbage collector would search all that they define,
    hundreds of times now and again and again later: a fifth of the time, for objects that stay to the end."""
    from mambacl.status import status  # late: `import mambacl` is fast

    new, on = "torch" not in sys.modules, gc.isenabled()
    with status("loading PyTorch"):
        gc.disable()
        try:
            yield
        finally:
            if new:
                gc.freeze()
            if on:
                gc.enable()


def own_version() -> str:
    """The version of this package."""
    from importlib.metadata import PackageNotFoundError, version  # late: importing this is slow

    try:
        return version("mambacl")
    except PackageNotFoundError:  # its folder is on the path, but it is not installed
        return "0+unknown"


def constant(module: str, name: str) -> Any:
    """The value that a class of a module assigns to `name`, read from the source without importing the module."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return ast.literal_eval(node.value)
    raise LookupError(f"{module} assigns no {name}")
