"""Reading run folders for a report: torn and damaged files, and a sentence for each mistake."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reports_help import make_run

from mambacl.errors import UserError
from mambacl.reports import load_run, write_report

TWO_TASKS = {0: [[90], [80, 45]], 1: [[92], [84, 46]], 2: [[94], [82, 50]]}  # of 100 and 50 images


def test_epochs_repeated_after_a_resume_count_once_and_a_torn_last_line_is_left_out(tmp_path):
    folder = make_run(tmp_path / "a", TWO_TASKS[0], [100, 50], epochs=2)
    with open(folder / "metrics.jsonl", "a") as out:
        out.write('{"event": "epoch", "task": 1, "epoch": 1, "loss": 7.0}\n{"event": "epo')
    epochs = load_run(folder).epochs
    assert [(epoch["task"], epoch["epoch"]) for epoch in epochs] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert epochs[-1]["loss"] == 7.0


def rewrite(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def change(**changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "results.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return apply


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "results.json").unlink(), "not a run folder"),
        (rewrite("results.json", "{"), "not valid JSON"),
        (rewrite("results.json", "[]"), "must hold a mapping"),
        (rewrite("results.json", '{"schema": 2}'), "reads schema 1"),
        (rewrite("stream.json", "nonsense"), "not valid JSON"),
        (rewrite("config.yaml", "a: [1"), "not valid YAML"),
        (rewrite("metrics.jsonl", "broken\n{}\n"), "line 1"),
        (rewrite("checkpoints/task-01.safetensors", "broken"), "is damaged"),
        (change(correct=[[1, 2]]), "row 0 of 'correct'"),
        (change(correct=[[101]]), "counts up to 'total'"),
        (change(total=None), "'total' is not a list"),
        (change(metrics=[]), "'metrics' is not a mapping"),
    ],
)
def test_a_damaged_folder_is_one_sentence(tmp_path, damage, words):
    folder = make_run(tmp_path / "a", TWO_TASKS[0], [100, 50])
    damage(folder)
    with pytest.raises(UserError, match=re.escape(words)) as error:
        load_run(folder)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)


def test_wrong_folders_are_one_sentence(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        load_run(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file, not a run folder"):
        load_run(tmp_path / "file")
    with pytest.raises(UserError, match="at least one run"):
        write_report([])
    folder = make_run(tmp_path / "a", TWO_TASKS[0], [100, 50])
    with pytest.raises(UserError, match="choose another folder with --out"):
        write_report([folder], tmp_path / "file")
