"""Classes added to a finished run: the same model as training gives, nothing lost on the way, and back again."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_help import contents, make_tree, write_images
from PIL import Image
from small_run import CONFIG

import mambacl
from mambacl.classifiers import CLASSIFIERS
from mambacl.deploy import learning
from mambacl.deploy.learning import Count, hardly_recognised
from mambacl.errors import UserError
from mambacl.training import learned
from mambacl.training.folder import RunFolder

OLD, NEW = ("ant", "bee", "cow"), ("cat", "dog")


def config(root: Path, tasks: list[int], **options: Any) -> dict[str, Any]:
    stream = {"dataset": "folders", "root": str(root), "tasks": tasks, "transforms": {"image_size": 16}}
    own = {"method": "analytic", "classifier_options": {"width": 40}, "features": {"mirror": "both"}}
    return {**CONFIG, **own, "stream": stream, **options}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`old` and `new` have different classes, `all` has both, in the order in which they are learned."""
    root = tmp_path_factory.mktemp("photos")
    make_tree(root / "old", OLD, train=6, test=4)
    make_tree(root / "new", NEW, train=6, test=4)
    for part, names in (("old", OLD), ("new", NEW)):
        for name in names:  # a prefix keeps the old classes first
            for split in ("train", "test"):
                shutil.copytree(root / part / split / name, root / "all" / split / f"{part[0] == 'n':d}-{name}")
    return root


