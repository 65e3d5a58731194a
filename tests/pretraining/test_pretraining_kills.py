"""A kill between any two file operations of a pre-training, or a disk that is full from one of them on: the same
command continues it, to the same weights."""

import os
from pathlib import Path

import pytest
from file_operations_help import full_from, needs_linux, states
from pretraining_help import OPTIONS

from mambacl.files import full_disk
from mambacl.pretraining import pretrain

pytestmark = [needs_linux, pytest.mark.slow]
SHORT = {**OPTIONS, "epochs": 2, "evaluate_every": 1}


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process leaves what it has written, on the disk or not."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def test_a_kill_before_each_file_operation(tmp_path: Path) -> None:
    run = tmp_path / "run"
    found = states(run, tmp_path / "states", lambda: pretrain(**SHORT, out=str(run)), unfinished=True)
    whole = pretrain(**SHORT, out=str(run))
    assert len(found) > 15
    for state in found:
        print(state)
        ended = pretrain(**SHORT, out=str(state.folder))
        assert ended.accuracy == whole.accuracy
        assert ended.weights.read_bytes() == whole.weights.read_bytes()
        lines = [(folder / "metrics.jsonl").read_text().count("\n") for folder in (state.folder, run)]
        assert lines[0] == lines[1] == 2 + 2
        assert not list(state.folder.glob(".*.safetensors.*.part"))


@pytest.mark.long
def test_a_disk_that_is_full_from_an_operation_on(tmp_path: Path) -> None:
    with full_from(tmp_path / "run", 1 << 30) as operations:
        whole = pretrain(**SHORT, out=str(tmp_path / "run"))
    for number in range(0, len(operations) - 5, 9):
        run = tmp_path / str(number)
        with pytest.raises(OSError) as caught, full_from(run, number):
            pretrain(**SHORT, out=str(run))
        assert str(full_disk(caught.value, caught.value.filename)).startswith("The disk is full at ")
        ended = pretrain(**SHORT, out=str(run))
        assert ended.weights.read_bytes() == whole.weights.read_bytes() and ended.accuracy == whole.accuracy
