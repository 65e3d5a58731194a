"""Class orders and tasks."""

from pathlib import Path

import pytest
from data_help import MEAN, STD
from small_run import CONFIG

import mambacl
from mambacl.cli import main
from mambacl.config import resolve
from mambacl.data import StreamConfig, class_order, open_stream, split_into_tasks
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
def test_class_orders_of_the_public_code_bases(name: str, seed: int, first: list[int]) -> None:
    assert class_order(name, 100, seed)[:10] == first and sorted(class_order(name, 100, seed)) == list(range(100))
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
    with pytest.raises(UserError, match="has 'größe 2', which is not a class"):
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


def test_an_order_starts_from_its_code_bases_seed() -> None:
    assert class_order("pilot", 100) == class_order("pilot", 100, 1993)
    assert class_order("mamba-cl", 100) != class_order("mamba-cl", 100, 2025)
    assert class_order("coda-prompt", 100, 1) != list(range(100))


@pytest.mark.parametrize("order", ["alphabetic", [0, 1, 1], [0, 1], [1, 2, 3]])
def test_wrong_orders(order: str | list[int]) -> None:
    with pytest.raises(UserError, match="class order"):
        class_order(order, 3)


def test_tasks_even_uneven_and_wrong() -> None:
    assert split_into_tasks([3, 1, 2, 0], 2) == [[3, 1], [2, 0]]
    assert split_into_tasks(range(7), 3) == [[0, 1, 2], [3, 4], [5, 6]]
    assert split_into_tasks([3, 1, 2, 0], [1, 3]) == [[3], [1, 2, 0]]
    assert split_into_tasks(range(3), 3) == [[0], [1], [2]]  # an increment of one keeps its last class
    for tasks in (0, 5, [1, 2], [4, 0], [5, -1]):
        with pytest.raises(UserError, match=r"tasks|sizes"):
            split_into_tasks(range(4), tasks)
