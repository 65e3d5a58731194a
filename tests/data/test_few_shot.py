"""Few-shot streams: which classes and images, by seed or by a protocol's lists; and runs on them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_help import MEAN, STD, make_tree, random_arrays
from small_run import CONFIG

import mambacl
from mambacl.cli import main
from mambacl.data import DATASETS, ArrayImages, DataSet, Stream, StreamConfig, TransformConfig, Transforms, open_stream
from mambacl.data.few_shot import sessions, with_sessions
from mambacl.errors import UserError
from mambacl.reports import write_report


def few_shot(**options: Any) -> StreamConfig:
    return StreamConfig(**{"scenario": "few-shot", "first_task": 4, "way": 3, "shot": 2, **options})


def numbered(classes: int = 10, each: int = 6) -> DataSet:
    """Each image's pixels are its number; labels go round."""
    count = classes * each
    pixels = np.broadcast_to(np.arange(count, dtype=np.uint8)[:, None, None], (count, 4, 4)).copy()
    labels = np.arange(count) % classes
    return DataSet(
        "numbers", [f"c{c}" for c in range(classes)], ArrayImages(pixels, labels), ArrayImages(pixels, labels)
    )


def images_of(dataset: DataSet, c: int) -> list[int]:
    """The numbers of a class's training images."""
    images = dataset.train
    assert isinstance(images, ArrayImages)
    return images.pixels[images.labels == c, 0, 0].tolist()


def test_base_classes_and_sessions() -> None:
    """Those of the published protocols, and of what is left over a clear sentence."""
    for classes, base, way, expected in ((100, None, 5, [60] + [5] * 8), (200, 100, 10, [100] + [10] * 10)):
        made = sessions(range(classes), base, way)
        assert [len(task) for task in made] == expected and [c for task in made for c in task] == list(range(classes))
    for classes, base, way in ((10, 5, 4), (10, 10, 5), (4, None, 5)):
        with pytest.raises(UserError, match=r"stream\.first_task and stream\.way"):
            sessions(range(classes), base, way)


def test_images_depend_on_the_seed_and_the_class_alone() -> None:
    whole = numbered()
    made = with_sessions(whole, few_shot())
    assert made.tasks == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert [len(images_of(made, c)) for c in range(10)] == [6] * 4 + [2] * 6
    assert all(set(images_of(made, c)) <= set(images_of(whole, c)) for c in range(10))
    assert len(made.test.labels) == 60
    other = with_sessions(whole, few_shot(order="mamba-cl", order_seed=3))
    assert other.tasks is not None and other.tasks != made.tasks
    for c in set(other.tasks[1] + other.tasks[2]) - set(made.tasks[0]):
        assert images_of(other, c) == images_of(made, c)
    drawn = {tuple(images_of(with_sessions(whole, few_shot(shot_seed=seed)), c)) for seed in range(20) for c in (9,)}
    assert len(drawn) > 5  # of 15 pairs
    assert with_sessions(whole, few_shot()).fingerprint() == made.fingerprint()
    assert with_sessions(whole, few_shot(shot_seed=1)).fingerprint() != made.fingerprint()


def test_too_few_images_of_a_class() -> None:
    with pytest.raises(UserError, match=r"'c4' has 6 training images, fewer than 7: lower stream\.shot"):
        with_sessions(numbered(), few_shot(shot=7))


