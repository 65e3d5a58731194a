"""The examples run, in their smallest form."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import yaml
from small_run import CONFIG
from training_help import interrupted_after

from mambacl.bench.page import accuracies
from mambacl.config import resolve

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("few_test_images")
def test_the_calibration_is_measured_half_way_and_at_the_end(monkeypatch, tmp_path):
    calibration = example("calibration")
    preset = tmp_path / "small.yaml"
    preset.write_text(
        yaml.safe_dump({**CONFIG, "method": "analytic", "classifier_options": {"width": 40, "ridge": 1.0}})
    )
    monkeypatch.setattr(
        calibration, "RUNS", {"small": (str(preset), {"stream.train_per_class": 16}), "CIFAR": (str(preset), {})}
    )
    monkeypatch.setattr(calibration, "HELD_BACK", {str(preset): 0.25})
    path = tmp_path / "calibration.json"
    calibration.main(["--out", str(tmp_path / "runs"), "--json", str(path)])
    record = json.loads(path.read_text())
    names = [
        f"small, {place}, {images}" for images in ("held-back", "test") for place in ("half of the tasks", "all tasks")
    ]
    assert list(record["rows"]) == names and list(record["tables"]) == ["held-back", "test"]
    half, whole = (record["rows"][name] for name in names[2:])
    assert (half["classes"], whole["classes"]) == ("4", "10")
    assert 0 <= half["others accepted"] <= 100 and "others accepted" not in whole
    assert all(0 <= whole[column] <= 100 for column in calibration.COLUMNS[1:6])
    assert accuracies(record, "test").count("\n") == 4


@pytest.mark.usefixtures("few_test_images")
def test_the_study_tunes_continues_and_writes_tables(monkeypatch, tmp_path):
    study = example("study")
    ours = {"method": "analytic", "classifier_options.width": 40}
    rows = {
        "ours": ours,
        "refused": {"method": "analytic", "classifier": "separate"},
        "Mamba-CL": {"training.passes": 1},
    }
    monkeypatch.setattr(study, "STUDY", {"methods": rows, "again": {"the same": ours}})
    monkeypatch.setattr(study, "GRIDS", {"Mamba-CL": {"training.lr": [1e-4, 1e-2]}})
    preset = tmp_path / "small.yaml"
    preset.write_text(yaml.safe_dump(CONFIG))
    given = ["--preset", str(preset), "--out", str(tmp_path / "runs"), "--json", str(tmp_path / "study.json")]

    def written() -> dict:
        return json.loads((tmp_path / "study.json").read_text())

    study.main([*given, "--seeds", "0"])
    one = written()
    study.main([*given, "--seeds", "0", "1"])
    both = written()
    assert both["tables"]["methods"]["rows"] == ["ours", "Mamba-CL"]
    runs = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/results.json")]
    assert len(runs) == 6  # two seeds of two methods, and two that tune: rows with the same options share theirs
    first, second = sorted((run for run in runs if run["method"] == "analytic"), key=lambda run: run["seed"])
    assert one["rows"]["ours"]["forgetting"] == [100 * first["metrics"]["forgetting"]]
    mean = 50 * (first["metrics"]["final_accuracy_tasks"] + second["metrics"]["final_accuracy_tasks"])
    assert both["rows"]["ours"]["final accuracy"][0] == round(mean, 2)
    assert {**both["rows"]["the same"], "what": "ours"} == both["rows"]["ours"]
    assert both["rows"]["ours"]["state in MB"] == [round(first["classifier_bytes"] / 1e6, 2), 0]
    tried = both["rows"]["Mamba-CL"]["tried on held-back images"]
    chosen = f"training.lr {both['rows']['Mamba-CL']['options']['training.lr']}"
    assert len(tried) == 2 and tried[chosen] == max(tried.values())
    assert "| ours |" in accuracies(both, "methods")
    study.main([*given, "--seeds", "1", "--rows", "ours"])  # the others stay
    last = written()
    assert last["rows"]["ours"]["forgetting"] == [100 * second["metrics"]["forgetting"]]
    assert last["rows"]["Mamba-CL"] == both["rows"]["Mamba-CL"] and last["tables"] == both["tables"]

    monkeypatch.setattr(study, "RATES", study.GRIDS["Mamba-CL"])
    other = tmp_path / "other.json"  # what it has is not tried again, also without the run folders
    other.write_text(json.dumps({"tried": both["tried"]}))
    study.main([*given[:2], "--out", str(tmp_path / "none"), "--json", str(other), "--tune", "--rows", "Mamba-CL"])
    assert not (tmp_path / "none").exists()
    made = json.loads(other.read_text())
    assert made["tables"] == {"rates": {"columns": ["0.0001", "0.01"], "rows": ["Mamba-CL, rates"]}}
    assert [made["rows"]["Mamba-CL, rates"][rate] for rate in ("0.0001", "0.01")] == list(tried.values())


@pytest.mark.usefixtures("few_test_images")
def test_tuning_writes_what_was_tried_and_the_best_point(monkeypatch, tmp_path):
    tune = example("tune_demo")
    grids = {
        "sequential": {"training.lr": [1e-4, 1e-2], "training.passes": [1]},
        "analytic": {"features.pool": [["class"], ["mean"]], "classifier_options.width": [40]},
    }
    monkeypatch.setattr(tune, "GRIDS", grids)
    preset = tmp_path / "small.yaml"
    preset.write_text(yaml.safe_dump(CONFIG))
    given = ["--preset", str(preset), "--out", str(tmp_path / "runs"), "--json", str(tmp_path / "tuned.json")]
    tune.main([*given, "--methods", *grids, "--seeds", "0", "1"])
    record = json.loads((tmp_path / "tuned.json").read_text())
    assert record["seeds"] == [0, 1] and list(record["methods"]) == list(grids)
    for method, grid in grids.items():
        found = record["methods"][method]
        assert [one["point"] for one in found["tried"]] == tune.points(grid) and found["grid"] == grid
        assert found["choice"] == found["best"] == tune.best(found["tried"])
    folder = tmp_path / "runs" / "sequential-0.01-1-1"
    results = json.loads((folder / "results.json").read_text())
    last = record["methods"]["sequential"]["tried"][1]["final accuracy"][1]
    assert last == round(100 * results["metrics"]["final_accuracy_tasks"], 2)
    assert yaml.safe_load((folder / "config.yaml").read_text())["stream"]["validation"] == tune.HELD_BACK
    header, _, first, second = accuracies(record, "sequential").splitlines()
    assert header == "| per cent | `training.passes 1` |"
    assert first.startswith("| `training.lr 0.0001` |") and second.startswith("| `training.lr 0.01` |")


@pytest.mark.usefixtures("few_test_images")
def test_drift_compares_every_kind_with_an_oracle(tmp_path, capsys):
    drift = example("drift")
    preset = tmp_path / "small.yaml"
    preset.write_text(yaml.safe_dump(CONFIG))
    options = {"training.passes": 1, "stream.validation": None}
    settings = {"adagauss": {"epochs": 1, "hidden": 4, "samples": 9}, "adc": {"images": 3}}
    given = ["--preset", str(preset), "--classifiers", "lda", "ridge", "--of", '{"ridge": {"width": 20}}']
    given += ["--kinds", "shift", "linear", "sdc", "efc", "adc", "adagauss"]
    given += ["--options", json.dumps(options), "--settings", json.dumps(settings)]
    drift.main([*given, "--json", str(tmp_path / "drift.json")])
    record = json.loads((tmp_path / "drift.json").read_text())
    assert capsys.readouterr().out == (tmp_path / "drift.json").read_text()
    accuracy = record["final accuracy"]
    assert list(accuracy) == ["lda", "ridge"]
    ends = ["oracle means", "oracle", "memory in MB"]
    assert list(accuracy["lda"]) == ["none", "shift", "linear", "sdc", "efc", "adc", "adagauss", *ends]
    assert list(accuracy["ridge"]) == ["none", "shift", "linear", "sdc", *ends]  # what it can follow
    assert all(0 <= value <= 100 for found in accuracy.values() for value in found.values())
    choices = record["ridge or s^2 by task, null: no move"]
    assert len(choices) == 4 and all(len(values) == 2 for values in choices.values())  # two tasks after the first
    with interrupted_after(2):  # in the second task
        drift.main([*given, "--out", str(tmp_path / "run")])
    for _ in range(2):  # continued, and finished
        drift.main([*given, "--out", str(tmp_path / "run")])
        again = json.loads(capsys.readouterr().out)
        assert all(again[key] == record[key] for key in ("final accuracy", "ridge or s^2 by task, null: no move"))


def test_the_first_of_the_best_points_is_chosen_among_those_that_leave_the_demo_short():
    tune = example("tune_demo")
    runs = {(1, 1): [40, 43], (2, 1): [41, 44], (3, 1): [44, 41], (4, 3): [45, 45]}
    tried = [
        {"point": {"training.lr": lr, "training.passes": passes}, "final accuracy": found}
        for (lr, passes), found in runs.items()
    ]
    assert tune.best(tried) == tried[3]["point"] and tune.best(tune.quick(tried)) == tried[1]["point"]


def test_the_demo_has_the_options_that_were_best_on_held_back_images():
    tune = example("tune_demo")
    record = json.loads((EXAMPLES.parent / "docs" / "results" / "demo-tuning.json").read_text())
    assert record["methods"].keys() == {"analytic", "mamba-cl", "sequential"}
    for method, found in record["methods"].items():
        assert found["grid"] == tune.GRIDS[method]
        assert [one["point"] for one in found["tried"]] == tune.points(found["grid"]) and len(found["tried"]) == 6
        assert all(len(one["final accuracy"]) == len(record["seeds"]) for one in found["tried"])
        assert found["best"] == tune.best(found["tried"])
        assert found["choice"] == tune.best(tune.quick(found["tried"]))
        assert resolve("demo", {"method": method}) == resolve("demo", {"method": method, **found["choice"]})


@pytest.mark.parametrize("table", ["methods", "classifiers", "heads", "settings", "state", "tasks", "backbones"])
def test_every_row_of_the_study_is_a_possible_run(table):
    study = example("study")
    for row, options in study.STUDY[table].items():
        for grid in study.GRIDS.get(row, {"seed": [0]}).items():
            for value in grid[1]:
                resolve("cifar100-10-nano", {**options, grid[0]: value, **study.HELD_BACK, "stream.root": "."})
    assert set(study.GRIDS) <= {*study.STUDY["methods"], *study.STUDY["heads"]}
    assert {*study.SAME, *study.SAME.values()} <= set(study.STUDY["methods"]) and not set(study.SAME) & set(study.GRIDS)
    assert len({len(values) for grid in study.GRIDS.values() for values in grid.values()}) == 1  # the same budget


@pytest.mark.slow
def test_the_language_example_prints_every_domain_after_every_domain(monkeypatch, capsys):
    pytest.importorskip("transformers")
    language = example("language")
    library = language.modeling_mamba  # the example puts our scan into it: other tests have its own again
    monkeypatch.setattr(library, "mamba_selective_scan", library.mamba_selective_scan)
    monkeypatch.setattr(sys, "argv", ["language.py", "--steps", "2", "--bytes", "3000"])
    language.main()
    header, *rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert header[-3:] == ["docstrings", "licences", "code"]
    assert [row[1] for row in rows] == [name for name in header[-3:] for _ in range(2)]
    values = [[float(word) for word in row if word.replace(".", "").isdigit()] for row in rows]
    assert [len(row) for row in values] == [1, 1, 2, 2, 3, 3]
    assert all(1 < value < 1000 for row in values for value in row)
    assert values[0] == values[1]  # both start from the same model


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
def test_the_notebook(monkeypatch):
    matplotlib.use("Agg")
    notebook = json.loads((EXAMPLES / "images.ipynb").read_text())
    first, *cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code")
    names: dict = {}
    exec(first, names)
    names |= {"IMAGES_PER_CLASS": 5, "PASSES": 1}
    import matplotlib.pyplot as plt

    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf().axes[0].lines))
    for cell in cells:
        exec(cell, names)
    assert names["results"].keys() == {"freely", "in the null space"} and len(shown[0]) == 2
    assert all(0 <= value <= 1 for accuracy in names["results"].values() for value in accuracy)
    plt.close("all")


def test_a_learner_in_the_hidden_state_is_trained_and_tested_on_other_classes(capsys):
    example("meta_stream").main(["--steps", "2", "--images", "8", "--width", "8"])
    results = json.loads(capsys.readouterr().out)
    assert set(results) == {
        "synthetic, new streams", "fashion-mnist-small, new streams", "fashion-mnist-small, held-out classes"
    }  # fmt: skip
    for row in results.values():
        assert set(row) == {"learner", "nearest mean", "nearest image", "chance"} and row["chance"] == 33.3
        assert row["nearest mean"] > 60 and 0 <= row["learner"] <= 100
