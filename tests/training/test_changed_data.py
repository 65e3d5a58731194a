"""Runs on image files that change or move."""

from pathlib import Path
from typing import Any

import pytest
from data_help import make_tree
from small_run import CONFIG

import mambacl
from mambacl.errors import UserError


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "photos", ("ant", "bee", "cow", "doe"))


def train(root: Path, **options: Any) -> mambacl.Run:
    """Trains nothing, so it takes a second."""
    stream = {"dataset": "folders", "root": str(root), "tasks": 2, "order": "natural"}
    return mambacl.train(CONFIG, method="analytic", stream=stream, out=str(root.parent / "run"), **options)


def test_a_finished_run_is_not_shown_for_data_that_have_changed(photos: Path) -> None:
    run = train(photos)
    assert run.trained and not train(photos).trained
    (photos / "train" / "ant" / "0.png").unlink()
    with pytest.raises(UserError, match=r"The data have changed since .* \(stream.json differs in train\).*--overwrite"):
        train(photos)
    assert train(photos, overwrite=True).trained
