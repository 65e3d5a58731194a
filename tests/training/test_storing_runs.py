"""Runs of methods that store images: what their files say, that they resume, and what leaves the run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from data_help import fewer_test_images, make_tree
from safetensors.torch import load_file
from small_run import CONFIG
from training_help import assert_same_run, final_parameters, interrupted_after

import mambacl
from mambacl.cli import main
from mambacl.deploy.model_file import tensors_of
from mambacl.errors import UserError
from mambacl.reports.groups import group_runs
from mambacl.reports.pages import run_page
from mambacl.reports.runs import load_run
from mambacl.reports.tables import comparison_table

pytestmark = pytest.mark.usefixtures("few_test_images")


def train(folder: Path, method: str = "icarl", **options: Any) -> mambacl.Run:
    training = {**CONFIG["training"], "passes": 2, "decay_after": [1]}
    return mambacl.train(CONFIG, out=str(folder), method=method, options={"images": 20, **options}, training=training)


@pytest.fixture(scope="module")
def indices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with fewer_test_images(10):
        return train(tmp_path_factory.mktemp("indices") / "run").folder


@pytest.mark.parametrize("method", ["icarl", "der"])
def test_positions_and_pixels_train_the_same_and_resume(method: str, indices: Path, tmp_path: Path) -> None:
    """Interrupted within the second task, when stored images are among its batches."""
    whole = indices if method == "icarl" else train(tmp_path / "indices", method).folder
    pixels = train(tmp_path / "pixels", method, memory="pixels")
    with interrupted_after(4):
        train(tmp_path / "broken", method, memory="pixels")
    mambacl.resume(tmp_path / "broken")
    assert_same_run(pixels.folder, tmp_path / "broken")
    for name, tensor in final_parameters(whole).items():
        assert torch.equal(tensor, final_parameters(pixels.folder)[name]), name
    assert pixels.results["correct"] == json.loads((whole / "results.json").read_text())["correct"]
    states = [load_file(folder / "checkpoints" / "task-02.safetensors") for folder in (whole, pixels.folder)]
    assert "stored/pixels" not in states[0] and len(states[1]["stored/pixels"]) == 20 * 3 * 28 * 28
    assert torch.equal(states[0]["stored/positions"], states[1]["stored/positions"])
    assert states[0]["stored/labels"].bincount().tolist() == [2] * 10


def test_the_memory_changes_what_is_learned(indices: Path, tmp_path: Path) -> None:
    other = train(tmp_path / "run", per_class=1)
    first = load_file(indices / "checkpoints" / "task-02.safetensors")
    assert len(first["stored/labels"]) == 20 and other.results["stored_images"] == 10
    name = "method.heads.0.weight"
    assert not torch.equal(final_parameters(indices)[name], final_parameters(other.folder)[name])


def test_results_tables_and_pages_mark_it(indices: Path, tmp_path: Path) -> None:
    plain = mambacl.train(CONFIG, out=str(tmp_path / "plain"), method="frozen").folder
    results = json.loads((indices / "results.json").read_text())
    assert results["stored_images"] == 20
    assert "stored_images" not in json.loads((plain / "results.json").read_text())
    records = [load_run(indices), load_run(plain)]
    assert [group.name for group in group_runs(records)] == ["icarl*", "frozen"]
    table = comparison_table(records)
    assert table.rows[0][0] == "icarl*"
    assert "* stores training images of earlier tasks, up to 20; the others store none" in table.notes
    assert not any("stores" in note for note in comparison_table(records[1:]).notes)
    pages = [run_page(record).html for record in records]
    assert "stored training images <b>20</b>" in pages[0] and "stored training images" not in pages[1]


def test_the_run_says_so_at_its_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), interrupted_after(1):
        train(tmp_path / "run")
    assert "stores training images: up to 20 images of earlier tasks, as positions in the data set" in caplog.text


def test_the_list_of_methods_marks_them(capsys: pytest.CaptureFixture[str]) -> None:
    main(["methods"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "*" in line] == ["der*", "icarl*", "*"]
    assert "options.memory" in lines[-1]


@pytest.mark.parametrize("method", ["icarl", "der"])
def test_an_exported_model_has_no_images_and_predicts_the_same(method: str, tmp_path: Path) -> None:
    run = train(tmp_path / "run", method, memory="pixels")
    model = mambacl.load(run.folder, "cpu")
    assert not any("stored" in name for name in tensors_of(model.method))
    model.save(tmp_path / "model.safetensors")
    images = torch.randn(5, 3, 16, 16)
    assert torch.equal(mambacl.load(tmp_path / "model.safetensors", "cpu").scores(images), model.scores(images))
    assert not any("stored" in name for name in load_file(tmp_path / "model.safetensors"))
    evaluation = mambacl.evaluate(run.folder)
    assert evaluation.counted == evaluation.recorded


def test_learning_with_pixels_can_be_estimated_and_needs_no_steps_for_few_images(tmp_path: Path) -> None:
    """iCaRL's class means need no training; DER's heads do."""
    new = make_tree(tmp_path / "new", ("cat", "dog"), train=3, test=1) / "train"
    for method, trained in (("icarl", False), ("der", True)):
        run = train(tmp_path / method, method, memory="pixels").folder
        mambacl.learn(run, new, dry_run=True)
        assert len(mambacl.load(run, "cpu").classes) == 10
        assert mambacl.learn(run, new).trained == trained
        assert len(mambacl.load(run, "cpu").classes) == 12


def test_too_small_a_memory_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"options\.images = 9 is too few for 10 classes"):
        train(tmp_path / "run", images=9)
    assert not (tmp_path / "run").exists()


def test_learning_needs_the_pixels(indices: Path, tmp_path: Path) -> None:
    run = shutil.copytree(indices, tmp_path / "run")
    new = make_tree(tmp_path / "new", ("cat", "dog"), train=7, test=1) / "train"
    with pytest.raises(UserError, match=r"stores images as positions.*--options\.memory pixels"):
        mambacl.learn(run, new)
    assert mambacl.load(run, "cpu").classes == mambacl.load(indices, "cpu").classes
