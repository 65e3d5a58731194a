"""Images and folders as users have them."""

import io
import json
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from data_help import MEAN, STD, make_bad, make_tree, picture, write_images
from PIL import Image
from small_run import CONFIG

from mambacl.cli import main
from mambacl.data import FileImages, StreamConfig, open_dataset, open_stream
from mambacl.data.images import decode
from mambacl.data.sets.folders import images_under
from mambacl.errors import UserError
from mambacl.reports import write_report
from mambacl.training.folder import RunFolder


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ("train/ant/0.png", r"0\.png is empty \(0 bytes\)"),
        ("train/ant/1.png", r"1\.png cannot be read as an image"),
        ("test/bee/0.png", r"0\.png cannot be read as an image \(unknown image format\)"),
        ("train/bee/link.png", r"link\.png is missing: "),
    ],
)
def test_a_bad_image_is_named(tmp_path: Path, file: str, sentence: str) -> None:
    make_bad(tmp_path)
    with pytest.raises(UserError, match=sentence) as caught:
        decode(tmp_path / file)
    assert "\n" not in str(caught.value)


def test_processes_share_the_check_of_the_images(tmp_path: Path) -> None:
    """Every image is in exactly one share."""
    images = open_dataset("folders", make_tree(tmp_path)).train
    read: list[int] = []
    images.image = lambda index: read.append(index)  # type: ignore[method-assign]
    for number in range(3):
        images.check(number, 3)
    assert sorted(read) == list(range(len(images.labels)))


def test_bad_images_are_skipped_and_counted_if_asked(tmp_path: Path) -> None:
    make_bad(tmp_path)
    with pytest.raises(UserError, match=r"\.png"):
        open_dataset("folders", tmp_path).check()
    config = StreamConfig(dataset="folders", root=str(tmp_path), tasks=2, skip_bad=True)
    stream = open_stream(config, 8, MEAN, STD, seed=0, workers=0)
    stream.dataset.check()
    said = json.loads(json.dumps(stream.describe()))
    assert said["train"] == [2, 4] and said["test"] == [2, 1] and len(said["skipped"]) == 4
    assert said["skipped"][0] == "train: ant/0.png is empty (0 bytes)"
    assert any("bee/link.png" in words for words in said["skipped"]) and str(tmp_path) not in str(said)  # it may move
    for i in (2, 3):
        (tmp_path / "train" / "ant" / f"{i}.png").write_bytes(b"")
    with pytest.raises(UserError, match="'ant' of folders has no training images"):
        open_dataset("folders", tmp_path, skip_bad=True)
    whole = StreamConfig(dataset="folders", root=str(make_tree(tmp_path / "whole")), tasks=2, skip_bad=True)
    assert "skipped" not in open_stream(whole, 8, MEAN, STD, seed=0, workers=0).describe()


@pytest.mark.slow
def test_a_run_says_which_images_it_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_bad(tmp_path / "data")
    (tmp_path / "data" / "train" / "ant" / "2 & \u732b.png").write_bytes(b"")
    (tmp_path / "small.yaml").write_text(json.dumps(CONFIG))
    stream = {"--stream.dataset": "folders", "--stream.root": str(tmp_path / "data"), "--stream.tasks": "2"}
    words = ["train", str(tmp_path / "small.yaml"), "--out", str(tmp_path / "run"), "--training.passes", "1"]
    words += [word for pair in stream.items() for word in pair] + ["--stream.train_per_class", "2"]
    assert main(words) == 2 and "--skip-bad" in capsys.readouterr().err and not (tmp_path / "run").exists()
    assert main([*words, "--skip-bad"]) == 0
    skipped = json.loads((tmp_path / "run" / "results.json").read_text())["skipped"]
    assert (
        skipped["count"] == 5 == len(skipped["images"]) and "train: ant/0.png is empty (0 bytes)" in skipped["images"]
    )
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "images left out <b>5</b>" in page and "ant/0.png is empty" in page and "2 &amp; \u732b.png" in page
    assert RunFolder(tmp_path / "run").config().stream.skip_bad
    whole = make_tree(tmp_path / "whole", train=4)
    other = [str(whole) if word == str(tmp_path / "data") else word for word in words]
    other[other.index("--out") + 1] = str(tmp_path / "other")
    assert main([*other, "--skip-bad"]) == 0  # nothing to skip: nothing is said
    assert "skipped" not in json.loads((tmp_path / "other" / "results.json").read_text())
    assert "left out" not in (tmp_path / "other" / "report.html").read_text(encoding="utf-8")
    write_report([tmp_path / "run", tmp_path / "other"], tmp_path / "both")
    assert "images left out" in (tmp_path / "both" / "report.html").read_text(encoding="utf-8")


