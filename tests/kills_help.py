"""Runs that are killed: what the files that are left must say, and what must come of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_run import CONFIG

import mambacl
from mambacl.errors import UserError
from mambacl.files import read_tensors
from mambacl.reports.runs import load_run
from mambacl.training.folder import RunFolder

TASKS = [6, 4]
SMALL: dict[str, Any] = {"stream.tasks": TASKS, "stream.train_per_class": 3}
RUNS: dict[str, dict[str, Any]] = {
    "trains": {**SMALL, "training.passes": 2, "audit_images": 2},
    "trains nothing": {**SMALL, "method": "analytic", "classifier_options": {"width": 20}},
}
BY_TIME = ("seconds", "images_per_second", "peak_memory_bytes", "peak_memory", "metrics_length")
LEFT = ("progress.json", ".lock")  # by a killed process; they say nothing about the run


def train(out: Path, kind: str, **options: Any) -> mambacl.Run:
    return mambacl.train(CONFIG, out=str(out), **RUNS[kind], **options)


def assert_same_folder(one: Path, other: Path, without: tuple[str, ...] = ()) -> None:
    """Two folders hold the same run, file by file and bit for bit, except for what depends on the time of day.
    `without`: names of files that may differ."""
    found, expected = ({path.relative_to(f).as_posix() for path in f.rglob("*")} for f in (one, other))
    assert found - {*LEFT} == expected - {*LEFT}
    for name in sorted(found - {*LEFT}):
        if (one / name).is_file() and Path(name).name not in without:
            assert _content(one / name) == _content(other / name), name


def _content(path: Path) -> Any:
    if path.suffix == ".safetensors":
        tensors, text = read_tensors(path)
        position = _timeless(json.loads(text.get("position", "{}")))
        return {name: (t.dtype, t.shape, t.numpy().tobytes()) for name, t in tensors.items()}, position
    if path.suffix == ".jsonl":
        return [_timeless(json.loads(line)) for line in path.open()]
    if path.suffix == ".json":
        return _timeless(json.loads(path.read_text()))
    if path.name == "config.yaml":
        return {**yaml.safe_load(path.read_text()), "out": ""}
    return path.read_bytes()


def _timeless(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: entry for key, entry in value.items() if key not in BY_TIME}


def assert_agrees(folder: Path) -> None:
    """`evaluate`, `load` and the tables have the tasks that results.json counts, or say what to do."""
    if not RunFolder(folder).exists():
        for function in (mambacl.evaluate, mambacl.load, mambacl.resume):
            with pytest.raises(UserError, match=r"no config\.yaml|does not exist"):
                function(folder)
        return
    if not RunFolder(folder).has_results():
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


def assert_continues(folder: Path, whole: Path, kind: str, without: tuple[str, ...] = ()) -> None:
    """`resume`, or the same `train` if there is no run yet, ends with the run that was never interrupted."""
    if RunFolder(folder).exists():
        mambacl.resume(folder)
    else:
        train(folder, kind)
    assert_same_folder(whole, folder, without)
