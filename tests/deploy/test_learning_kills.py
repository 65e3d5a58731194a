"""A kill between any two file operations of `mambacl learn` and `rollback`: the run has the old model or the new one,
bit for bit, and the same command again leads to the new one."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from data_help import make_tree
from file_operations_help import copy, full_from, needs_linux, states
from safetensors.torch import save_file
from small_run import CONFIG

import mambacl
from mambacl.errors import UserError
from mambacl.training import learned
from mambacl.training.folder import RunFolder

pytestmark = [needs_linux, pytest.mark.slow]
OLD, NEW = ("ant", "bee", "cow"), ("cat", "dog")
METHODS: dict[str, dict[str, Any]] = {
    "analytic": {"method": "analytic", "classifier_options": {"width": 20}},
    "mamba-cl": {"training": {**CONFIG["training"], "passes": 2}},
}


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process leaves what it has written, on the disk or not."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    make_tree(root / "old", OLD, train=6, test=2)
    make_tree(root / "new", NEW, train=6, test=2)
    return root


@pytest.fixture(scope="module", params=METHODS)
def trained(request: pytest.FixtureRequest, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    stream = {"dataset": "folders", "root": str(photos / "old"), "tasks": [2, 1], "transforms": {"image_size": 16}}
    out = tmp_path_factory.mktemp("runs") / "run"
    return mambacl.train({**CONFIG, **METHODS[request.param], "stream": stream}, out=str(out)).folder


def scores(run: Path, photos: Path) -> torch.Tensor:
    model = mambacl.load(run, "cpu")
    return model.scores(torch.stack([model.transform(file) for file in sorted(photos.rglob("test/*/*.png"))]))


def current(run: Path) -> int:
    return learned.read_history(RunFolder(run), 2).current


def test_a_kill_before_each_file_operation_of_learn(trained: Path, photos: Path, tmp_path: Path) -> None:
    run, new = copy(trained, tmp_path / "run"), photos / "new" / "train"
    before = scores(run, photos)
    found = states(run, tmp_path / "states", lambda: mambacl.learn(run, new))
    after, seen = scores(run, photos), set()
    for state in found:
        print(state)
        task = current(state.folder)
        assert torch.equal(scores(state.folder, photos), before if task == 2 else after)
        assert mambacl.evaluate(state.folder).learned == task - 2
        if task == 2:
            mambacl.learn(state.folder, new)
        else:
            with pytest.raises(UserError, match="already has the class 'cat'"):
                mambacl.learn(state.folder, new)
        assert torch.equal(scores(state.folder, photos), after)
        assert [path.suffix for path in (state.folder / "learned").iterdir() if path.name != "under-way"] == [
            ".safetensors"
        ]
        assert mambacl.rollback(state.folder, 2) == list(OLD)
        assert torch.equal(scores(state.folder, photos), before)
        seen.add(task)
    assert seen == {2, 3}


def test_a_kill_before_each_file_operation_of_rollback(trained: Path, photos: Path, tmp_path: Path) -> None:
    run = copy(trained, tmp_path / "run")
    before, seen = scores(run, photos), []
    mambacl.learn(run, photos / "new" / "train")
    after = scores(run, photos)
    for state in states(run, tmp_path / "states", lambda: mambacl.rollback(run, 2)):
        task = current(state.folder)
        seen.append(task)
        for back, expected in ((task, before if task == 2 else after), (3, after), (2, before)):
            mambacl.rollback(state.folder, back)
            assert torch.equal(scores(state.folder, photos), expected)
    assert seen == sorted(seen, reverse=True) and {*seen} == {2, 3}


def test_a_disk_that_is_full_from_an_operation_on(trained: Path, photos: Path, tmp_path: Path) -> None:
    new = photos / "new" / "train"
    with full_from(run := copy(trained, tmp_path / "counted"), 1 << 30) as operations:
        mambacl.learn(run, new)
    before, after = scores(trained, photos), scores(run, photos)
    for number in range(1, len(operations), 9):
        run = copy(trained, tmp_path / str(number))
        print(number, operations[number])
        try:
            with full_from(run, number):
                mambacl.learn(run, new)
        except Exception as error:
            assert "The disk is full at " in str(error) and isinstance(error, (UserError, RuntimeError))
            task = current(run)  # a flush can fail after the switch to the new model
            assert torch.equal(scores(run, photos), before if task == 2 else after)
            if task == 2:
                mambacl.learn(run, new)
        assert torch.equal(scores(run, photos), after)


def test_a_kill_while_a_checkpoint_becomes_a_run(photos: Path, tmp_path: Path) -> None:
    """The same command again makes the same run of it."""
    torch.manual_seed(0)
    model = mambacl.create_model(CONFIG["backbone"], num_classes=len(OLD), **CONFIG["backbone_options"])
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "names.txt").write_text("\n".join(OLD))
    options = {"backbone_options": CONFIG["backbone_options"], "stream": {"transforms": {"image_size": 16}},
               "training": {"passes": 1, "batch_size": 8}}  # fmt: skip
    given = {"backbone": CONFIG["backbone"], "classes": tmp_path / "names.txt", "protect": photos / "old" / "train"}
    learn: Callable[[Path], Any] = lambda out: mambacl.learn(  # noqa: E731
        tmp_path / "model.safetensors", photos / "new" / "train", out=out, **given, **options
    )
    run = tmp_path / "run"
    found = states(run, tmp_path / "states", lambda: learn(run))
    expected, redone = scores(run, photos), 0
    mambacl.rollback(run, 1)
    before = scores(run, photos)
    for state in found:
        print(state)
        folder = RunFolder(state.folder)
        if folder.exists() and folder.finished() and learned.read_history(folder, 1).current == 2:
            with pytest.raises(UserError, match="already has the class"):
                learn(state.folder)
        else:
            redone += 1
            learn(state.folder)
        assert torch.equal(scores(state.folder, photos), expected)
        mambacl.rollback(state.folder, 1)
        assert torch.equal(scores(state.folder, photos), before)
    assert redone > 10
