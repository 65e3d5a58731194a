"""Which versions of this package and its libraries computed something."""

import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def commit() -> str | None:
    """The commit of this package's git checkout, with a plus sign if it has changes; None outside a checkout."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


@cache
def versions() -> dict[str, str]:
    """The versions of the libraries that affect a run; read from disk once."""
    found = {"python": platform.python_version()}
    for name in ("mambacl", "torch", "torchvision", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # used from its source folder
            found[name] = "not installed"
    return found
