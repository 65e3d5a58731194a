"""A kill between any two file operations of a run loses nothing: what is there agrees, and `resume` gives the same run."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from data_help import fewer_test_images
from file_operations_help import State, copy, full_from, needs_linux, states
from small_run import CONFIG

import mambacl
from mambacl.errors import UserError
from mambacl.files import full_disk, read_tensors
from mambacl.reports.runs import load_run
from mambacl.training import loop
from mambacl.training.checkpoints import Background
from mambacl.training.folder import RunFolder
from mambacl.training.loop import Loop, TrainingError

pytestmark = needs_linux
TASKS = [4, 3, 3]
RUNS: dict[str, dict[str, Any]] = {
    "trains": {"training.passes": 2, "stream.train_per_class": 3, "audit_images": 2},
    "trains nothing": {"method": "analytic", "classifier_options": {"width": 20}, "stream.train_per_class": 3},
}
VARIES = ("seconds", "images_per_second", "peak_memory_bytes", "peak_memory", "metrics_length", "time", "pid")


@pytest.fixture(autouse=True)
def few_images() -> Iterator[None]:
    with fewer_test_images(2):
        yield


class InBackground(Loop):
    """Writes checkpoints in the background, as on a GPU."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.background = Background(on=True)


def train(out: Path, **options: Any) -> mambacl.Run:
    return mambacl.train(CONFIG, out=str(out), **options)


# The same folder


def same(one: Path, other: Path, history: bool = True) -> None:
    """Two folders of the same run hold the same: bit for bit, except for what depends on the time. `history`: also
    the checkpoint before the last, which depends on when checkpoints were written."""
    ignored = {"progress.json"} | (set() if history else {"previous.safetensors"})
    names = [{path.relative_to(f).as_posix() for path in f.rglob("*")} for f in (one, other)]
    assert names[0] - ignored == names[1] - ignored
    for name in sorted(names[0] - ignored):
        if (one / name).is_file():
            assert content(one / name) == content(other / name), name


def content(path: Path) -> Any:
    if path.suffix == ".safetensors":
        tensors, text = read_tensors(path)
        position = timeless(json.loads(text.get("position", "{}")))
        return {name: (t.dtype, t.shape, t.numpy().tobytes()) for name, t in tensors.items()}, position
    if path.suffix == ".jsonl":
        return [timeless(json.loads(line)) for line in path.open()]
    if path.suffix == ".json":
        return timeless(json.loads(path.read_text()))
    if path.name == "config.yaml":
        return {**yaml.safe_load(path.read_text()), "out": ""}
    return path.read_bytes()


def timeless(value: dict[str, Any]) -> dict[str, Any]:
    return {key: entry for key, entry in value.items() if key not in VARIES}


# What a killed process leaves


def agrees(folder: Path) -> None:
    """`evaluate`, `load` and the tables show what results.json says, or name the command that helps."""
    if not RunFolder(folder).exists():
        for function in (mambacl.evaluate, mambacl.load, mambacl.resume):
            with pytest.raises(UserError, match=r"no config\.yaml"):
                function(folder)
        return
    if not (folder / "results.json").exists():
        with pytest.raises(UserError, match=r"no results\.json"):
            load_run(folder)
        return
    results = json.loads((folder / "results.json").read_text())
    rows = results["correct"]
    assert load_run(folder).results["correct"] == rows
    if not rows:
        for function in (mambacl.evaluate, mambacl.load):
            with pytest.raises(UserError, match="has not finished a task yet: run `mambacl resume"):
                function(folder)
        return
    evaluation = mambacl.evaluate(folder)
    assert evaluation.counted == evaluation.recorded == rows[-1]
    assert len(mambacl.load(folder, "cpu").classes) == sum(TASKS[: len(rows)])
    if results["status"] == "finished":
        assert len(rows) == len(TASKS) and (folder / "audit.json").exists()


def continues(folder: Path, whole: Path, again: Callable[[Path], Any], history: bool = True) -> None:
    """`resume`, or `again` if there is no run yet, gives the run that was never interrupted."""
    if RunFolder(folder).exists():
        mambacl.resume(folder)
    else:
        again(folder)
    same(whole, folder, history)


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_a_kill_before_each_file_operation(kind: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", **RUNS[kind]).folder
    run = tmp_path / "run"
    found = states(run, tmp_path / "states", lambda: train(run, **RUNS[kind]))
    same(whole, run)
    print(len(found))
    for state in found:
        print(state)
        agrees(state.folder)
        continues(state.folder, whole, lambda folder: train(folder, **RUNS[kind]))
        agrees(state.folder)
