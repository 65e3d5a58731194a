"""What a run's page says about classes: accuracy, mistakes with images of the run's data, and classes learned since."""

import shutil
from pathlib import Path

import pytest
from data_help import make_tree
from reports_help import make_run
from small_run import CONFIG

import mambacl
from mambacl.reports import load_run, write_report
from mambacl.reports.confusions import classes_table, pairs_table
from mambacl.training.confusion import Confusion

NAMES = ("猫", "犬", "馬", "鳥")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a folder of random images, which cannot be told apart, and which has learned a class since."""
    root = tmp_path_factory.mktemp("trained")
    make_tree(root / "my photos", NAMES, train=4, test=5)
    make_tree(root / "new", ("cow",), train=4, test=0)
    stream = {"dataset": "folders", "root": str(root / "my photos"), "tasks": 2, "transforms": {"image_size": 16}}
    own = {"name": "images", "method": "analytic", "classifier_options": {"width": 40}, "stream": stream}
    mambacl.train({**CONFIG, **own}, out=str(root / "run"))
    mambacl.learn(root / "run", root / "new" / "train")
    return root


def test_the_page_shows_classes_mistakes_and_learned_tasks(trained):
    html = write_report([trained / "run"]).read_text(encoding="utf-8")
    assert "<title>analytic on my photos</title>" in html
    record = load_run(trained / "run")
    assert record.confusion is not None and record.learned is not None
    wrong = sum(count for _, count in record.confusion.mistakes())
    assert wrong == sum(record.results["total"]) - sum(record.results["correct"][-1]) > 0
    assert html.count('src="data:image/jpeg;base64,') == sum(map(len, record.confusion.examples.values())) > 0
    assert "Learned since" in html and "cow" in html and "classes learned since <b>1</b>" in html
    assert all(name in html for name in NAMES) and "task-confusion.csv" in html and "mistakes.csv" in html


def test_no_images_without_the_data(trained, tmp_path):
    copy = shutil.copytree(trained / "run", tmp_path / "run")
    text = (copy / "config.yaml").read_text(encoding="utf-8")
    (copy / "config.yaml").write_text(text.replace("my photos", "gone"), encoding="utf-8")
    html = write_report([copy]).read_text(encoding="utf-8")
    assert "The page has no sample images, because the run&#39;s data cannot be read" in html
    assert "image/jpeg" not in html and "taken for" in html
    assert not [path for path in copy.rglob("*") if path.suffix in (".jpg", ".jpeg")]


def test_no_images_of_changed_data(trained, tmp_path):
    copy = shutil.copytree(trained, tmp_path / "copy")
    next((copy / "my photos" / "test" / NAMES[0]).iterdir()).unlink()
    text = (copy / "run" / "config.yaml").read_text(encoding="utf-8")
    (copy / "run" / "config.yaml").write_text(text.replace(str(trained), str(copy)), encoding="utf-8")
    assert "The data have changed since the run" in write_report([copy / "run"]).read_text(encoding="utf-8")


def test_a_run_without_recorded_answers_still_has_a_page(trained, tmp_path):
    copy = shutil.copytree(trained / "run", tmp_path / "run")
    (copy / "confusion.json").unlink()
    html = write_report([copy]).read_text(encoding="utf-8")
    assert "Classes and mistakes" not in html and "Classes by task" in html


def test_the_tables_by_hand(tmp_path):
    run = load_run(make_run(tmp_path / "a", [[9], [8, 5]], [10, 6], class_names=["a", "b", "c", "d"]))
    found = Confusion({(0, 0): 4, (0, 3): 1, (1, 1): 4, (1, 2): 1, (2, 2): 2, (2, 0): 1, (3, 3): 3})
    rows = [(row[0], row[1], row[2], row[3], round(row[4].mean), row[5]) for row in classes_table(run, found).rows]
    assert rows == [
        ("a", "1", "5", "4", 80, "d (1)"), ("b", "1", "5", "4", 80, "c (1)"), ("c", "2", "3", "2", 67, "a (1)"),
        ("d", "2", "3", "3", 100, None),
    ]  # fmt: skip
    assert [row[:3] for row in pairs_table(run, found, found.mistakes()).rows] == [
        ("a", "d", "1"), ("b", "c", "1"), ("c", "a", "1")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("benchmark", "stream", "title"),
    [
        ("demo", {"dataset": "folders", "root": "/data/birds"}, "birds"),
        ("images", {"dataset": "folders", "root": "/data/birds.v2"}, "birds.v2"),
        ("demo", {"dataset": "manifest", "root": "/data/list.csv"}, "list"),
        ("mine", {"dataset": "folders", "root": "/data/birds"}, "mine"),
        ("demo", {"dataset": "fashion-mnist", "root": "/data/fashion"}, "demo"),
        ("images", {"dataset": "folders", "root": None}, "images"),
    ],
)
def test_a_run_on_own_images_has_the_name_of_their_folder(tmp_path, benchmark, stream, title):
    run = make_run(tmp_path / "a", [[9]], [10], benchmark=benchmark, config={"stream": stream})
    assert load_run(run).benchmark == title
