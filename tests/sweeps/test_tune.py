"""`mambacl tune` chooses on held-back training images, never on test images, and says what the choice rests on."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import yaml
from sweeps_help import InProcess, write_sweep

import mambacl
from mambacl.cli import main
from mambacl.config import preset_names, resolve
from mambacl.data.dataset import DataSet
from mambacl.data.sets import DATASETS
from mambacl.errors import UserError
from mambacl.options import merge, nested
from mambacl.sweeps import api, driver
from mambacl.sweeps.plan import PlannedRun
from mambacl.sweeps.states import Entry
from mambacl.sweeps.tune import Tried, _best_options, _warnings, ask, judge, plan_of, table
from mambacl.training.folder import RunFolder

POINT = {"training.lr": 1e-3}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> InProcess:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(driver, "EVERY", 0.0)
    made = InProcess()
    monkeypatch.setattr(api, "open_engine", lambda *_: made)
    return made


class Sealed:
    """Test images that nobody may read: there are labels only."""

    def __init__(self, labels: np.ndarray) -> None:
        self.labels = labels

    def __getattr__(self, name: str) -> None:
        raise AssertionError(f"the test images were read: {name}")


@pytest.fixture
def sealed_test_images() -> Iterator[None]:
    """The packaged images, without those of the test split."""
    whole = DATASETS.get("fashion-mnist-small")

    def sealed(root: Path | None) -> DataSet:
        data = whole(root)
        return dataclasses.replace(data, test=Sealed(data.test.labels))

    with patch.dict(DATASETS._entries, {"fashion-mnist-small": sealed}):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("sealed_test_images")
def test_the_whole_search(engine: InProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every run of it, and what is written of them, does without test images."""
    write_sweep(tmp_path)
    search = ["tune", "small.yaml", "--search", "classifier_options.width=2,30", "--stream.train-per-class", "20"]
    search += ["--device", "cpu", "--validation", "0.05", "--out", "found"]
    assert main([*search, "--quiet"]) == 0
    printed = capsys.readouterr()
    assert engine.started == ["analytic-width=2-0", "analytic-width=30-0"]

    evidence = json.loads(Path("found/tune.json").read_text())
    assert evidence["search"] == {"classifier_options.width": [2, 30]} and evidence["kind"] == "grid"
    assert (evidence["preset"], evidence["seeds"], evidence["metric"]) == ("small.yaml", [0], "final_accuracy_tasks")
    assert [one["point"]["classifier_options.width"] for one in evidence["tried"]] == [2, 30]
    for one, key in zip(evidence["tried"], engine.started, strict=True):
        run = RunFolder(Path("found") / key)
        assert one["values"] == [run.results()["metrics"]["final_accuracy_tasks"]] == [one["mean"]]
        assert run.stream()["validation"] == 0.05 and one["runs"] == [key] and one["seconds"] > 0
        assert not list(run.checkpoints.glob("*.safetensors"))  # --keep results
    assert evidence["best"]["point"] == {"classifier_options.width": 30}  # two random features know nothing
    assert evidence["best"]["mean"] > evidence["tried"][0]["mean"] + 0.1
    held = evidence["validation"]
    per_class = held["evaluated_on"] / 10
    assert held["share"] == 0.05 and held["trained_on"] == 200 and per_class == round(0.05 * 250)
    assert {"python", "torch", "mambacl", "commit"} <= set(evidence["versions"])
    assert evidence["warnings"] == [
        "The best classifier_options.width, 30, is at the end of what was searched: try larger values."
    ]
    assert evidence["warnings"][0] in printed.err
    rows = [line.split() for line in printed.out.splitlines() if line.startswith(("2 ", "30 "))]
    assert [row[0] for row in rows] == ["30", "2"] and float(rows[0][1]) == pytest.approx(
        100 * evidence["best"]["mean"], abs=0.051
    )

    assert main([*search, "--quiet"]) == 0 and len(engine.started) == 2  # repeated: nothing is trained again
    capsys.readouterr()
    assert main([*search[:-1], "found", "--stream.train-per-class", "10"]) == 2
    assert "differs in stream.train_per_class" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("sealed_test_images")
