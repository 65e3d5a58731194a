"""The run folder: one reader and writer for training and for reports."""

import json
from pathlib import Path

import pytest
from reports_help import make_run

from mambacl.errors import UserError
from mambacl.reports import load_run
from mambacl.training.folder import SCHEMA, RunFolder, audit_file, task_file


def make(folder: Path) -> RunFolder:
    return RunFolder(make_run(folder, [[90], [80, 45]], [100, 50], epochs=2))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    results = {**folder.results(), "status": "interrupted"}
    folder.write_results(results)
    folder.add_seconds("report", 2.0)
    assert folder.results() == {**results, "seconds": {**results["seconds"], "report": 2.0}}
    folder.write_audit({"after": 2, "tasks": [], "updates": []})
    assert folder.audit() == {"schema": SCHEMA, "after": 2, "tasks": [], "updates": []}
    assert load_run(folder.path).audit == folder.audit() and load_run(folder.path).status == "interrupted"


def test_events_by_kind_and_up_to_a_checkpoint(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    assert [event["task"] for event in folder.events("epoch", "task", "epoch")] == [0, 0, 1, 1]
    length = folder.events_length()
    folder.append_event({"event": "task", "task": 2})
    assert len(folder.events("task", "task")) == 3
    folder.truncate_events(length)
    assert len(folder.events("task", "task")) == 2
    with open(folder.path / "metrics.jsonl", "a") as out:
        out.write('{"event": "task", "ta')  # cut off by a crash
    assert len(folder.events("task", "task")) == 2
    (folder.path / "metrics.jsonl").write_text('{"event": "epoch", "task": 0}\n')
    with pytest.raises(UserError, match="line 1 is an event 'epoch' without task and epoch"):
        folder.events("epoch", "task", "epoch")


def test_tensor_files_are_found_by_task(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    for name in (task_file(9), task_file(101), audit_file(3), "task-end.safetensors", "last.safetensors"):
        (folder.checkpoints / name).write_bytes(b"")
    assert list(folder.task_files()) == [9, 101] and list(folder.audit_files()) == [3]


def test_only_what_is_needed_must_be_there(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    for name in ("stream.json", "config.yaml", "metrics.jsonl"):
        (folder.path / name).unlink()
    record = load_run(folder.path)
    assert record.stream == {} and record.config == {} and record.epochs == ()
    with pytest.raises(
        UserError, match=r"stream\.json is missing: restore it, or start the run again with --overwrite"
    ):
        folder.stream()
    with pytest.raises(UserError, match="is not a run folder"):
        RunFolder.existing(folder.path)
    (folder.path / "results.json").write_text(json.dumps({"schema": 2}))
    with pytest.raises(UserError, match="reads schema 1: use the version that wrote the run"):
        folder.results()


def test_a_folder_from_before_the_option_precision_stays_in_float32(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    assert "precision" not in folder.options()
    assert folder.config().precision == "float32"
