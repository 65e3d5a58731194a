"""A kill between any two file operations of a run, and a disk that is full from any of them on, lose nothing: what is
there agrees, and `resume` ends with the bits of the run that was never interrupted."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from data_help import fewer_test_images
from file_operations_help import copy, full_from, needs_linux, observed, states
from kills_help import RUNS, assert_agrees, assert_continues, assert_same_folder, train
from training_help import interrupted_after

import mambacl
from mambacl.files import full_disk
from mambacl.training import loop
from mambacl.training.checkpoints import Background
from mambacl.training.folder import RunFolder
from mambacl.training.loop import Loop, TrainingError

pytestmark = needs_linux
EACH = [pytest.param(kind, unfinished, id=f"{kind}{', all' * unfinished}", marks=[pytest.mark.long] * unfinished)
        for kind in RUNS for unfinished in (False, True)]  # fmt: skip
TIMES = [pytest.param(kind, every, id=f"{kind}{', all' * (every == 1)}", marks=[pytest.mark.long] * (every == 1))
         for kind in RUNS for every in (25, 1)]  # fmt: skip


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few test images; and nothing waits for the disk, whose contents a killed process leaves as they are."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    with fewer_test_images(2):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("kind, unfinished", EACH)
def test_a_kill_before_each_file_operation(kind: str, unfinished: bool, tmp_path: Path) -> None:
    whole, run = train(tmp_path / "whole", kind).folder, tmp_path / "run"
    found = states(run, tmp_path / "states", lambda: train(run, kind), unfinished)
    assert len(found) > 15
    assert_same_folder(whole, run)
    for state in found:
        print(state)
        assert_agrees(state.folder)
        assert_continues(state.folder, whole, kind)
        assert_agrees(state.folder)
        shutil.rmtree(state.folder)


class InBackground(Loop):
    """Writes all checkpoints in the background, as on a GPU."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.background = Background(on=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind, unfinished", EACH)
def test_a_kill_while_checkpoints_are_written_in_the_background(
    kind: str, unfinished: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint before the last depends on how long writing takes."""
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY", 0.0)
    monkeypatch.setattr(loop, "STATE_EVERY", 0.0)
    whole, run = train(tmp_path / "whole", kind).folder, tmp_path / "run"
    found = states(run, tmp_path / "states", lambda: train(run, kind, loop=InBackground), unfinished)
    assert len(found) > 15
    for state in found:
        print(state)
        assert_agrees(state.folder)
        assert_continues(state.folder, whole, kind, without=("previous.safetensors",))
        shutil.rmtree(state.folder)


@pytest.mark.slow
def test_a_kill_while_a_run_falls_back_to_the_checkpoint_before(tmp_path: Path) -> None:
    whole, run = train(tmp_path / "whole", "trains").folder, tmp_path / "run"
    found = states(run, tmp_path / "states", lambda: train(run, "trains"))
    stopped = [state for state in found if not RunFolder(state.folder).finished()]
    for number, state in enumerate(stopped[-2::-9]):
        last = state.folder / "checkpoints" / "last.safetensors"
        if not last.with_name("previous.safetensors").exists():
            break
        last.unlink()  # so that other names of this file stay intact
        last.write_bytes(b"damaged")
        again = states(state.folder, tmp_path / f"again {number}", lambda state=state: mambacl.resume(state.folder))
        assert_same_folder(whole, state.folder)
        for killed in again[:6]:
            print(state, "then", killed)
            assert_continues(killed.folder, whole, "trains")
    assert number > 2


@pytest.mark.slow
def test_a_kill_while_another_run_is_overwritten(tmp_path: Path) -> None:
    """What is left is the old run or a part of the new one: never one that is finished and has no model."""
    kind = "trains nothing"
    old = train(tmp_path / "old", kind, seed=1).folder
    new, run = train(tmp_path / "new", kind).folder, copy(old, tmp_path / "run")
    ended = set()
    for state in states(run, tmp_path / "states", lambda: train(run, kind, overwrite=True)):
        print(state)
        there = RunFolder(state.folder)
        expected = old if there.exists() and there.config().seed == 1 else new
        if there.exists():
            mambacl.resume(state.folder)
        else:
            train(state.folder, kind)
        ended.add(expected)
        assert_same_folder(expected, state.folder)
        assert mambacl.evaluate(state.folder).counted == mambacl.evaluate(expected).recorded
    assert ended == {old, new}


def test_a_finished_run_with_the_checkpoint_of_the_task_before(tmp_path: Path) -> None:
    """An earlier version left one when it was killed between the last checkpoint and its second name."""
    run, early = train(tmp_path / "run", "trains nothing").folder, tmp_path / "early"
    with interrupted_after(1):
        train(early, "trains nothing")
    for folder in (run, early):
        assert_agrees(folder)
    (run / "checkpoints" / "task-end.safetensors").unlink()
    shutil.copy(early / "checkpoints" / "last.safetensors", run / "checkpoints" / "task-end.safetensors")
    assert mambacl.resume(run).results["status"] == "finished"
    assert_agrees(run)
    assert len(mambacl.evaluate(run).counted) == 2


# A full disk


@pytest.mark.slow
@pytest.mark.parametrize("kind, every", TIMES)
def test_a_disk_that_is_full_from_an_operation_on(kind: str, every: int, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", kind).folder
    with full_from(tmp_path / "counted", 1 << 30) as operations:
        train(tmp_path / "counted", kind)
    refused = 0
    for number in range(0, len(operations), every):
        run = tmp_path / str(number)
        print(number, operations[number])
        try:
            with full_from(run, number):
                train(run, kind)
        except (OSError, TrainingError) as error:
            refused += 1
            sentence = str(error) if isinstance(error, TrainingError) else str(full_disk(error, error.filename))
            assert sentence.startswith("The disk is full at ") and "free some space" in sentence
            if isinstance(error, TrainingError):
                assert sentence.endswith(f"(`mambacl resume {run}` continues from the last checkpoint)")
        assert not (run / "error.log").exists()
        assert_agrees(run)
        assert_continues(run, whole, kind)
        shutil.rmtree(run)
    assert refused * every > 0.8 * len(operations)


# On disk before the next step relies on it


@pytest.mark.parametrize("kind", RUNS)
def test_files_are_on_disk_before_they_get_their_names(kind: str, tmp_path: Path) -> None:
    """Each is flushed, renamed, and then its folder is flushed; the events are flushed before a checkpoint counts their
    lines."""
    run, done = tmp_path / "run", list[tuple[str, Path]]()
    with observed(run, lambda operation, path: done.append((operation, path))):
        train(run, kind)
    renames = [(n, path) for n, (what, path) in enumerate(done) if what == "os.rename"]
    for number, path in renames:
        before = [(what, p) for what, p in done[:number] if p.name.startswith(f".{path.name}.") or p == path]
        after = [(what, p) for what, p in done[number:] if what in ("fsync", "os.rename")][1]
        if path.name not in ("progress.json", "previous.safetensors"):  # nothing relies on these
            assert before[-1][0] == "fsync" and after == ("fsync", path.parent), path
    commits = [number for number, path in renames if path.name == "last.safetensors"]
    assert len(commits) >= 2
    for number in commits:
        events = [what for what, path in done[:number] if path.name == "metrics.jsonl"]
        assert events[-1] == "fsync"
