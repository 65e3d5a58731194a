"""`mambacl data list`, `check` and `show`."""

import json
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from data_help import SHARED, make_bad, make_tree, picture
from PIL import Image

from mambacl.cli import main
from mambacl.data import DATASETS, ArrayImages, DataSet, check_dataset, open_dataset
from mambacl.errors import UserError


def findings(dataset: DataSet, name: str = "folders") -> dict[str, list[str]]:
    return {finding.what: finding.names for finding in check_dataset(dataset, name).findings}


def test_a_complete_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tree(tmp_path, ("ant", "bee", "cow"))
    assert main(["data", "check", "folders", "--root", str(tmp_path), "--tasks", "1,2", "--classes"]) == 0
    printed = capsys.readouterr().out
    assert "3 classes, 9 training and 6 test images" in printed and "each class has 3 training and 2 test" in printed
    assert "task   2:    2 classes,       6 training and       4 test images" in printed
    assert "      3       2     1 bee" in printed and "All images can be read." in printed


def test_what_is_missing_damaged_or_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_bad(tmp_path)
    report = tmp_path / "report.json"
    assert main(["data", "check", "folders", "--root", str(tmp_path), "--json", str(report)]) == 1
    printed = capsys.readouterr().out
    for kind in ("missing", "empty", "truncated", "unreadable"):
        assert f"PROBLEM: 1 file is {kind}" in printed
    assert "To do: repair or remove them" in printed and "not complete" in printed
    assert "To do: restore them" in printed and printed.count("--skip-bad") == 4  # each remedy once
    content = json.loads(report.read_text(encoding="utf-8"))
    assert not content["whole"] and len(content["findings"]) == 4


def test_a_truncated_jpeg(tmp_path: Path) -> None:
    make_tree(tmp_path)
    picture(7, (60, 60)).save(tmp_path / "train" / "ant" / "9.jpg", quality=95)
    whole = (tmp_path / "train" / "ant" / "9.jpg").read_bytes()
    (tmp_path / "train" / "ant" / "9.jpg").write_bytes(whole[: len(whole) // 2])
    assert list(findings(open_dataset("folders", tmp_path))) == ["1 file is truncated"]


def test_duplicates_and_overlap_by_content(tmp_path: Path) -> None:
    make_tree(tmp_path)
    train, test = tmp_path / "train", tmp_path / "test"
    shutil.copy(train / "ant" / "0.png", train / "ant" / "again.png")
    shutil.copy(train / "ant" / "1.png", train / "bee" / "other class.png")
    with Image.open(train / "bee" / "2.png") as image:
        image.save(test / "bee" / "other format.bmp")  # the same pixels in another file
    found = findings(open_dataset("folders", tmp_path))
    assert [len(names) for names in found.values()] == [1, 1, 1]
    overlap, other, again = found.values()
    assert "2.png = " in overlap[0] and overlap[0].endswith("other format.bmp")
    assert other[0].endswith("other class.png") and again[0].endswith("again.png")
    assert check_dataset(open_dataset("folders", tmp_path), "folders").complete  # notes, no problems


def test_arrays_with_duplicates() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 4, 3), dtype=np.uint8)
    pixels[3] = pixels[1]
    labels = np.array([0, 0, 0, 1, 1, 1])
    dataset = DataSet("mine", ["a", "b"], ArrayImages(pixels, labels), ArrayImages(pixels[4:], labels[:2]))
    found = findings(dataset, "mine")
    assert found["1 images appear again under another class"] == ["train image 1 = train image 3"]
    assert len(found["2 test images are among the training images, by content"]) == 2
    assert found["1 class has no test images"] == ["b"]


def test_counts_of_a_public_data_set_that_are_wrong(tmp_path: Path) -> None:
    make_tree(tmp_path)
    dataset = open_dataset("folders", tmp_path)
    found = findings(dataset, "cifar100")
    assert found["the counts differ from those of the public data set"][1] == "training images: 6 instead of 50,000"


@pytest.mark.skipif(not (SHARED / "cifar100").exists(), reason="the official CIFAR-100 files are not here")
def test_the_official_cifar100_is_complete(tmp_path: Path) -> None:
    subprocess.run([sys.executable, SHARED / "cifar100" / "unpack.py", tmp_path], check=True, capture_output=True)
    report = check_dataset(open_dataset("cifar100", tmp_path), "cifar100")
    assert report.complete and report.train.tolist() == [500] * 100 and report.test.tolist() == [100] * 100


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in DATASETS.names()) and "24,000" in printed


@pytest.mark.parametrize("stream", [["demo"], ["fashion-mnist-small", "--tasks", "5"]])
def test_a_stream_is_drawn(stream: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tasks.png"
    assert main(["data", "show", *stream, "--out", str(out), "--images", "3"]) == 0
    printed = capsys.readouterr().out
    assert "task   5: 2 classes" in printed and "Bag, Ankle boot" in printed
    with Image.open(out) as image:
        assert image.format == "PNG" and len(np.unique(np.asarray(image))) > 50


def test_an_odd_stream_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_bad(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "order.txt").write_text("bee\nant\n")
    options = ["--root", str(tmp_path / "data"), "--tasks", "2", "--order", "order.txt"]
    assert main(["data", "show", "folders", *options]) == 0
    assert (tmp_path / "folders-tasks.png").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["show", "folders", "--root", "ROOT", "--tasks", "own"], "does not exist"),
        (["show", "dmo"], "Did you mean 'demo'"),
        (["show", "demo", "--tasks", "some"], "--tasks takes a number"),
        (["show", "demo", "--images", "0"], "at least 1"),
        (["show", "demo", "--images", "1000000000"], "at most 100"),
        (["check", "fashion-mnist-small", "--order", "pilot"], "add --tasks"),
        (["check", "fashion-mnist-small", "--first-task", "5"], "add --tasks"),
        (["check", "folders", "--root", "~nobody-of-that-name/x"], "begins with an unknown home folder"),
        (["check", "cifar10"], "Did you mean 'cifar100'"),
        (["prepare", "folders", "--root", "x"], "needs no preparation"),
        (["prepare", "imagenet", "--root", "x"], "Did you mean 'imagenet-r'"),
        (["prepare", "cifar100", "--root", "x", "--lists", "y"], "has no split lists"),
        (["look"], "There is no command 'data look'"),
        ([], "list, prepare, check or show"),
    ],
)
def test_wrong_words(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error and len(error.splitlines()) == 1


def test_each_kind_of_bad_file_is_called_by_its_name(tmp_path: Path) -> None:
    make_tree(tmp_path)
    (tmp_path / "train" / "ant" / "broken.png").write_text("a text")
    (tmp_path / "train" / "ant" / "truncated.png").write_text("another")
    header = b"IHDR" + struct.pack(">IIBBBBB", 20_000, 15_000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    end = struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    (tmp_path / "train" / "bee" / "huge.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunk + end)
    dataset = open_dataset("folders", tmp_path)
    found = findings(dataset)
    assert list(found) == ["2 files are unreadable", "1 file is too large"]
    assert all("cannot be read as an image (unknown image format)" in name for name in found["2 files are unreadable"])
    with pytest.raises(
        UserError, match=r"huge\.png is too large \(300 megapixels, at most 179 .*: shrink or remove it"
    ):
        dataset.train.image(len(dataset.train.labels) - 1)
