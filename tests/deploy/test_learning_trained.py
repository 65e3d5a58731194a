"""A finished run whose method trains learns a further task: the same bits as training gives, nothing lost."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from data_help import contents, make_tree, write_images
from domains_help import make_domains
from small_run import CONFIG

import mambacl
from mambacl.deploy.task_work import nbytes
from mambacl.errors import UserError
from mambacl.files import read_tensors
from mambacl.training.folder import RunFolder
from mambacl.training.loop import Loop

OLD, NEW = ("ant", "bee", "cow"), ("cat", "dog")
PER_CLASS = 7  # more than the few images that need no training
METHODS: dict[str, dict[str, Any]] = {
    "mamba-cl": {},
    "mamba-cl with lda": {"classifier": "lda"},
    "mamba-cl with aligned": {"classifier": "aligned"},
    "sequential": {},
    "frozen": {},
    "seq-adapter": {"options": {"bottleneck": 4}},
    "ease": {"options": {"bottleneck": 4}},
    "slca": {},
    "ewc": {},
    "lwf": {},
    "icarl": {"options": {"memory": "pixels", "images": 12}},
    "der": {"options": {"memory": "pixels", "images": 12}},
    "aper": {"options": {"bottleneck": 4}},
    "ranpac": {"options": {"bottleneck": 4}, "classifier_options": {"width": 50}},
}
ONCE = ("aper", "ranpac")  # train in the first task only


def config(root: Path, tasks: list[int], name: str, **options: Any) -> dict[str, Any]:
    stream = {"dataset": "folders", "root": str(root), "tasks": tasks, "transforms": CONFIG["stream"]["transforms"]}
    method = name.partition(" ")[0]
    shared = CONFIG if method == "mamba-cl" else {k: v for k, v in CONFIG.items() if k != "nullspace"}
    return {**shared, "method": method, "stream": stream, **METHODS[name], **options}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`old` and `new` have different classes, `all` has both, in the order in which they are learned."""
    root = tmp_path_factory.mktemp("photos")
    for part, names in (("old", OLD), ("new", NEW)):
        make_tree(root / part, names, train=PER_CLASS, test=3)
        for name in names:  # a prefix keeps the old classes first
            for split in ("train", "test"):
                shutil.copytree(root / part / split / name, root / "all" / split / f"{part[0] == 'n':d}-{name}")
                shutil.copytree(root / part / split / name, root / f"{split}-of-both" / name)
    return root


