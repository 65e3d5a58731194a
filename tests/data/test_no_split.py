"""Images in FOLDER/CLASS without a split: a share of each class is held out for testing."""

import logging
from pathlib import Path

import numpy as np
import pytest
from data_help import write_images

from mambacl.cli import main
from mambacl.data import StreamConfig, open_dataset, open_stream
from mambacl.errors import UserError


def names(images) -> set[str]:
    return {images.name(index) for index in range(len(images.labels))}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    counts = {"ant": 10, "bee": 7, "cow": 2}
    write_images(tmp_path / "photos" / name / f"{i}.png" for name, count in counts.items() for i in range(count))
    return tmp_path / "photos"


def test_a_share_of_each_class_is_held_out_and_said(photos: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mambacl"):
        dataset = open_dataset("folders", photos)
    assert "photos has no test images: 4 of its 19 images, 20% of each class, are held out" in caplog.text
    assert dataset.class_names == ["ant", "bee", "cow"]
    assert np.bincount(dataset.test.labels).tolist() == [2, 1, 1]
    assert np.bincount(dataset.train.labels).tolist() == [8, 6, 1]
    assert not names(dataset.train) & names(dataset.test) and len(names(dataset.train)) == 15
    half = open_dataset("folders", photos, test_share=0.5)
    assert np.bincount(half.test.labels).tolist() == [5, 4, 1] and names(dataset.test) <= names(half.test)


def test_the_same_images_are_held_out_wherever_they_are(photos: Path) -> None:
    before = open_dataset("folders", photos)
    fingerprint = before.fingerprint()
    moved = photos.parent / "other"
    moved.mkdir()
    photos.rename(moved / "train")  # ROOT/train/CLASS without ROOT/test
    after = open_dataset("folders", moved)
    assert after.fingerprint() == fingerprint
    write_images([moved / "train" / "bee" / "new.png"])
    assert names(open_dataset("folders", moved).test) >= {name for name in names(before.test) if "bee" not in name}


def test_the_stream_says_so(photos: Path) -> None:
    config = StreamConfig(dataset="folders", root=str(photos), tasks=3, test_share=0.3)
    described = open_stream(config, 8, [0.5] * 3, [0.5] * 3, 0, 0).describe()
    assert described["test_share"] == 0.3 and described["test"] == [3, 2, 1] and described["train"] == [7, 5, 1]


def test_data_check_counts_them(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", "folders", "--root", str(photos)]) == 0
    assert "3 classes, 15 training and 4 test images" in capsys.readouterr().out


def test_what_is_not_a_folder_of_classes_is_refused(photos: Path) -> None:
    write_images([photos / "dog" / "only.png"])
    with pytest.raises(UserError, match="The class 'dog' of photos has too few images to hold one out"):
        open_dataset("folders", photos)
    (photos / "dog").rename(photos / "val")
    with pytest.raises(UserError, match=r"photos/train does not exist; the root must hold .*, or CLASS"):
        open_dataset("folders", photos)
    with pytest.raises(UserError, match="test_share must be a share between 0 and 1"):
        StreamConfig(test_share=1.0)
