"""Calls of the command line that fail."""

import pytest

from mambacl.cli import main


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The last line on standard error of a call that exits with 2; at most what was to be trained stands before it."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    *before, last = captured.err.strip().splitlines()
    assert all(line.startswith("Training ") for line in before) and last.startswith("mambacl: ") and not captured.out
    return last
