"""A checkpoint that was trained elsewhere becomes a run that learns classes."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_help import fails
from data_help import contents, make_tree, write_images
from safetensors.torch import save_file
from small_run import CONFIG
from tolerance import assert_near

import mambacl
from mambacl.cli import main
from mambacl.deploy.coverage import coverage, directions, share_inside
from mambacl.errors import UserError
from mambacl.training.folder import RunFolder

OLD, NEW = ("ant", "bee", "cow"), ("cat", "dog")
OPTIONS: dict[str, Any] = {
    "backbone_options": CONFIG["backbone_options"],
    "stream": {"transforms": {"image_size": 16}},
    "training": {"passes": 2, "batch_size": 8},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints with and without a classifier, class names, and folders of images."""
    root = tmp_path_factory.mktemp("elsewhere")
    torch.manual_seed(0)
    model = mambacl.create_model(CONFIG["backbone"], num_classes=len(OLD), **CONFIG["backbone_options"])
    save_file(model.state_dict(), root / "model.safetensors")
    bare = mambacl.create_model(CONFIG["backbone"], num_classes=0, **CONFIG["backbone_options"])
    save_file(
        {name: t for name, t in model.state_dict().items() if name in bare.state_dict()}, root / "bare.safetensors"
    )
    (root / "names.txt").write_text("\n".join(OLD))
    make_tree(root / "old", OLD, train=6, test=3)
    make_tree(root / "new", NEW, train=6, test=3)
    for split in ("train", "test"):
        shutil.copytree(root / "new" / split, root / f"both-{split}")
        shutil.copytree(root / "old" / split, root / f"both-{split}", dirs_exist_ok=True)
    write_images([root / "flat" / f"{number}.png" for number in range(12)], start=500)
    return root


def learn(place: Path, out: Path, protect: str | None = "old/train", weights: str = "model", **options: Any) -> Any:
    folder = None if protect is None else place / protect
    given = {"backbone": CONFIG["backbone"], "classes": place / "names.txt", "protect": folder, **OPTIONS}
    new = options.pop("new", place / "new" / "train")
    return mambacl.learn(place / f"{weights}.safetensors", new, out=out, **{**given, **options})


