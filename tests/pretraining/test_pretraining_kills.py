"""A kill between any two file operations of a pre-training: the same command continues it, to the same weights."""

import os
from pathlib import Path

import pytest
from file_operations_help import needs_linux, states
from pretraining_help import OPTIONS

from mambacl.pretraining.api import pretrain


@needs_linux
@pytest.mark.slow
def test_a_kill_before_each_file_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    options = {**OPTIONS, "epochs": 2, "evaluate_every": 1}
    run = tmp_path / "run"
    found = states(run, tmp_path / "states", lambda: pretrain(**options, out=str(run)), unfinished=True)
    whole = pretrain(**options, out=str(run))
    assert len(found) > 15
    for state in found:
        print(state)
        ended = pretrain(**options, out=str(state.folder))
        assert ended.accuracy == whole.accuracy
        assert ended.weights.read_bytes() == whole.weights.read_bytes()
        lines = [(folder / "metrics.jsonl").read_text().count("\n") for folder in (state.folder, run)]
        assert lines[0] == lines[1] == 2 + 2
        assert not list(state.folder.glob(".*.safetensors.*.part"))