def test_a_run_on_the_sealed_test_images_fails(tmp_path: Path) -> None:
    """So the search above would have failed as well, had it read them."""
    write_sweep(tmp_path)
    with pytest.raises(Exception, match="the test images were read"):
        mambacl.train(tmp_path / "small.yaml", out=str(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
def test_the_best_options_train_as_they_stand(engine: InProcess, tmp_path: Path) -> None:
    write_sweep(tmp_path)
    search = {"training.lr": (1e-3, 1e-1), "method": ["sequential", "frozen"]}
    found = mambacl.tune("small.yaml", search, trials=2, seeds=[0, 1], device="cpu", stream={"train_per_class": 4})
    assert len(engine.started) == 4 and found.folder == Path("runs/tune-small-several") and found.best is not None
    assert found.best.deviation is not None and len(found.best.values) == 2
    evidence = json.loads((found.folder / "tune.json").read_text())
    assert evidence["kind"] == "random" and evidence["search"]["training.lr"] == {
        "low": 1e-3,
        "high": 0.1,
        "whole": False,
    }
    run = mambacl.train(found.options)
    config = RunFolder(run.folder).config()
    assert run.folder.name == f"small-tuned-{found.best.point['method']}-0" and config.stream.validation is None
    assert config.training.lr == found.best.point["training.lr"] and config.stream.train_per_class == 4
    assert sum(run.results["total"]) == 100  # few_test_images: ten of each class


@pytest.mark.parametrize("preset", preset_names())
@pytest.mark.parametrize("method", ["analytic", "mamba-cl", "sequential"])
def test_the_file_of_the_best_options_means_what_was_tried(preset: str, method: str, tmp_path: Path) -> None:
    options = {"method": method, "device": "cpu", "training": {"passes_per_epoch": 1}}
    question = ask(preset, {"training.lr": [1e-3, 2e-3]}, options)
    plan = plan_of(question)
    best = Tried({"training.lr": 2e-3}, (0.5,), 1.0, (), {})
    path = tmp_path / "best.yaml"
    path.write_text(_best_options(question, plan, best))
    tried = plan.runs[1].config
    assert tried.stream.validation == 0.2
    changes = {"name": f"{tried.name}-tuned", "out": None, "device": "auto"}
    stream = dataclasses.replace(tried.stream, validation=None)
    assert resolve(path, {}) == dataclasses.replace(tried, **changes, stream=stream)


def test_every_run_of_a_search_holds_training_images_back() -> None:
    question = ask("demo", {"training.lr": [1e-3, 2e-3], "method": ["frozen", "analytic"]}, {}, [0, 1], 0.3)
    assert [run.config.stream.validation for run in plan_of(question).runs] == [0.3] * 8
    for name in ("stream.validation", "stream.test_share", "seed", "out", "name"):
        with pytest.raises(UserError, match=f"A search cannot set {name}"):
            ask("demo", {"training.lr": [1]}, nested({name: 0.5}))


def test_a_run_that_saw_test_images_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if somebody puts its folder there."""
    monkeypatch.chdir(tmp_path)
    question = ask("demo", {"training.lr": [1e-3]}, {})
    plan = plan_of(question)
    [run] = plan.runs
    folder = RunFolder(run.folder)
    folder.create(run.config, {"train": [1], "test": [1]})
    folder.write_results({"schema": 1, "status": "finished", "tasks": [[0]], "correct": [[1]], "total": [1]})
    with pytest.raises(UserError, match=r"was not evaluated on held-back training images \(validation None\)"):
        judge(question, plan, [Entry(run, "finished")])


def finished(run: PlannedRun, value: float, share: float) -> Entry:
    folder = RunFolder(run.folder)
    folder.create(run.config, {"train": [4], "test": [10], "validation": share})
    metrics = {"final_accuracy_tasks": value, "forgetting": 1 - value}
    results = {"schema": 1, "status": "finished", "tasks": [[0]], "correct": [[1]], "total": [10], "metrics": metrics}
    folder.write_results({**results, "seconds": {"train": 2.0}, "versions": {"torch": "3"}})
    return Entry(run, "finished")


def test_the_mean_over_seeds_decides_and_failed_points_cannot_win(tmp_path: Path) -> None:
    question = ask("demo", {"training.lr": [1.0, 2.0, 3.0, 4.0]}, {}, [0, 1])
    plan = plan_of(question, tmp_path)
    values = [0.1, 0.9, 0.6, 0.6, 0.99, None, 0.6, 0.6]  # the third point has lost a run
    entries = [
        Entry(run, "failed", reason="killed") if value is None else finished(run, value, 0.2)
        for run, value in zip(plan.runs, values, strict=True)
    ]
    found = judge(question, plan, entries)
    assert found.best is not None and found.best.point == {"training.lr": 2.0} and found.best.mean == pytest.approx(0.6)
    assert [one.mean for one in found.tried] == pytest.approx([0.5, 0.6, None, 0.6])
    assert found.tried[0].deviation == pytest.approx(0.8 / 2**0.5) and found.best.seconds == 4.0
    assert found.tried[2].failed == {plan.runs[5].key: "killed"} and found.options.is_file()
    evidence = json.loads((tmp_path / "tune.json").read_text())
    assert evidence["tried"][2]["values"] == [0.99, None] and evidence["tried"][2]["mean"] is None
    assert evidence["versions"]["torch"] == "3"
    lines = table(question, found).splitlines()
    order = [line.split()[0] for line in lines if line[:1].isdigit()]
    assert order == ["2.0", "4.0", "1.0", "3.0"] and "final accuracy: mean over tasks" in table(question, found)

    least = dataclasses.replace(question, metric="forgetting")
    assert judge(least, plan, entries).best.point == {"training.lr": 2.0}  # 1 - accuracy here
    nothing = judge(question, plan, [Entry(run, "failed", reason="killed") for run in plan.runs])
    assert nothing.best is None and json.loads((tmp_path / "tune.json").read_text())["best"] is None


def test_points_that_seeds_cannot_tell_apart_are_mentioned() -> None:
    question = ask("demo", {"training.lr": [1.0, 2.0, 3.0]}, {}, [0, 1])
    tried = [Tried({"training.lr": lr}, values, 1.0, (), {}) for lr, values in
             ((1.0, (0.5, 0.5)), (2.0, (0.5, 0.7)), (3.0, (0.55, 0.55)))]  # fmt: skip
    said = "2 other points differ from the best by less than its seeds do among themselves: more seeds would tell more."
    assert _warnings(question, tried, tried[1]) == [said]
    assert _warnings(question, tried[:1], tried[0])[0].endswith("try smaller values.")


def test_images_in_a_folder_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"extends": "images", "training": {"passes": 2}}))
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path)
    question = ask("mine.yaml", {"training.lr": [1.0]}, nested({"stream.root": "photos"}))
    plan = plan_of(question)
    content = yaml.safe_load(_best_options(question, plan, Tried({"training.lr": 1.0}, (1.0,), 1.0, (), {})))
    assert content["stream"]["root"] == str(tmp_path / "photos") and content["extends"] == str(tmp_path / "mine.yaml")
    assert merge(content, {}) == content and content["training"] == {"lr": 1.0}
