"""Runs on image files that change or move."""

from pathlib import Path
from typing import Any

import pytest
from data_help import make_tree
from small_run import CONFIG

import mambacl
from mambacl.cli import main
from mambacl.errors import UserError


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "photos", ("ant", "bee", "cow", "doe"))


def train(root: Path, **options: Any) -> mambacl.Run:
    """Trains nothing, so it takes a second."""
    stream = {"dataset": "folders", "root": str(root), "tasks": 2, "order": "natural"}
    options |= {"method": "analytic", "classifier_options": {"width": 20}}
    return mambacl.train(CONFIG, stream=stream, out=str(root.parent / "run"), **options)


def test_a_finished_run_is_not_shown_for_data_that_have_changed(photos: Path) -> None:
    run = train(photos)
    assert run.trained and not train(photos).trained
    (photos / "train" / "ant" / "0.png").unlink()
    with pytest.raises(UserError, match=r"The data have changed since .*differs in train\).*--overwrite"):
        train(photos)
    assert train(photos, overwrite=True).trained


@pytest.mark.slow
def test_a_run_finds_data_that_have_moved(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = train(photos).folder
    (folder / "results.json").unlink()  # as if the run had been killed just before its end
    moved = photos.rename(photos.parent / "elsewhere")
    with pytest.raises(UserError, match=r"are no longer in .*photos: give their new place with --root"):
        mambacl.resume(folder)
    with pytest.raises(UserError, match="--root"):
        mambacl.evaluate(folder)
    before = (folder / "config.yaml").read_text()
    assert main(["evaluate", str(folder), "--root", str(moved)]) == 0
    assert "The run recorded the same counts." in capsys.readouterr().out
    assert (folder / "config.yaml").read_text() == before
    assert main(["resume", str(folder), "--root", str(moved)]) == 0
    assert (folder / "config.yaml").read_text() == before.replace(str(photos), str(moved))
    assert mambacl.evaluate(folder).total == [4, 4]


def test_the_same_run_with_another_place_of_the_data(photos: Path) -> None:
    folder = train(photos).folder
    photos.rename(photos.parent / "elsewhere")
    with pytest.raises(UserError, match=rf"differs in stream.root.*`mambacl resume {folder} --root .*elsewhere`"):
        train(photos.parent / "elsewhere", name="small")
    assert not mambacl.resume(folder, root=photos.parent / "elsewhere").trained
    assert not train(photos.parent / "elsewhere", name="small").trained


def test_other_data_are_not_taken_for_moved_ones(photos: Path) -> None:
    folder = train(photos).folder
    before = (folder / "config.yaml").read_text()
    other = make_tree(photos.parent / "other", ("ant", "bee", "cow", "doe"), sizes=((7, 7),))
    with pytest.raises(UserError, match=r"The data have changed since .*fingerprint"):
        mambacl.resume(folder, root=other)
    assert (folder / "config.yaml").read_text() == before
