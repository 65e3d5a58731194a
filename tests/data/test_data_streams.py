"""Streams: first tasks of another size, orders from files, validation images."""

from pathlib import Path

import numpy as np
import pytest
from data_help import MEAN, STD, make_tree
from small_run import CONFIG

import mambacl
from mambacl.cli import main
from mambacl.config import resolve
from mambacl.data import FileImages, StreamConfig, class_order, open_dataset, open_stream, split_into_tasks
from mambacl.errors import UserError


@pytest.mark.parametrize("tasks", [2, 5, 10, 20, 50, 100])
def test_any_number_of_tasks(tasks: int) -> None:
    order = class_order("mamba-cl", 100, 2025)
    parts = split_into_tasks(order, tasks)
    assert len(parts) == tasks and [c for part in parts for c in part] == order


def test_a_first_task_of_another_size() -> None:
    assert [len(task) for task in split_into_tasks(range(100), 6, 50)] == [50, 10, 10, 10, 10, 10]
    assert [len(task) for task in split_into_tasks(range(10), 3, 1)] == [1, 5, 4]
    for tasks, first in ((1, 5), (3, 9), (3, 0), ([5, 5], 5)):
        with pytest.raises(UserError, match="first_task"):
            split_into_tasks(range(10), tasks, first)
    config = StreamConfig(tasks=3, first_task=6)
    assert open_stream(config, 8, MEAN, STD, seed=0, workers=0).describe()["train"] == [1500, 500, 500]


@pytest.mark.parametrize(
    ("name", "seed", "first"),
    [
        ("pilot", 1993, [68, 56, 78, 8, 23, 84, 90, 65, 74, 76]),
        ("mamba-cl", 2024, [55, 17, 75, 11, 2, 29, 49, 48, 41, 45]),
        ("natural", 7, list(range(10))),
        ("coda-prompt", 0, list(range(10))),
    ],
)
def test_the_first_ten_classes_of_each_order(name: str, seed: int, first: list[int]) -> None:
    assert class_order(name, 100, seed)[:10] == first
    for other in (1, 2026):
        assert sorted(class_order(name, 200, other)) == list(range(200))


def test_an_order_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("numbers.txt").write_text("2\n0\n\n1\n")
    Path("names.txt").write_text("größe 2\nb c\na\n", encoding="utf-8")
    Path("digits.txt").write_text("10\n9\n8\n")
    names = ["a", "b c", "größe 2"]
    assert class_order("numbers.txt", 3, names=names) == [2, 0, 1]
    assert class_order("names.txt", 3, names=names) == [2, 1, 0]
    assert class_order("digits.txt", 3, names=["8", "9", "10"]) == [2, 1, 0]  # names that are numbers
    with pytest.raises(UserError, match="names 'größe 2', which is no class"):
        class_order("names.txt", 3, names=["a", "b c", "d"])
    with pytest.raises(UserError, match="each of the 4 classes"):
        class_order("numbers.txt", 4, names=["a", "b", "c", "d"])
    config = resolve("demo", {"stream.order": "numbers.txt"})
    assert config.stream.order == str(tmp_path / "numbers.txt")  # a run can be continued from any folder


def test_a_run_has_its_order_when_the_file_is_gone(tmp_path: Path) -> None:
    file = tmp_path / "order.txt"
    file.write_text("\n".join(map(str, range(9, -1, -1))))
    mambacl.train(CONFIG, method="frozen", out=tmp_path / "run", stream={"order": str(file)})
    file.unlink()
    again = mambacl.evaluate(tmp_path / "run")
    assert again.counted == again.recorded
    assert main(["data", "show", str(tmp_path / "run"), "--out", str(tmp_path / "tasks.png")]) == 0


def test_validation_images_come_from_training_only(tmp_path: Path) -> None:
    make_tree(tmp_path, ("ant", "bee"), train=10, test=2)
    config = StreamConfig(dataset="folders", root=str(tmp_path), tasks=2, validation=0.2)
    stream = open_stream(config, 8, MEAN, STD, seed=3, workers=0)
    train, test = stream.dataset.train, stream.dataset.test
    assert isinstance(train, FileImages) and isinstance(test, FileImages)
    assert np.bincount(train.labels).tolist() == [8, 8] and np.bincount(test.labels).tolist() == [2, 2]
    assert all("train" in path.parts for path in test.files) and not set(train.files) & set(test.files)
    said = stream.describe()
    assert said["validation"] == 0.2 and said["test"] == [2, 2]
    again = open_stream(config, 8, MEAN, STD, seed=4, workers=0)
    assert again.describe()["fingerprint"] == said["fingerprint"]  # the same images whatever the run's seed
    plain = open_stream(StreamConfig(dataset="folders", root=str(tmp_path), tasks=2), 8, MEAN, STD, seed=3, workers=0)
    assert "validation" not in plain.describe()
    for share in (0.0, 1.0, -1.0):
        with pytest.raises(UserError, match="between 0 and 1"):
            StreamConfig(validation=share)
    with pytest.raises(UserError, match="'ant' has one training image"):
        open_dataset("folders", tmp_path).limited(1).with_validation(0.5)


def test_own_tasks_of_a_manifest(tmp_path: Path) -> None:
    make_tree(tmp_path, ("ant", "bee", "cow"))
    rows = ["path,label,split,task"]
    for name, task in (("ant", 2), ("bee", 10), ("cow", 2)):
        rows += [f"train/{name}/{i}.png,{name},train,{task}" for i in range(3)] + [
            f"test/{name}/0.png,{name},test,{task}"
        ]
    (tmp_path / "list.csv").write_text("\n".join(rows))
    config = StreamConfig(dataset="manifest", root=str(tmp_path / "list.csv"), own_tasks=True)
    stream = open_stream(config, 8, MEAN, STD, seed=0, workers=0)
    assert stream.tasks == [[0, 2], [1]] and stream.describe()["train"] == [6, 3]
    labels = [label for _, part in stream.train_batches(1, 0, 10) for label in part.tolist()]
    assert labels == [2, 2, 2]