def test_kinds_of_images(tmp_path: Path) -> None:
    colours = np.asarray(picture(1, (6, 5)))
    grey = colours[:, :, 0]
    wide = grey.astype(np.uint16) * 256 + 7
    image = Image.fromarray(colours)
    image.save(tmp_path / "rgb.png")
    Image.fromarray(grey).save(tmp_path / "grey.png")
    Image.fromarray(wide).save(tmp_path / "wide.png")
    Image.fromarray(wide).save(tmp_path / "wide.tif")
    Image.fromarray(grey > 127).save(tmp_path / "bits.png")
    palette = Image.fromarray((grey // 64).astype(np.uint8), mode="P")
    palette.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0, 0, 0, 255] + [9] * 756)
    palette.save(tmp_path / "palette.png", transparency=0)
    Image.fromarray(np.dstack([colours, grey])).save(tmp_path / "rgba.png")
    Image.new("CMYK", (5, 6), (0, 255, 255, 0)).save(tmp_path / "cmyk.jpg")
    frames = [Image.new("RGB", (5, 6), colour) for colour in ("red", "blue")]
    for name in ("moving.gif", "moving.png", "moving.webp"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], lossless=True)
    as_grey = np.repeat(grey[:, :, None], 3, 2).tolist()
    assert decode(tmp_path / "rgb.png").tolist() == colours.tolist() == decode(tmp_path / "rgba.png").tolist()
    assert decode(tmp_path / "grey.png").tolist() == as_grey
    assert decode(tmp_path / "wide.png").tolist() == as_grey == decode(tmp_path / "wide.tif").tolist()
    assert set(decode(tmp_path / "bits.png").flatten().tolist()) == {0, 255}
    table = np.array([[0, 0, 0], [255, 0, 0], [0, 255, 0], [0, 0, 255]])
    assert decode(tmp_path / "palette.png").tolist() == table[grey // 64].tolist()
    for name in ("cmyk.jpg", "moving.gif", "moving.png", "moving.webp"):
        red, green, blue = decode(tmp_path / name).reshape(-1, 3).mean(0)
        assert red > 220 and green < 40 and blue < 40, name  # the first frame


@pytest.mark.parametrize(("orientation", "turns"), [(1, 0), (3, 2), (6, 3), (8, 1)])
def test_images_are_turned_as_their_exif_says(tmp_path: Path, orientation: int, turns: int) -> None:
    image = picture(2, (6, 4))
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(tmp_path / "a.png", exif=exif)
    assert decode(tmp_path / "a.png").tolist() == np.rot90(np.asarray(image), turns).tolist()


def test_names_with_spaces_and_unicode(tmp_path: Path) -> None:
    names = ["große Katze", "猫 と 犬", "naïve, 'quoted'"]
    make_tree(tmp_path, names)
    write_images([tmp_path / "train" / names[0] / "überall hin #1%.JPG"], start=99)
    config = StreamConfig(dataset="folders", root=str(tmp_path), tasks=3)
    stream = open_stream(config, 8, MEAN, STD, seed=0, workers=0)
    assert stream.dataset.class_names == sorted(names) and stream.describe()["train"] == [4, 3, 3]
    assert json.loads(json.dumps(stream.describe()))["class_names"] == sorted(names)


@pytest.mark.parametrize("suffix", [".JPG", ".jfif", ".ppm", ".tiff"])
def test_unusual_suffixes(tmp_path: Path, suffix: str) -> None:
    make_tree(tmp_path)
    place = tmp_path / "train" / "ant"
    Image.new("RGB", (8, 8), (10, 200, 30)).save(place / f"odd{suffix}")
    dataset = open_dataset("folders", tmp_path)
    dataset.check()
    assert (place / f"odd{suffix}").name in [Path(dataset.train.name(i)).name for i in range(len(dataset.train.labels))]


def test_a_name_that_is_no_unicode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tree(tmp_path)
    odd = os.path.join(os.fsencode(tmp_path), b"train", b"ant", b"\xff.png")
    try:
        os.rename(tmp_path / "train" / "ant" / "0.png", odd)
    except OSError:
        pytest.skip("this file system takes no such name")
    dataset = open_dataset("folders", tmp_path)
    dataset.check()
    assert dataset.fingerprint()
    shutil.copy(odd, os.fsencode(tmp_path / "train" / "bee" / "again.png"))  # so that it is named
    report = tmp_path / "report.json"
    for encoding in ("utf-8", "ascii"):
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding, errors="strict"))
        assert main(["data", "check", "folders", "--root", str(tmp_path), "--json", str(report)]) == 0
        assert b"\\udcff.png" in written.getvalue()
    assert "\udcff.png" in json.loads(report.read_text(encoding="utf-8"))["findings"][0]["names"][0]