def write_lists(folder: Path, lists: dict[int, list[Any]]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for number, lines in lists.items():
        (folder / f"session_{number}.txt").write_text("\n".join(map(str, lines)) + "\n")
    return str(folder)


def test_lists_of_numbers(tmp_path: Path) -> None:
    """Classes in the order of the lists; the base classes are the others, or those of session_1.txt."""
    lists = write_lists(tmp_path / "lists", {2: [57, 15, 7], 3: [19, 8]})
    made = with_sessions(numbered(), few_shot(session_lists=lists))
    assert made.tasks == [[0, 1, 2, 3, 4, 6], [7, 5], [9, 8]]
    assert (images_of(made, 7), images_of(made, 5), images_of(made, 0)) == ([7, 57], [15], list(range(0, 60, 10)))
    write_lists(tmp_path / "lists", {1: [12, 3, 4, 6, 11, 10, 1]})
    made = with_sessions(numbered(), few_shot(session_lists=lists))
    assert made.tasks is not None and made.tasks[0] == [2, 3, 4, 6, 1, 0] and images_of(made, 1) == [1, 11]


def test_lists_of_files(tmp_path: Path) -> None:
    """By name, and by folder and name where several have the name, as in both public forms."""
    make_tree(tmp_path / "data", ("ant", "bee", "cow"), train=4, test=1)
    (tmp_path / "data" / "train" / "cow" / "3.png").rename(tmp_path / "data" / "train" / "cow" / "unlike.png")
    lists = write_lists(tmp_path / "lists", {2: ["MINI/images/unlike.png", "elsewhere/cow/1.png"]})
    config = few_shot(dataset="folders", root=str(tmp_path / "data"), session_lists=lists)
    stream = open_stream(config, 8, MEAN, STD, seed=0, workers=0)
    assert stream.tasks == [[0, 1], [2]] and stream.describe()["train"] == [8, 2]
    names = [stream.dataset.train.name(i) for i in stream._train[1]]
    assert names == ["cow/1.png", "cow/unlike.png"]


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        ({3: [1]}, "has no session_2.txt"),
        ({2: [60]}, "names '60', which is not one training image"),
        ({2: ["x.png"]}, "names 'x.png', which is not one training image"),
        ({2: [7, 7]}, "names an image twice"),
        ({2: [7], 3: [17]}, "The class 'c7' of numbers is in several lists"),
        ({1: [0], 2: [7]}, "The class 'c1' of numbers is in no list"),
        ({2: []}, "is empty"),
        ({2: list(range(10))}, "leave no base classes"),
    ],
)
def test_wrong_lists(lists: dict[int, list[Any]], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        with_sessions(numbered(), few_shot(session_lists=write_lists(tmp_path / "lists", lists)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"session_lists": "x", "scenario": "class"}, "session_lists needs .*scenario few-shot"),
        ({"tasks": [4, 6]}, "the tasks follow from .*first_task and .*way"),
        ({"own_tasks": True}, "the tasks follow from .*first_task and .*way"),
        ({"way": 0}, "way must be at least 1"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        few_shot(**options)


@pytest.mark.parametrize("engine", ["torchvision", "batched"])
def test_a_stream_trains_on_the_few_and_tests_on_all(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATASETS._entries, "random", lambda root: random_arrays(10, 6, 3, (8, 8)))
    config = few_shot(dataset="random", transforms=TransformConfig(engine=engine))  # type: ignore[arg-type]
    stream = open_stream(config, 8, MEAN, STD, seed=0, workers=0)
    assert stream.describe()["train"] == [24, 6, 6] and stream.test_counts() == [12, 9, 9]
    assert stream.describe()["scenario"] == "few-shot" and stream.class_order == list(range(10))
    labels = sorted(label for _, part in stream.train_batches(1, 0, 4) for label in part.tolist())
    assert labels == [4, 4, 5, 5, 6, 6]
    plain = Stream(stream.dataset, Transforms(TransformConfig(), 8, MEAN, STD), "own")
    assert plain.tasks == stream.tasks


STREAM = {"scenario": "few-shot", "first_task": 6, "way": 2, "shot": 3, "tasks": 5, "order": "natural"}


@pytest.mark.usefixtures("few_test_images")
@pytest.mark.parametrize("method", ["analytic", "simplecil", "frozen"])
def test_runs_of_other_methods(method: str, tmp_path: Path) -> None:
    options = {"classifier_options": {"width": 100}} if method == "analytic" else {}
    run = mambacl.train(CONFIG, out=str(tmp_path / "run"), method=method, stream=STREAM, **options)
    results = run.results
    assert results["scenario"] == "few-shot" and results["tasks"] == [[0, 1, 2, 3, 4, 5], [6, 7], [8, 9]]
    assert results["total"] == [60, 20, 20]
    first, last = results["correct"][0][0] / 60, sum(results["correct"][-1]) / 100
    assert results["metrics"]["performance_drop"] == pytest.approx(first - last)
    assert mambacl.evaluate(run.folder).counted == results["correct"][-1]
    known = mambacl.evaluate(run.folder, scenario="task")
    assert all(high >= low for high, low in zip(known.counted, results["correct"][-1], strict=True))
    with pytest.raises(UserError, match="with the scenarios few-shot and task, not 'class'"):
        mambacl.evaluate(run.folder, scenario="class")
    page = write_report([run.folder]).read_text()
    assert "few-shot-incremental" in page and "few images of each class" in page


def test_few_shot_tasks_are_shown_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tree(tmp_path / "data", tuple("abcdefgh"), train=6, test=1)
    options = ["folders", "--root", str(tmp_path / "data"), "--scenario", "few-shot", "--first-task", "3"]
    assert main(["data", "show", *options, "--out", str(tmp_path / "tasks.png")]) == 0
    printed = capsys.readouterr().out
    assert "8 classes in 2 tasks" in printed and "25 + 5 images" in printed
    assert main(["data", "check", *options]) == 0
    assert "task   2:    5 classes" in capsys.readouterr().out  # all their images are checked
