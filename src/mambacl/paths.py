"""Paths as users write them."""

from pathlib import Path

from mambacl.errors import UserError


def expanded(path: str | Path) -> Path:
    """With the home folder that ~ or ~NAME stands for."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{path} begins with a home folder that is not there: write the path out.") from None