def test_the_run_predicts_compares_exports_learns_and_goes_back(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = learn(place, out, test=place / "both-test", classifier="separate")
    assert (done.task, done.new, done.classes, done.trained) == (2, [*NEW], 5, True) and done.comparison is not None
    assert "18 images to protect cover" in done.notes[0] and "18 images to protect are few" in done.notes[1]
    assert RunFolder(out).config().method == "mamba-cl" and mambacl.load(out).classes == [*OLD, *NEW]
    mambacl.load(out).save(tmp_path / "after.safetensors")
    write_images([tmp_path / "more" / name / f"{i}.png" for name in ("eel", "fox") for i in range(6)], start=900)
    assert mambacl.learn(out, tmp_path / "more").task == 3
    mambacl.rollback(out, 1)
    found = mambacl.compare(out, tmp_path / "after.safetensors", place / "both-test")
    assert found.shared == done.comparison.shared
    assert mambacl.report([out]).is_file()
    with pytest.raises(UserError, match="was made from a checkpoint and has no test images"):
        mambacl.evaluate(out)


def test_the_old_model_answers_as_the_checkpoint_did(place: Path, tmp_path: Path) -> None:
    learn(place, tmp_path / "run", "flat", classifier="separate")
    mambacl.rollback(tmp_path / "run", 1)
    model = mambacl.load(tmp_path / "run", "cpu")
    inputs = torch.stack([model.transform(file) for file in sorted((place / "flat").iterdir())])
    whole: Any = mambacl.create_model(
        CONFIG["backbone"], place / "model.safetensors", num_classes=len(OLD), **CONFIG["backbone_options"]
    )
    with torch.no_grad():
        assert_near(model.scores(inputs), whole.eval()(inputs), terms=1000)


def test_a_classifier_from_features_for_a_checkpoint_without_one(place: Path, tmp_path: Path) -> None:
    done = learn(place, tmp_path / "run", weights="bare", classifier_options={"width": 40})
    assert RunFolder(tmp_path / "run").config().method == "analytic" and not done.trained
    with pytest.raises(UserError, match=r"has no classifier, so .*flat must say which class its images have"):
        learn(place, tmp_path / "other", "flat", "bare")


def test_heads_are_aligned_if_each_class_has_images(place: Path, tmp_path: Path) -> None:
    learn(place, tmp_path / "run")
    assert RunFolder(tmp_path / "run").config().classifier == "aligned"


def test_a_dry_run_writes_nothing(place: Path, tmp_path: Path) -> None:
    plan = learn(place, tmp_path / "run", dry_run=True)
    assert not (tmp_path / "run").exists() and plan.folder == tmp_path / "run" and plan.capacity is not None
    assert plan.seconds > 0 and plan.capacity.free and "cover at least about" in plan.notes[0]


def test_mistakes_get_one_sentence_and_leave_nothing(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    (tmp_path / "four.txt").write_text("a\nb\nc\nd\n")
    (tmp_path / "twice.txt").write_text("a\nb\na\n")
    (tmp_path / "empty").mkdir()
    bad = shutil.copytree(place / "flat", tmp_path / "bad")
    (bad / "bad.png").write_text("hello")
    mixed = shutil.copytree(place / "old" / "train", tmp_path / "mixed")
    write_images([mixed / "x.png"])
    broken = shutil.copytree(place / "new" / "train", tmp_path / "broken")
    (broken / "cat" / "bad.png").write_text("hello")
    other = {**CONFIG["backbone_options"], "embed_dim": 16}
    for words, options in (
        ("There is no model 'vimm'", {"backbone": "vimm"}),
        ("also needs --classes", {"classes": None}),
        ("also needs --protect", {"protect": None}),
        ("four.txt has 4 classes, but the classifier in .* has 3", {"classes": tmp_path / "four.txt"}),
        ("the class 'a' twice", {"classes": tmp_path / "twice.txt"}),
        ("with the classes does not exist", {"classes": tmp_path / "gone.txt"}),
        ("has 0 images to protect", {"protect": tmp_path / "empty"}),
        ("bad.png cannot be read", {"protect": bad}),
        ("x.png is in no folder of a known class", {"protect": mixed}),
        ("does not fit this model", {"backbone_options": other}),
        ("already has the class 'ant'", {"new": place / "old" / "train"}),
        ("has no class folders", {"new": tmp_path / "empty"}),
        ("bad.png cannot be read", {"new": broken}),
    ):
        with pytest.raises(UserError, match=words) as error:
            learn(place, out, **options)
        assert "\n" not in str(error.value) and not out.exists(), words
    learn(place, out)
    before = contents(out)
    with pytest.raises(UserError, match="holds another run: choose another --out"):
        learn(place, out, "flat")
    with pytest.raises(UserError, match="is a run and keeps its options: leave out --protect"):
        mambacl.learn(out, place / "new" / "train", protect=place / "flat")
    assert contents(out) == before
    words = ["learn", str(place / "model.safetensors"), "--new", str(place / "new" / "train"), "--backbone", "x"]
    assert "also needs --classes FILE" in fails(capsys, *words)


def test_the_command(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a public model that is small: the options of the model are the same as in training."""
    out = str(tmp_path / "run")
    words = ["learn", str(place / "model.safetensors"), "--new", str(place / "new" / "train")]
    words += ["--backbone", CONFIG["backbone"], "--classes", str(place / "names.txt"), "--out", out]
    words += ["--protect", str(place / "flat"), "--stream.transforms.image_size", "16", "--training.passes", "1"]
    for name, value in CONFIG["backbone_options"].items():
        for key, part in value.items() if isinstance(value, dict) else (("", value),):
            words += [f"--backbone_options.{name}{'.' * bool(key)}{key}", str(part).lower()]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "has learned 2 new classes (cat, dog) from 12 images as task 2" in printed and "cover at least" in printed
    assert printed.endswith(f"`mambacl rollback {out} --task 1` undoes it.\n")


def test_a_full_disk(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def full(source: Path, target: Path) -> None:
        if Path(target).name == "backbone.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(UserError, match="The disk is full"):
            learn(place, tmp_path / "run")
    assert learn(place, tmp_path / "run").task == 2


# The estimate of what some images cover


def test_coverage_of_features_in_a_subspace() -> None:
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(20, 3, generator=generator, dtype=torch.float64))[0]
    inside = torch.randn(40, 3, generator=generator, dtype=torch.float64) @ basis.mT
    assert share_inside(inside, basis) == pytest.approx(1) and directions(inside, 1 - 1e-12).shape == (20, 3)
    found = coverage(inside)
    assert sorted(found.shares) == [5, 10, 20] and found.share > 0.98
    spread = coverage(torch.randn(40, 20, generator=generator))  # 20 images span all of it, fewer do not
    assert spread.shares[5] < spread.shares[10] < spread.shares[20]
    assert abs(spread.shares[5] - 5 / 20) < 0.1
    assert coverage(torch.zeros(8, 4)).share == 1
