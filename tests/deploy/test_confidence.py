"""Calibrated probabilities and unknown images, from a run to the answer: stored, learned, rolled back, exported."""

import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_help import fails
from data_help import fewer_test_images, write_images
from safetensors import safe_open
from small_run import CONFIG

import mambacl
from mambacl.classifiers.calibration import bent
from mambacl.cli import main
from mambacl.deploy.loading import from_run
from mambacl.deploy.shipping import SHARES, described
from mambacl.errors import UserError
from mambacl.files import read_tensors, write_tensors
from mambacl.methods.base import CALIBRATION, KEPT
from mambacl.training.folder import RunFolder

OPTIONS: dict[str, Any] = {
    "method": "analytic", "classifier_options": {"width": 64}, "features": {"mirror": "both", "kept": 60},
}  # fmt: skip


def train(out: Path, **options: Any) -> Path:
    with fewer_test_images(10):
        mambacl.train({**CONFIG, **OPTIONS, **options}, out=str(out))
    return out


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "small")


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture(scope="module")
def uncalibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "none", features={"kept": 0})


def state(run: Path) -> dict[str, torch.Tensor]:
    return from_run(RunFolder(run), torch.device("cpu"), with_task_state=True).method.task_state_dict()


def inputs(model: Any, count: int = 6) -> torch.Tensor:
    images = torch.randint(0, 256, (count, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return torch.stack([model.transform(image) for image in images])


def without_calibration(run: Path) -> None:
    """As a version of mambacl left it that did not know calibration."""
    for path in (*run.rglob("task-*.safetensors"), *run.glob("learned/*.safetensors")):
        tensors, text = read_tensors(path)
        write_tensors(path, {n: t for n, t in tensors.items() if not n.startswith((CALIBRATION, KEPT))}, text)
    config = run / "config.yaml"
    lines = config.read_text().splitlines(keepends=True)
    assert any("kept: 60" in line for line in lines)
    config.write_text("".join(line for line in lines if "kept:" not in line))


# Probabilities


def test_probabilities_are_a_softmax_that_keeps_the_order(trained: Path) -> None:
    model = mambacl.load(trained, "cpu")
    assert model.calibration is not None and model.not_calibrated == ""
    images = inputs(model)
    scores, found = model.scores(images), model.probabilities(images)
    assert torch.equal(found.argmax(1), scores.argmax(1))
    temperature, knee = model.calibration.temperature, model.calibration.knee
    expected = torch.softmax(bent(scores.double() / 2, knee) / temperature, 1)  # two views
    assert torch.allclose(found, expected, rtol=1e-9)
    for answer, row in zip(model.answers(images, top=10), scores.argsort(1, descending=True).tolist(), strict=True):
        assert answer.classes == tuple(model.classes[label] for label in row)


def test_a_share_to_reject_becomes_a_threshold(trained: Path) -> None:
    model = mambacl.load(trained, "cpu")
    rates = model.rejecting(0.25)
    assert 0.2 < rates.false_rejections <= 0.25 and 0 <= rates.false_acceptances <= 1 and rates.images == 60
    images = [torch.zeros(3, 16, 16), torch.ones(3, 16, 16)]
    for answer in model.predict(images, unknown=0.25):
        assert answer.unknown == (answer.probability < rates.threshold)
    with pytest.raises(UserError, match="at least 0 and below 1, got 1"):
        model.rejecting(1.0)


def test_the_sample_does_not_depend_on_the_batch_size(trained: Path, tmp_path: Path) -> None:
    other = train(tmp_path / "other", training={**CONFIG["training"], "eval_batch_size": 7})
    found, expected = state(other), state(trained)
    for name in ("labels", "places", "counts"):
        assert torch.equal(found[KEPT + name], expected[KEPT + name])
    assert (found[KEPT + "values"].int() - expected[KEPT + "values"].int()).abs().max() <= 1  # rounding
    temperature = CALIBRATION + "temperature"
    assert float(found[temperature]) == pytest.approx(float(expected[temperature]), rel=1e-3)


def test_the_kept_features_are_a_bounded_sample_of_all_tasks(trained: Path) -> None:
    found = state(trained)
    assert len(found[KEPT + "labels"]) == 60 and found[KEPT + "counts"].tolist() == [8] * 10
    assert found[KEPT + "values"].dtype == torch.int8 and found[KEPT + "values"].shape[:2] == (60, 2)
    assert set(found[KEPT + "labels"].tolist()) == set(range(10))


# Learned, rolled back, exported


def test_learning_calibrates_again_and_a_rollback_gives_the_same_bits(run: Path, tmp_path: Path) -> None:
    before = state(run)
    write_images([tmp_path / "new" / "eel" / f"{number}.png" for number in range(12)])
    mambacl.learn(run, tmp_path / "new", device="cpu")
    after = state(run)
    assert after[KEPT + "counts"].tolist() == [8] * 10 + [12] and len(after[KEPT + "labels"]) == 60
    assert not torch.equal(after[CALIBRATION + "known"], before[CALIBRATION + "known"])
    model = mambacl.load(run, "cpu")
    assert model.calibration is not None and model.probabilities(inputs(model)).shape[1] == 11
    mambacl.rollback(run, 3)
    again = state(run)
    assert again.keys() == before.keys() and all(torch.equal(again[name], before[name]) for name in before)


def test_an_exported_file_has_the_calibration_but_no_features(trained: Path, tmp_path: Path) -> None:
    model = mambacl.load(trained, "cpu")
    model.save(tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
    assert f"task.{CALIBRATION}temperature" in names and not any(KEPT in name for name in names)
    other = mambacl.load(tmp_path / "model.safetensors", "cpu")
    images = inputs(model)
    assert torch.equal(other.probabilities(images), model.probabilities(images))
    assert other.rejecting(0.05) == model.rejecting(0.05)
    about = json.loads(described(model, False)["mambacl.export"])["calibration"]
    assert about["temperature"] == model.calibration.temperature
    assert [row["threshold"] for row in about["unknown"]] == [
        round(model.rejecting(share).threshold, 6) for share in SHARES
    ]


# Without a calibration


def test_a_run_from_before_loads_learns_and_says_that_it_is_not_calibrated(run: Path, tmp_path: Path) -> None:
    calibrated = mambacl.load(run, "cpu")
    images = inputs(calibrated)
    expected = calibrated.scores(images)
    without_calibration(run)
    model = mambacl.load(run, "cpu")
    assert torch.equal(model.scores(images), expected)
    assert "made by an earlier version: train it again" in model.not_calibrated
    with pytest.raises(UserError, match=r"not calibrated, because .* choose a threshold yourself: --unknown-below"):
        model.rejecting(0.05)
    write_images([tmp_path / "new" / "eel" / f"{number}.png" for number in range(80)])
    mambacl.learn(run, tmp_path / "new", device="cpu")  # these images are no sample of all
    assert mambacl.load(run, "cpu").calibration is None
    assert not any(name.startswith((KEPT, CALIBRATION)) for name in state(run))


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"features": {"kept": 0}}, "keeps no features for it: train it with --features.kept 500"),
        ({"classifier": "gaussian", "classifier_options": {}}, "the classifier gaussian cannot be: use ridge"),
        ({"method": "sequential", "classifier_options": {}}, "the method sequential trains the backbone"),
    ],
)
def test_what_cannot_be_calibrated_says_why(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    training = {**CONFIG["training"], "passes": 1, "decay_after": []}
    model = mambacl.load(train(tmp_path / "run", training=training, **options), "cpu")
    assert model.calibration is None and reason in model.not_calibrated and model.not_calibrated.endswith(".")
    assert model.probabilities(inputs(model)).sum(1).allclose(torch.ones(6).double())


# The command


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    capsys.readouterr()
    assert main(["predict", *words, "--device", "cpu"]) == 0
    return tuple(capsys.readouterr())  # type: ignore[return-value]


def test_the_command_states_the_threshold_and_both_rates(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_images([tmp_path / "photos" / f"{name}.png" for name in "ab"])
    rates = mambacl.load(trained, "cpu").rejecting(0.2)
    words = [str(trained), str(tmp_path / "photos"), "--unknown", "0.2"]
    table, errors = said(capsys, *words)
    assert errors == "" and table.count("\n") == 3
    assert table.splitlines()[-1].startswith(
        f"unknown: below {rates.threshold:.1%}. About {rates.false_rejections:.1%}"
    )
    for row in json.loads(said(capsys, *words, "--json")[0]):
        numbers = row["unknown_below"]
        assert row["calibrated"] and numbers["threshold"] == pytest.approx(rates.threshold, abs=1e-6)
        assert row["unknown"] == (row["predictions"][0]["probability"] < numbers["threshold"])
        assert numbers["false_acceptances"] == pytest.approx(rates.false_acceptances, abs=1e-6)
    for row in csv.DictReader(io.StringIO(said(capsys, *words, "--csv")[0])):
        assert row["calibrated"] == "true" and float(row["false_rejections"]) == round(rates.false_rejections, 6)
    plain = json.loads(said(capsys, *words[:2], "--json")[0])
    assert "unknown_below" not in plain[0] and not plain[0]["unknown"]


def test_a_model_without_calibration_says_so_once(
    uncalibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_images([tmp_path / "photos" / f"{name}.png" for name in "ab"])
    words = [str(uncalibrated), str(tmp_path / "photos")]
    out, errors = said(capsys, *words, "--json")
    assert errors.count("not calibrated") == 1 and not json.loads(out)[0]["calibrated"]
    error = fails(capsys, "predict", *words, "--unknown", "0.05")
    assert "not calibrated" in error and "--unknown-below" in error
    assert "exclude each other" in fails(capsys, "predict", *words, "--unknown", "0.05", "--unknown-below", "0.3")
    assert "at least 0 and below 1" in fails(capsys, "predict", *words, "--unknown", "1")