@pytest.fixture(scope="module")
def trained(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "small"
    mambacl.train(config(photos / "old", [2, 1]), out=str(out))
    return out


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy whose data set is gone: nothing here may need it."""
    copy = shutil.copytree(trained, tmp_path / "run")
    text = (copy / "config.yaml").read_text()
    assert "dataset: folders" in text
    (copy / "config.yaml").write_text(text.replace("dataset: folders", "dataset: gone"))
    return copy


def scores(run: Path, photos: Path) -> torch.Tensor:
    model = mambacl.load(run, "cpu")
    files = sorted((photos / "all" / "test").rglob("*.png"))
    return model.scores(torch.stack([model.transform(file) for file in files]))


def few(photos: Path, to: Path, names: tuple[str, ...] = NEW, count: int = 2, part: str = "new") -> Path:
    """A folder with some images of each class."""
    for name in names:
        (to / name).mkdir(parents=True)
        for file in sorted((photos / part / "train" / name).iterdir())[:count]:
            shutil.copy(file, to / name)
    return to


def state(run: Path) -> dict[str, torch.Tensor]:
    return learning.from_run(RunFolder(run), torch.device("cpu"), with_task_state=True).method.task_state_dict()


# The same model


STATISTICS = [name for name in sorted(CLASSIFIERS.names()) if not CLASSIFIERS.get(name).trains]


@pytest.mark.parametrize("classifier", STATISTICS)
def test_learning_gives_what_training_on_all_classes_gives(classifier: str, photos: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"classifier": classifier, "classifier_options": {}}
    if classifier == "ridge":
        options["classifier_options"] = {"width": 40}
    whole, part = tmp_path / "whole", tmp_path / "part"
    mambacl.train(config(photos / "all", [2, 1, 2], **options), out=str(whole))
    mambacl.train(config(photos / "old", [2, 1], **options), out=str(part))
    done = mambacl.learn(part, photos / "new" / "train", device="cpu")
    assert (done.task, done.new, done.classes, done.images) == (3, [*NEW], 5, {"cat": 6, "dog": 6})
    assert mambacl.load(part).classes == [*OLD, *NEW]
    expected, found = state(whole), state(part)
    assert expected.keys() == found.keys() and done.state_bytes == sum(t.nbytes for t in found.values())
    for name in expected:
        assert torch.equal(expected[name], found[name]), name
    assert torch.equal(scores(whole, photos), scores(part, photos))


def coloured(folder: Path, name: str, colour: tuple[int, int, int], count: int, start: int) -> None:
    """Images of one colour with noise."""
    (folder / name).mkdir(parents=True)
    for number in range(count):
        noise = np.random.default_rng(start + number).integers(-60, 60, (16, 16, 3))
        Image.fromarray((np.array(colour) + noise).clip(0, 255).astype(np.uint8)).save(folder / name / f"{number}.png")


def test_a_few_images_are_enough(tmp_path: Path) -> None:
    """Old classes with 40 images each do not hide new ones with a single image."""
    old = {"red": (230, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220)}
    new = {"pink": (230, 120, 120), "teal": (30, 120, 120)}
    for number, (name, colour) in enumerate(old.items()):
        coloured(tmp_path / "old" / "train", name, colour, 40, 100 * number)
        coloured(tmp_path / "old" / "test", name, colour, 5, 100 * number + 50)
    for number, (name, colour) in enumerate(new.items()):
        coloured(tmp_path / "few", name, colour, 1, 1000 + 100 * number)
        coloured(tmp_path / "new-test", name, colour, 10, 1050 + 100 * number)
    run = tmp_path / "run"
    mambacl.train(config(tmp_path / "old", [2, 1]), out=str(run))
    right = {}
    for unbalanced in (True, False):
        done = mambacl.learn(run, tmp_path / "few", test=tmp_path / "new-test", unbalanced=unbalanced)
        right[unbalanced] = sum(count.right for count in done.after.values())
        mambacl.rollback(run, 2)
    assert right[False] >= 15 and right[True] <= 12, right


def test_more_images_of_known_classes(run: Path, photos: Path, tmp_path: Path) -> None:
    """Learning classes in two parts gives the sums that learning them at once gives."""
    other, parts = shutil.copytree(run, tmp_path / "other"), (tmp_path / "first", tmp_path / "second")
    for name in NEW:
        files = sorted((photos / "new" / "train" / name).iterdir())
        for folder, chosen in zip(parts, (files[:3], files[3:]), strict=True):
            (folder / name).mkdir(parents=True)
            for file in chosen:
                shutil.copy(file, folder / name)
    mambacl.learn(other, photos / "new" / "train")
    mambacl.learn(run, parts[0])
    done = mambacl.learn(run, parts[1], more=True)
    assert (done.task, done.new, done.images) == (4, [], {"cat": 3, "dog": 3})
    counts = "classifier/counts"
    assert torch.equal(state(run)[counts], state(other)[counts]) and state(run)[counts].tolist()[-2:] == [12, 12]
    known = few(photos, tmp_path / "both", ("ant",), part="old")
    write_images([tmp_path / "both" / "eel" / "0.png"], start=77)
    assert mambacl.learn(run, known, more=True).new == ["eel"] and mambacl.load(run).classes[-1] == "eel"


def test_a_class_can_have_a_slash_in_its_name(run: Path, photos: Path, tmp_path: Path) -> None:
    text = (run / "stream.json").read_text()
    (run / "stream.json").write_text(text.replace('"ant"', '"insect/ant"'))
    few(photos, tmp_path / "more" / "insect", ("ant",), part="old")
    done = mambacl.learn(run, tmp_path / "more", more=True, test=tmp_path / "more")
    assert done.new == [] and done.images == {"insect/ant": 2} and list(done.after) == ["insect/ant"]


# Back


def test_a_rollback_gives_the_same_bits(run: Path, photos: Path, tmp_path: Path) -> None:
    recorded, states = {2: scores(run, photos)}, {2: state(run)}
    mambacl.learn(run, few(photos, tmp_path / "cat", ("cat",)))
    recorded[3], states[3] = scores(run, photos), state(run)
    mambacl.learn(run, few(photos, tmp_path / "dog", ("dog",)))
    recorded[4], states[4] = scores(run, photos), state(run)
    for task in (3, 2, 4, 2, 3):
        classes = mambacl.rollback(run, task)
        assert classes == mambacl.load(run).classes and len(classes) == task + 1
        assert torch.equal(scores(run, photos), recorded[task])
        assert all(torch.equal(tensor, states[task][name]) for name, tensor in state(run).items())
    done = mambacl.learn(run, few(photos, tmp_path / "again", ("dog",)))  # task 4, from task 3
    assert done.task == 4 and torch.equal(scores(run, photos), recorded[4])
    assert len(list((run / "learned").iterdir())) == 2
    mambacl.rollback(run, 1)  # the training keeps its last two tasks
    assert mambacl.load(run).classes == ["ant", "bee"]
    assert mambacl.learn(run, few(photos, tmp_path / "first")).task == 2
    assert mambacl.load(run).classes == ["ant", "bee", *NEW] and len(list((run / "learned").iterdir())) == 1


def test_a_task_without_a_state_is_refused(run: Path) -> None:
    with pytest.raises(UserError, match=r"no state after task 7; it has those after the tasks 1, 2 "):
        mambacl.rollback(run, 7)
    (run / "checkpoints" / "task-00.safetensors").unlink()
    with pytest.raises(UserError, match="no state after task 1; it has those after the tasks 2 "):
        mambacl.rollback(run, 1)
    assert not (run / "learned.json").exists()


# The run stays a run


def test_everything_else_works_afterwards(trained: Path, photos: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    before = mambacl.evaluate(run)
    mambacl.learn(run, photos / "new" / "train")
    again = mambacl.evaluate(run)
    assert (before.learned, again.learned, again.total) == (0, 1, before.total) and again.recorded == before.counted
    expected = [0, 0]
    model = mambacl.load(run)
    for name in OLD:
        answers = model.predict(sorted((photos / "old" / "test" / name).iterdir()))
        expected[name == "cow"] += sum(answer.name == name for answer in answers)
    assert again.counted == expected  # the new classes compete
    assert not mambacl.resume(run).trained and mambacl.report([run]).is_file()
    model.save(tmp_path / "model.safetensors")
    loaded = mambacl.load(tmp_path / "model.safetensors")
    assert loaded.classes == [*OLD, *NEW] and loaded.description.card["classes_per_task"] == [2, 1, 2]
    files = sorted((photos / "all" / "test").rglob("*.png"))
    assert loaded.predict(files) == model.predict(files)
    mambacl.rollback(run, 2)
    assert mambacl.evaluate(run).counted == before.counted
    mambacl.rollback(run, 1)
    assert mambacl.evaluate(run).counted == json.loads((run / "results.json").read_text())["correct"][0]
    mambacl.train(config(photos / "old", [2, 1]), out=str(run), overwrite=True)
    assert not (run / "learned.json").exists() and mambacl.load(run).classes == [*OLD]


def test_a_dry_run_says_what_would_happen(run: Path, photos: Path) -> None:
    before = contents(run)
    plan = mambacl.learn(run, photos / "new" / "train", dry_run=True)
    assert contents(run) == before and plan.dry_run and plan.seconds > 0
    assert plan.memory_bytes > 0 and plan.disk_bytes > 0
    assert plan.capacity is not None and "No task takes room from the next" in plan.capacity.describe()
    done = mambacl.learn(run, photos / "new" / "train")
    assert (plan.task, plan.new, plan.images, plan.classes) == (done.task, done.new, done.images, done.classes)
    assert plan.state_bytes == done.state_bytes


def test_new_classes_that_are_hardly_recognised_get_a_warning() -> None:
    after = {"ant": Count(8, 8), "bee": Count(1, 20), "cat": Count(0, 10)}
    [words] = hardly_recognised(after, ["bee", "cat"], 10, heads=True)
    assert "1 of 30 test images of the new classes are recognised" in words and "--classifier lda" in words
    [words] = hardly_recognised(after, ["cat"], 10, heads=False)
    assert "0 of 10" in words and "under the same names" in words
    assert hardly_recognised(after, ["ant", "cat"], 10, heads=True) == []
    assert hardly_recognised({}, ["ant"], 10, heads=True) == []  # without test images nobody knows


def test_test_images_are_counted_before_and_after(run: Path, photos: Path, tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    for part, names in (("old", OLD), ("new", NEW)):
        for name in names:
            shutil.copytree(photos / part / "test" / name, tests / name)

    def counted() -> dict[str, int]:
        model = mambacl.load(run)
        return {n: sum(a.name == n for a in model.predict(sorted((tests / n).iterdir()))) for n in sorted(OLD + NEW)}

    before = counted()
    done = mambacl.learn(run, photos / "new" / "train", test=tests)
    assert {name: count.right for name, count in done.before.items()} == before and before["cat"] == 0
    assert {name: count.right for name, count in done.after.items()} == counted()
    assert {count.total for count in (*done.before.values(), *done.after.values())} == {4}
    write_images([tests / "yak" / "0.png"])
    write_images([tmp_path / "eel" / "eel" / "0.png"])
    with pytest.raises(UserError, match="class 'yak', which neither"):
        mambacl.learn(run, tmp_path / "eel", test=tests)


# Bad input: one sentence, and nothing changes


def refused(run: Path, folder: Path, words: str, **options: Any) -> None:
    before = contents(run) if run.is_dir() else {}
    with pytest.raises(UserError, match=words) as error:
        mambacl.learn(run, folder, **options)
    assert "\n" not in str(error.value) and (contents(run) if run.is_dir() else {}) == before


def test_folders_that_cannot_be_learned(run: Path, photos: Path, tmp_path: Path) -> None:
    for name in ("empty", "hollow/cat"):
        (tmp_path / name).mkdir(parents=True)
    refused(run, tmp_path / "gone", "gone does not exist")
    refused(run, tmp_path / "empty", "has no class folders")
    refused(run, tmp_path / "hollow", "cat has no images: add some")
    refused(run, photos / "new", "holds the folder 'train', not classes")
    refused(run, photos / "old" / "train", "already has the class 'ant': add --more")
    refused(run, photos / "new" / "train", "--test takes a folder", test=tmp_path / "gone")


def test_a_broken_image_is_named_and_skipped_by_choice(run: Path, photos: Path, tmp_path: Path) -> None:
    folder = few(photos, tmp_path / "new")
    (folder / "cat" / "bad.png").write_text("hello")
    for dry_run in (False, True):
        refused(run, folder, r"cat.bad\.png cannot be read .*--skip-bad", dry_run=dry_run)
    done = mambacl.learn(run, folder, skip_bad=True)
    assert done.skipped == ["cat/bad.png"] and done.images == {"cat": 2, "dog": 2}
    (tmp_path / "other" / "eel").mkdir(parents=True)
    (tmp_path / "other" / "eel" / "bad.png").write_text("hello")
    refused(run, tmp_path / "other", "No image of the class 'eel' can be read", skip_bad=True)


def test_runs_that_cannot_learn(trained: Path, run: Path, photos: Path, tmp_path: Path) -> None:
    new = photos / "new" / "train"
    mambacl.load(run).save(tmp_path / "model.safetensors")
    refused(tmp_path / "model.safetensors", new, "lacks the sums")
    results = json.loads((run / "results.json").read_text())
    (run / "results.json").write_text(json.dumps({**results, "status": "interrupted"}))
    refused(run, new, "is not finished: run `mambacl resume")
    refused(tmp_path, new, "is not a run folder")
    with pytest.raises(UserError, match="lacks the sums"):
        mambacl.rollback(tmp_path / "model.safetensors", 1)


def test_a_run_that_is_in_use(run: Path, photos: Path) -> None:
    with RunFolder(run).locked():
        refused(run, photos / "new" / "train", r"Another process \(\d+ on .*\) is training")
        mambacl.learn(run, photos / "new" / "train", dry_run=True)  # only reads


def test_a_damaged_pointer_or_state_says_what_to_do(run: Path, photos: Path, tmp_path: Path) -> None:
    mambacl.learn(run, few(photos, tmp_path / "new"))
    pointer = run / "learned.json"
    text = pointer.read_text()
    for content, words in (
        ('{"schema": 9}', "reads schema 1"),
        ('{"schema": 1}', "is damaged: restore the file, or remove it"),
        (text.replace('"current": 3', '"current": 4'), "is damaged"),
    ):
        pointer.write_text(content)
        with pytest.raises(UserError, match=words):
            mambacl.load(run)
    pointer.write_text(text)
    shutil.rmtree(run / "learned")
    with pytest.raises(UserError, match=r"state after task 3 of .* is missing: .*--task 2"):
        mambacl.load(run)
    mambacl.rollback(run, 2)
    assert mambacl.load(run).classes == [*OLD]


@pytest.mark.parametrize("step", ["write_state", "switch"])
def test_a_full_disk_changes_nothing(
    step: str, run: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full before the state's file is complete, or learned.json."""
    mambacl.learn(run, few(photos, tmp_path / "cat", ("cat",)))
    expected, more = scores(run, photos), few(photos, tmp_path / "dog", ("dog",))
    replace, name = os.replace, {"write_state": "0002.safetensors", "switch": "learned.json"}[step]

    def full(source: Path, target: Path) -> None:
        if target.name == name:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(UserError, match="The disk is full"):
            mambacl.learn(run, more)
    assert torch.equal(scores(run, photos), expected) and not list(run.rglob("*.part"))
    assert mambacl.learn(run, more).task == 4 and len(list((run / "learned").iterdir())) == 2
    mambacl.rollback(run, 3)
    assert torch.equal(scores(run, photos), expected)


KILLED = """
import os, signal, sys
import mambacl
from mambacl.training import learned

step, run, new = sys.argv[1:]
when, name = step.split()
whole = getattr(learned, name)

def killed(*arguments):
    if when == "after":
        whole(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)

setattr(learned, name, killed)
mambacl.learn(run, new)
"""


@pytest.mark.slow
@pytest.mark.parametrize("step", ["before write_state", "after write_state", "after switch", "before remove_unnamed"])
def test_a_killed_process_leaves_a_whole_model(step: str, run: Path, photos: Path, tmp_path: Path) -> None:
    """Before the switch the old one, after it the new one; and the next learning works."""
    other, new = shutil.copytree(run, tmp_path / "other"), few(photos, tmp_path / "new")
    mambacl.learn(other, new)
    expected = scores(run if "write_state" in step else other, photos)
    done = subprocess.run([sys.executable, "-c", KILLED, step, str(run), str(new)], check=False)
    assert done.returncode == -signal.SIGKILL and torch.equal(scores(run, photos), expected)
    mambacl.rollback(run, 2)
    mambacl.learn(run, new)
    assert torch.equal(scores(run, photos), scores(other, photos))
    assert [path.name for path in (run / "learned").iterdir()] == [
        learned.read_history(RunFolder(run), 2).tasks[0].file
    ]