@pytest.fixture(scope="module")
def trained(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of mamba-cl with separate heads."""
    out = tmp_path_factory.mktemp("runs") / "small"
    mambacl.train(config(photos / "old", [2, 1], "mamba-cl"), out=str(out))
    return out


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy whose data set is gone: nothing here may need it."""
    copy = shutil.copytree(trained, tmp_path / "run")
    text = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(text.replace("dataset: folders", "dataset: gone"))
    return copy


def scores(run: Path, photos: Path) -> torch.Tensor:
    model = mambacl.load(run, "cpu")
    files = sorted((photos / "all" / "test").rglob("*.png"))
    return model.scores(torch.stack([model.transform(file) for file in files]))


def few(photos: Path, to: Path, count: int = 2) -> Path:
    for name in NEW:
        (to / name).mkdir(parents=True)
        for file in sorted((photos / "new" / "train" / name).iterdir())[:count]:
            shutil.copy(file, to / name)
    return to


@pytest.mark.parametrize("name", METHODS)
def test_learning_gives_what_training_on_all_classes_gives(name: str, photos: Path, tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    mambacl.train(config(photos / "all", [2, 1, 2], name), out=str(whole))
    mambacl.train(config(photos / "old", [2, 1], name), out=str(part))
    before = scores(part, photos)
    done = mambacl.learn(part, photos / "new" / "train")
    assert (done.task, done.new, done.trained, done.notes) == (3, [*NEW], name not in ONCE, [])
    assert mambacl.load(part).classes == [*OLD, *NEW]
    assert torch.equal(scores(part, photos), scores(whole, photos))
    assert done.comparison is not None and done.comparison.shared.images == 3 * len(OLD)  # its own test images
    assert mambacl.rollback(part, 2) == [*OLD] and torch.equal(scores(part, photos), before)
    mambacl.rollback(part, 3)
    assert torch.equal(scores(part, photos), scores(whole, photos))


def test_a_task_after_a_learned_task(run: Path, photos: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    mambacl.train(config(photos / "all", [2, 1, 1, 1], "mamba-cl"), out=str(whole))
    for name in NEW:
        shutil.copytree(photos / "new" / "train" / name, tmp_path / name / name)
        done = mambacl.learn(run, tmp_path / name)
        assert "a single class teaches" in done.notes[0]
    assert done.task == 4 and torch.equal(scores(run, photos), scores(whole, photos))
    mambacl.load(run).save(tmp_path / "model.safetensors")
    assert mambacl.load(tmp_path / "model.safetensors").classes == [*OLD, *NEW]
    with pytest.raises(UserError, match="has no state after task 1; it has those after the tasks 2, 3, 4"):
        mambacl.rollback(run, 1)


@pytest.mark.parametrize("name", ["mamba-cl with lda", "ease"])
def test_few_images_are_learned_without_training(name: str, photos: Path, tmp_path: Path) -> None:
    run, new = tmp_path / "run", few(photos, tmp_path / "few")
    mambacl.train(config(photos / "old", [2, 1], name), out=str(run))
    weights = mambacl.load(run).method.model.state_dict()
    done = mambacl.learn(run, new)
    assert not done.trained and "Nothing is trained" in done.notes[0]
    model = mambacl.load(run)
    assert model.classes == [*OLD, *NEW]
    assert all(torch.equal(t, weights[n]) for n, t in model.method.model.state_dict().items())
    if name == "ease":
        return
    shutil.copytree(photos / "old" / "test" / "ant", tmp_path / "more" / "ant")
    more = mambacl.learn(run, tmp_path / "more", more=True)
    assert not more.trained and more.images == {"ant": 3} and "the classes are known" in more.notes[0]
    again = mambacl.learn(run, _renamed(photos, tmp_path / "again"))  # a task that trains after these
    assert again.trained and mambacl.load(run).classes == [*OLD, *NEW, "cat 2", "dog 2"]


def _renamed(photos: Path, to: Path) -> Path:
    for name in NEW:
        shutil.copytree(photos / "new" / "train" / name, to / f"{name} 2")
    return to


def test_few_images_with_separate_heads_are_trained_and_that_is_said(run: Path, photos: Path, tmp_path: Path) -> None:
    done = mambacl.learn(run, few(photos, tmp_path / "few"))
    assert done.trained and "is trained, here on at most 5 images per class" in done.notes[0]


@pytest.mark.parametrize("method", ["analytic", "mamba-cl"])
def test_another_domain(method: str, tmp_path: Path) -> None:
    """A run on two of three domains learns the third: the same model as a run on all three."""
    root = make_domains(tmp_path / "all", train=6, test=3)
    shutil.copytree(root, tmp_path / "part")
    for split in ("train", "test"):
        shutil.move(tmp_path / "part" / split / "rust", tmp_path / f"{split}-rust" / "rust")
    stream = {"dataset": "domain-folders", "scenario": "domain", "transforms": CONFIG["stream"]["transforms"]}
    own = {**CONFIG, "method": method, "classifier_options": {"width": 40} if method == "analytic" else {}}
    for name in ("all", "part"):
        place = {**stream, "root": str(tmp_path / name)}
        mambacl.train({**own, "stream": place}, out=str(tmp_path / f"run-{name}"))
    run, new = tmp_path / "run-part", tmp_path / "train-rust" / "rust"
    tests = tmp_path / "test-rust" / "rust"
    before = _answers(run, tests)
    done = mambacl.learn(run, new, test=tests)
    assert (done.task, done.new, done.classes) == (3, [], 3) and done.comparison is not None
    assert torch.equal(_answers(run, tests), _answers(tmp_path / "run-all", tests))
    mambacl.rollback(run, 2)
    assert torch.equal(_answers(run, tests), before)
    write_images([tmp_path / "odd" / "yak" / "0.png"])
    with pytest.raises(UserError, match="are domains with the same classes, and 'yak' is not one of them"):
        mambacl.learn(run, tmp_path / "odd")


def _answers(run: Path, tests: Path) -> torch.Tensor:
    model = mambacl.load(run, "cpu")
    return model.scores(torch.stack([model.transform(file) for file in sorted(tests.rglob("*.png"))]))


# Before: the dry run


def test_a_dry_run_says_time_memory_disk_and_capacity(run: Path, photos: Path) -> None:
    before = contents(run)
    plan = mambacl.learn(run, photos / "new" / "train", dry_run=True)
    assert contents(run) == before and not (run / "learned").exists()
    assert plan.seconds > 0 and plan.memory_bytes > 0 and plan.disk_bytes > plan.state_bytes
    assert plan.capacity is not None and plan.capacity.free
    assert all(0 <= share <= 1 for share in plan.capacity.free.values())
    assert "of the directions of the" in plan.capacity.describe()
    done = mambacl.learn(run, photos / "new" / "train")
    written = read_tensors(run / "learned" / "0001.safetensors")[0]
    assert done.state_bytes == nbytes(written.values())
    low, high = _possible_sizes(written)
    assert low <= plan.state_bytes <= high


def _possible_sizes(state: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Of a state whose ranks the whole task decides: a basis (..., d, r) holds the smaller of two spaces, so that r can
    be anything from 0 to d / 2. Parts that share a feature share its basis."""
    bases = {tensor.data_ptr(): tensor for name, tensor in state.items() if name.endswith(".basis")}.values()
    assert bases
    without = nbytes(state.values()) - nbytes(bases)
    columns = sum(basis.nbytes // basis.shape[-1] * (basis.shape[-2] // 2) for basis in bases)
    return without, without + columns


# After: the gate


def test_past_a_limit_the_old_model_stays(trained: Path, photos: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    expected, before = scores(run, photos), contents(run)
    new, tests = photos / "new" / "train", photos / "test-of-both"
    done = mambacl.learn(run, new, test=tests, limits={"max_drift": 0})
    assert len(done.broken) == 1 and "more than the limit of 0.00%" in done.broken[0]
    assert contents(run) == before and torch.equal(scores(run, photos), expected)
    done = mambacl.learn(run, new, limits={"max_drift": 1e6, "max_drop": 100})
    assert not done.broken and done.comparison is not None and mambacl.load(run).classes == [*OLD, *NEW]
    found = mambacl.compare(_exported(trained, tmp_path), run, photos / "old" / "test")
    assert found.shared == done.comparison.shared and found.drift == pytest.approx(done.comparison.drift)


def _exported(run: Path, folder: Path) -> Path:
    mambacl.load(run).save(folder / "before.safetensors")
    return folder / "before.safetensors"


def test_limits_need_test_images(run: Path, photos: Path) -> None:
    for test in (None, photos / "new" / "test"):
        with pytest.raises(UserError, match="Limits need test images of classes that the model knows"):
            mambacl.learn(run, photos / "new" / "train", test=test, limits={"max_drop": 1})
    with pytest.raises(UserError, match="max_drap"):
        mambacl.learn(run, photos / "new" / "train", limits={"max_drap": 1})


# Nothing lost


def test_bad_input_is_refused_before_anything_trains(run: Path, photos: Path, tmp_path: Path) -> None:
    before = contents(run)
    new = shutil.copytree(photos / "new" / "train", tmp_path / "new")
    (new / "cat" / "bad.png").write_text("hello")
    tests = shutil.copytree(photos / "test-of-both", tmp_path / "tests")
    (tests / "ant" / "bad.png").write_text("hello")
    for folder, words, options in (
        (new, "bad.png cannot be read as an image", {}),
        (photos / "new" / "train", "bad.png cannot be read as an image", {"test": tests}),
        (photos / "old" / "train", "already has the class 'ant'", {}),
        (photos / "old" / "train", "is trained task by task, so it cannot take more images of 'ant'", {"more": True}),
    ):
        with pytest.raises(UserError, match=words):
            mambacl.learn(run, folder, **options)
    assert contents(run) == before
    done = mambacl.learn(run, new, skip_bad=True)
    assert done.skipped == ["cat/bad.png"] and done.images == {"cat": PER_CLASS, "dog": PER_CLASS}


def test_a_full_disk_while_training(run: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, replace = scores(run, photos), os.replace

    def full(source: Path, target: Path) -> None:
        if Path(target).name == "last.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(UserError, match="The disk is full"):
            mambacl.learn(run, photos / "new" / "train")
    assert torch.equal(scores(run, photos), expected)
    mambacl.learn(run, photos / "new" / "train")
    assert not RunFolder(run).under_way.exists()


@pytest.mark.parametrize("name", ["mamba-cl", "ease"])
def test_an_interrupted_task_continues(
    name: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, new, epochs = tmp_path / "run", photos / "new" / "train", []
    mambacl.train(config(photos / "old", [2, 1], name), out=str(run))
    other, expected, whole = shutil.copytree(run, tmp_path / "other"), scores(run, photos), Loop._train_epoch
    mambacl.learn(other, new)

    def stopped(self: Loop, task: int, epoch: int) -> None:
        epochs.append(epoch)
        if len(epochs) == 3:
            raise KeyboardInterrupt
        whole(self, task, epoch)

    monkeypatch.setattr(Loop, "_train_epoch", stopped)
    with pytest.raises(KeyboardInterrupt):
        mambacl.learn(run, new)
    assert torch.equal(scores(run, photos), expected)
    mambacl.learn(run, new)
    assert epochs == [0, 1, 2, 2] and torch.equal(scores(run, photos), scores(other, photos))


KILLED = """
import os, signal, sys
import torch
torch.set_num_threads(1)
import mambacl
from mambacl.training.loop import Loop

whole = Loop._train_epoch
def killed(self, task, epoch):
    if epoch == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    whole(self, task, epoch)
Loop._train_epoch = killed
mambacl.learn(sys.argv[1], sys.argv[2])
"""


@pytest.mark.slow
def test_a_killed_task_leaves_the_old_model_and_continues(run: Path, photos: Path, tmp_path: Path) -> None:
    other, new, expected = shutil.copytree(run, tmp_path / "other"), photos / "new" / "train", scores(run, photos)
    mambacl.learn(other, new)
    done = subprocess.run([sys.executable, "-c", KILLED, str(run), str(new)], check=False)
    assert done.returncode == -signal.SIGKILL and torch.equal(scores(run, photos), expected)
    mambacl.learn(run, new)
    assert torch.equal(scores(run, photos), scores(other, photos))
