"""The commands learn and rollback, and the code of docs/learn.md."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_help import fails
from data_help import contents, make_tree
from small_run import CONFIG

import mambacl
from mambacl.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "learn.md"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    make_tree(root / "old", ("ant", "bee", "cow"), train=4, test=3)
    make_tree(root / "new", ("cat", "dog"), train=4, test=3)
    stream = {"dataset": "folders", "root": str(root / "old"), "tasks": [2, 1], "transforms": {"image_size": 16}}
    own = {"method": "analytic", "classifier_options": {"width": 40}, "stream": stream}
    mambacl.train({**CONFIG, **own}, out=str(root / "run"))
    shutil.copytree(root / "old" / "test", root / "tests")
    shutil.copytree(root / "new" / "test", root / "tests", dirs_exist_ok=True)
    return root


@pytest.fixture
def place(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a run and folders of images; its data set is `trained`'s."""
    here = shutil.copytree(trained, tmp_path / "here")
    monkeypatch.chdir(here)
    return here


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(words) == 0
    return capsys.readouterr().out


def test_learn_predict_and_go_back(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predict = ("predict", "run", "tests", "--json", "--top", "9")
    first, before = printed(capsys, *predict), contents(place / "run")
    out = printed(capsys, "learn", "run", "--new", "new/train", "--dry-run")
    assert "would learn 2 new classes (cat, dog) from 8 images as task 3" in out and "Nothing has changed." in out
    assert "of memory and" in out and contents(place / "run") == before
    out = printed(capsys, "learn", "run", "--new", "new/train", "--test", "tests")
    assert "has learned 2 new classes (cat, dog) from 8 images as task 3" in out and "has 5 classes" in out
    assert out.endswith("`mambacl rollback run --task 2` undoes it.\n")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if re.match(r"(ant|bee|cow|cat|dog) ", line)}
    assert [rows[name][0] for name in ("ant", "bee", "cow", "cat", "dog")] == ["known"] * 3 + ["new"] * 2
    assert all(row[1] == "3" for row in rows.values()) and rows["cat"][2] == "-" and rows["ant"][2].endswith("%")
    assert "all known" in out and "all new" in out
    second = json.loads(printed(capsys, *predict))
    assert {best["class"] for best in second[0]["predictions"]} == {"ant", "bee", "cow", "cat", "dog"}
    out = printed(capsys, "evaluate", "run")
    assert "The model has learned 1 more task since." in out and "task   3" not in out
    assert "5 classes" in printed(capsys, "export", "run")
    out = printed(capsys, "rollback", "run", "--task", "2")
    assert out == "run answers as after task 2, with 3 classes (ant, bee, cow).\n"
    assert printed(capsys, *predict) == first
    assert "The run recorded the same counts." in printed(capsys, "evaluate", "run")


def test_the_model_before_can_be_compared(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "export", "run", "--out", "before.safetensors")
    printed(capsys, "learn", "run", "--new", "new/train")
    comparison = mambacl.compare("before.safetensors", "run", "tests")
    assert (comparison.old.classes, comparison.new.classes) == (3, 5)
    assert [one.name for one in comparison.classes if one.is_new] == ["cat", "dog"]


def test_past_a_limit_the_run_keeps_its_model(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Test images of cats with the name that the model gave them before: it learns their right name."""
    before = contents(place / "run")
    answers = json.loads(printed(capsys, "predict", "run", "new/train/cat", "--json"))
    known = answers[0]["predictions"][0]["class"]  # what it calls a cat, before it knows cats
    shutil.copytree(place / "new" / "train" / "cat", place / "odd" / known)
    (place / "many" / "cat").mkdir(parents=True)
    for number in range(40):  # more than the class needs to outweigh the others
        shutil.copy(place / "new" / "train" / "cat" / f"{number % 4}.png", place / "many" / "cat" / f"{number}.png")
    words = ("learn", "run", "--new", "many", "--test", "odd", "--max-negative-flips", "0")
    assert main(words) == 1
    out, err = capsys.readouterr()
    assert "were right before and are wrong now" in err and out.endswith("run keeps its old model.\n")
    assert contents(place / "run") == before
    (place / "limits.yaml").write_text("max_negative_flips: 1\nmax_drop: 100\n")
    out = printed(capsys, *words[:-2], "--limits", "limits.yaml")
    assert "negative flips" in out and "The new model is within the limits." in out


def test_what_was_skipped_and_added_is_said(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "new" / "train" / "cat" / "bad.png").write_text("hello")
    shutil.copytree(place / "old" / "test" / "ant", place / "new" / "train" / "ant")
    out = printed(capsys, "learn", "run", "--new", "new/train", "--more", "--skip-bad")
    assert "2 new classes (cat, dog) and more of 1 known ones from 11 images" in out
    assert "1 image could not be read and was skipped." in out


def test_mistakes_get_one_sentence(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "export", "run", "--out", "model.safetensors")
    before = contents(place / "run")
    for words, sentence in (
        (["learn", "run"], "Name the folder with the new classes"),
        (["learn", "gone", "--new", "new/train"], "gone is not a run folder"),
        (["learn", "model.safetensors", "--new", "new/train"], "lacks the sums"),
        (["learn", "run", "--new", "old/train"], "already has the class 'ant': add --more"),
        (["learn", "run", "--new", "new"], "give new/train to --new"),
        (["rollback", "run"], "Name the task to go back to"),
        (["rollback", "run", "--task", "0"], "at least 1"),
        (["rollback", "run", "--task", "5"], "no state after task 5"),
        (["rollback", "gone", "--task", "1"], "gone is not a run folder"),
    ):
        assert sentence in fails(capsys, *words), words
    assert contents(place / "run") == before


def test_the_code_of_the_page_runs(place: Path) -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    shutil.move(place / "run", place / "runs" / "photos-analytic-0")
    shutil.move(place / "new" / "train", place / "more-photos")
    shutil.move(place / "tests", place / "test-photos")
    shutil.copy(place / "more-photos" / "cat" / "0.png", place / "photo.jpg")
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["plan"].new == names["done"].new == ["cat", "dog"] and names["done"].task == 3
    assert mambacl.load("runs/photos-analytic-0").classes == ["ant", "bee", "cow"]