def test_links_are_followed_once(tmp_path: Path) -> None:
    make_tree(tmp_path / "store", ("ant", "bee", "cow"))
    root = tmp_path / "root"
    for split in ("train", "test"):
        (root / split).mkdir(parents=True)
        (root / split / "ant").symlink_to(tmp_path / "store" / split / "ant")  # a class
        (root / split / "bee").mkdir()
        (root / split / "bee" / "more").symlink_to(tmp_path / "store" / split / "bee")  # a folder in a class
        (root / split / "bee" / "one.png").symlink_to(tmp_path / "store" / split / "cow" / "0.png")  # a file
        (root / split / "bee" / "round").symlink_to(root / split / "bee")  # a circle
    dataset = open_dataset("folders", root)
    assert np.bincount(dataset.train.labels).tolist() == [3, 4]
    dataset.check()


@pytest.mark.long
def test_a_hundred_thousand_files_in_one_folder(tmp_path: Path) -> None:
    """Time grows with their number and not with its square."""

    def seconds(count: int) -> float:
        root = tmp_path / str(count)
        for split in ("train", "test"):
            (root / split / "ant").mkdir(parents=True)
            for i in range(count if split == "train" else 1):
                if i % 10_000 == 0:  # a file system allows some ten thousand names of one file
                    whole = root / f"{split}-{i}.png"
                    picture(i).save(whole)
                os.link(whole, root / split / "ant" / f"{i}.png")
        started = time.perf_counter()
        dataset = open_dataset("folders", root)
        dataset.fingerprint()
        dataset.with_validation(0.1).limited(5)
        assert isinstance(dataset.train, FileImages) and len(dataset.train.files) == count
        return time.perf_counter() - started

    few = max(seconds(5_000), 0.01)
    assert seconds(100_000) < 100 * few  # twenty times as many
    assert len(images_under(tmp_path / "100000" / "train")) == 100_000


def test_a_root_that_may_only_be_read(tmp_path: Path) -> None:
    """Reading writes nothing."""
    make_tree(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for folder in [tmp_path, *(path for path in before if path.is_dir())]:
        folder.chmod(0o555)
    try:
        dataset = open_dataset("folders", tmp_path)
        dataset.check()
        assert dataset.fingerprint() and sorted(tmp_path.rglob("*")) == before
    finally:
        for folder in [tmp_path, *(path for path in before if path.is_dir())]:
            folder.chmod(0o755)
