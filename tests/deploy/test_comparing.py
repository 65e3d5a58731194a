"""`mambacl.compare` and its command on two small runs whose flips are known: classes are colours, and the new model has
learned two of them under each other's name, and one more."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_help import fails
from PIL import Image
from small_run import CONFIG
from tolerance import assert_near

import mambacl
from mambacl.backbones.reading import pooled
from mambacl.cli import main
from mambacl.deploy.comparing import class_of
from mambacl.deploy.drift import Drift
from mambacl.errors import UserError

COLOURS = {"red": (230, 20, 20), "sea/green": (20, 230, 20), "sky": (20, 20, 230), "sun": (230, 230, 20)}
OLD_CLASSES = ("red", "sea/green", "sky")


def paint(folder: Path, colour: str, count: int, seed: int) -> None:
    """Images of one colour, with noise."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for i in range(count):
        pixels = np.array(COLOURS[colour]) + rng.integers(-20, 21, (16, 16, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{i}.png")


def train(root: Path, out: Path, shown: dict[str, str]) -> Path:
    """A run that learned, under each name, images of a colour. A folder of the data has no slash in its name."""
    for split, count in (("train", 6), ("test", 1)):
        for seed, (name, colour) in enumerate(shown.items()):
            paint(root / split / name.replace("/", "-"), colour, count, seed)
    stream = {"dataset": "folders", "root": str(root), "tasks": 1, "transforms": {"image_size": 16}}
    options = {"width": 64, "state_limit": None}
    mambacl.train({**CONFIG, "method": "analytic", "classifier_options": options, "stream": stream}, out=str(out))
    text = (out / "stream.json").read_text()
    (out / "stream.json").write_text(text.replace("sea-green", "sea/green"))
    return out


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("models")
    old = train(place / "a", place / "old", {name: name for name in OLD_CLASSES})
    swapped = {"red": "red", "sea/green": "sky", "sky": "sea/green", "sun": "sun"}
    return old, train(place / "b", place / "new", swapped)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """5 red, 3 green, 2 blue and 4 yellow images."""
    for seed, (name, count) in enumerate({"red": 5, "sea/green": 3, "sky": 2, "sun": 4}.items()):
        paint(tmp_path / "photos" / name, name, count, 100 + seed)
    return tmp_path / "photos"


def test_flips_are_counted_and_limits_checked(models: tuple[Path, Path], photos: Path, tmp_path: Path) -> None:
    old, new = models
    mambacl.load(new).save(tmp_path / "new.safetensors")
    found = mambacl.compare(old, tmp_path / "new.safetensors", photos, device="cpu", batch_size=4)
    shared, every = found.shared, found.all
    assert (shared.both, shared.lost, shared.gained, shared.neither) == (5, 5, 0, 0)
    assert (every.both, every.lost, every.gained, every.neither) == (5, 5, 4, 0)
    assert [(row.name, row.is_new, row.pairs.lost, row.pairs.images) for row in found.classes] == [
        ("red", False, 0, 5), ("sea/green", False, 3, 3), ("sky", False, 2, 2), ("sun", True, 0, 4)
    ]  # fmt: skip
    assert {(flip.file.rpartition("/")[0], flip.predicted) for flip in found.flips} == {
        ("sea/green", "sky"), ("sky", "sea/green")
    }  # fmt: skip
    assert found.drift == {"blocks.0": 0.0, "blocks.1": 0.0}  # nothing trains, and both began with the same weights
    assert (found.old.classes, found.new.classes, found.untested, found.unreadable) == (3, 4, (), ())
    assert found.new.bytes > found.old.bytes > 0 and found.old.images_per_second > 0
    assert len(found.broken({"max_negative_flips": 0.5})) == 0 and len(found.broken({"max_class_drop": 99})) == 1
    # confidences are those of predict
    files = sorted(photos.glob("red/*")) + sorted(photos.glob("sea/green/*")) + sorted(photos.glob("sky/*"))
    expected = np.mean([answer.probability for answer in mambacl.load(old, "cpu").predict(files)])
    assert found.old.confidence == pytest.approx(expected, abs=1e-4)  # batches round differently


def test_the_same_model_is_within_all_limits(models: tuple[Path, Path], photos: Path) -> None:
    shutil.rmtree(photos / "sun")
    old = mambacl.load(models[0], "cpu")
    found = mambacl.compare(old, old, photos)
    strict = {"max_negative_flips": 0, "max_drop": 0, "max_class_drop": 0, "max_drift": 0}
    assert found.broken(strict) == [] and found.shared == found.all and found.shared.p_value == 1.0
    assert found.old.calibration_error == found.new.calibration_error and found.old.bytes == found.new.bytes


def test_drift_is_that_of_the_outputs_of_the_blocks(models: tuple[Path, Path], photos: Path) -> None:
    """In batches, and without the images of the new class; the plain twin takes all images at once."""
    old, new = (mambacl.load(path, "cpu") for path in models)
    with torch.no_grad():
        new.method.model.blocks[1].mixer.out_proj.weight.mul_(100)  # type: ignore[union-attr, index]
    found = mambacl.compare(old, new, photos, batch_size=3)
    images = torch.stack([old.transform(file) for name in OLD_CLASSES for file in sorted((photos / name).iterdir())])
    expected = []
    with torch.no_grad():
        sides = [m.method.model.forward_intermediates(images, intermediates_only=True, output_fmt="NCHW",
                 return_prefix_tokens=True) for m in (old, new)]  # type: ignore[operator]  # fmt: skip
        for outputs in zip(*sides, strict=True):
            pairs = [output if isinstance(output, tuple) else (output, None) for output in outputs]
            then, now = (pooled(prefix, image.permute(0, 2, 3, 1)).double() for image, prefix in pairs)
            expected.append(float((now - then).norm() / then.norm()))
    assert found.drift is not None and list(found.drift) == ["blocks.0", "blocks.1"]
    assert found.drift["blocks.0"] == expected[0] == 0 and expected[1] > 0.01
    assert_near(torch.tensor(found.drift["blocks.1"]), torch.tensor(expected[1]), terms=1000)  # sums of all layers


def test_equal_weights_are_known_without_running_the_blocks(models: tuple[Path, Path], photos: Path) -> None:
    """The shortcut and the computation agree."""
    old, new = (mambacl.load(path, "cpu") for path in models)
    image = old.transform(next((photos / "red").iterdir()))[None]
    quick, plain = Drift(old, new), Drift(old, new)
    assert quick.same
    plain.same = False
    for drift in (quick, plain):
        drift.add(image)
    assert quick.relative() == plain.relative() == {"blocks.0": 0.0, "blocks.1": 0.0}
    assert plain.sums[:, 1].min() > 0 == quick.sums.max()


def test_the_command_reports_and_exits_by_the_limits(
    models: tuple[Path, Path], photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", *map(str, models), "--test", str(photos), "--device", "cpu"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert "5 of 10" in captured.out and "within the limits" not in captured.out and not captured.err
    (tmp_path / "limits.yaml").write_text("max_negative_flips: 0.4\nmax_drop: 49\n")
    (photos / "red" / "broken.png").write_text("hello")
    page, figures = tmp_path / "page.html", tmp_path / "figures.json"
    more = ["--limits", str(tmp_path / "limits.yaml"), "--page", str(page), "--json", str(figures)]
    assert main([*words, *more, "--max-negative-flips", "0.5"]) == 1
    captured = capsys.readouterr()
    unreadable, broken = captured.err.strip().splitlines()
    assert (
        "broken.png cannot be read as an image" in unreadable and "1 image could not be read: left out." in captured.out
    )
    assert broken == "mambacl: The accuracy on the old classes fell by 50.00 points, more than the limit of 49."
    written = json.loads(figures.read_text(encoding="utf-8"))
    assert written["shared"]["lost"] == 5 and written["limits"]["max_negative_flips"] == 0.5
    assert len(written["broken"]) == len(written["unreadable"]) == 1 and written["broken"][0] in page.read_text()
    assert main([*words, "--max-drop", "50", "--max-negative-flips=0.5"]) == 0
    assert "The new model is within the limits." in capsys.readouterr().out


def test_mistakes_get_one_sentence(
    models: tuple[Path, Path], photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = map(str, models)
    (tmp_path / "empty" / "red").mkdir(parents=True)
    for name, classes in (("others", ("ant", "bee")), ("some", ("red", "ant")), ("only-new", ("sun",))):
        for place in classes:
            shutil.copytree(photos / "red", tmp_path / name / place)
    (tmp_path / "bad" / "red").mkdir(parents=True)
    (tmp_path / "bad" / "red" / "a.png").write_bytes(b"")
    for words, sentence in (
        ([old, new], "Name the test images"),
        ([old, str(tmp_path / "gone"), "--test", str(photos)], "gone does not exist: give a run folder"),
        ([old, new, "--test", str(tmp_path / "gone")], "gone does not exist: give a folder with one folder"),
        ([old, new, "--test", str(tmp_path / "empty")], "has no images in class folders"),
        ([old, new, "--test", str(tmp_path / "others")], "is known to both models: name its folders"),
        ([old, new, "--test", str(tmp_path / "only-new")], "is known to both models: name its folders"),
        ([old, new, "--test", str(tmp_path / "some")], "Neither model knows the class 'ant'"),
        ([new, old, "--test", str(photos)], "The new model does not know the class 'sun'"),
        ([old, new, "--test", str(tmp_path / "bad")], "of a class that both models know can be read"),
        ([old, new, "--test", str(photos), "--max-drop", "-1"], "--max-drop must be at least 0"),
        ([old, new, "--test", str(photos), "--limits", str(tmp_path / "no.yaml")], "with limits does not exist"),
        ([old, new, "--test", str(photos), "--page", str(tmp_path / "no" / "a.html")], "--page does not exist"),
    ):
        assert sentence in fails(capsys, "compare", *words), words
    with pytest.raises(UserError, match="batch_size must be at least 1"):
        mambacl.compare(old, new, photos, batch_size=0)


def test_models_without_a_common_class_are_refused(models: tuple[Path, Path], photos: Path, tmp_path: Path) -> None:
    other = shutil.copytree(models[0], tmp_path / "other")
    text = (other / "stream.json").read_text()
    for name in OLD_CLASSES:
        text = text.replace(f'"{name}"', f'"not {name}"')
    (other / "stream.json").write_text(text)
    with pytest.raises(UserError, match="no class in common"):
        mambacl.compare(other, models[1], photos)


def test_the_class_of_an_image_is_the_longest_name_above_it() -> None:
    known = {"cat", "sea/green", "sea"}
    for path, name in (
        ("cat/a.png", "cat"), ("cat/young/a.png", "cat"), ("sea/green/a.png", "sea/green"), ("sea/a.png", "sea"),
        ("sea/blue/a.png", "sea"), ("ant/cat/a.png", "ant"),
    ):  # fmt: skip
        assert class_of(Path(path), known) == name
