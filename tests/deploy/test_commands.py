"""The commands predict and export."""

import csv
import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_help import fails
from data_help import fewer_test_images, write_images
from small_run import CONFIG

import mambacl
from mambacl.cli import main


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = str(tmp_path_factory.mktemp("runs") / "small")
    with fewer_test_images(10):
        mambacl.train(CONFIG, method="analytic", classifier_options={"width": 64}, out=out)
    return out


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two images, one of them in a subfolder."""
    write_images([tmp_path / "photos" / "a.png", tmp_path / "photos" / "below" / "b.png"])
    return tmp_path / "photos"


def predicted(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert main(["predict", *words]) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_a_table_json_and_csv_say_the_same(run: str, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [photos / "a.png", photos / "below" / "b.png"]
    expected = mambacl.load(run).predict(files, top=3)
    table, _ = predicted(capsys, run, str(photos), "--top", "3")
    rows = json.loads(predicted(capsys, run, str(photos), "--top", "3", "--json", "--batch-size", "1")[0])
    [head, *lines] = list(csv.reader(io.StringIO(predicted(capsys, run, str(photos), "--top", "3", "--csv")[0])))
    for number, (file, answer) in enumerate(zip(files, expected, strict=True)):
        shown = table.splitlines()[3 * number]
        assert shown.startswith(str(file)) and answer.name in shown and f"{answer.probability:.1%}" in shown
        assert rows[number]["file"] == str(file) and len(rows[number]["predictions"]) == 3
        assert tuple(best["class"] for best in rows[number]["predictions"]) == answer.classes
        row = dict(zip(head, lines[number], strict=True))
        assert (row["file"], row["class"], row["class_2"]) == (str(file), *answer.classes[:2])
        assert float(row["probability_3"]) == pytest.approx(answer.probabilities[2], abs=1e-3) and not row["error"]
    assert len(rows) == len(lines) == 2


def test_the_code_of_the_page_runs(run: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "deploy.md"
    found = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    codes = [code for code in found if "mambacl." in code or "predictor." in code]  # test_shipping_runs has the others
    monkeypatch.chdir(photos)
    shutil.copy(photos / "a.png", photos / "b.png")
    shutil.copytree(run, photos / "runs" / "photos-analytic-0")
    mambacl.load(run).save("deployed.safetensors")
    write_images([photos / "photos" / "test" / "Bag" / "a.png"])
    names: dict[str, Any] = {}
    for code in codes:
        exec(code, names)
    assert mambacl.load("model.safetensors").classes == names["predictor"].classes
    assert (
        len(codes) == 3
        and names["rates"].images > 0
        and names["found"].shared.images == 1
        and names["found"].shared.lost == 0
    )


def test_names_come_from_standard_input(
    run: str, photos: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def typed(names: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(names)))

    typed(f"{photos / 'a.png'}\n\n{photos / 'below' / 'b.png'}\n".encode())
    assert predicted(capsys, run, "-")[0] == predicted(capsys, run, str(photos))[0]
    typed(b"caf\xe9.png\n")  # not UTF-8
    assert "is missing" in predicted(capsys, run, "-", "--out", str(photos / "answers.json"), code=1)[1]
    assert json.loads((photos / "answers.json").read_text(encoding="utf-8"))[0]["file"] == "caf\udce9.png"
    typed(b"\n")
    assert "Standard input has no file names" in fails(capsys, "predict", run, "-")


def test_a_broken_image_gets_one_sentence(run: str, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (photos / "aa.png").write_text("hello")
    out, err = predicted(capsys, run, str(photos), "nowhere.png", code=1)
    assert len([line for line in out.splitlines() if ".png" in line]) == 2
    first, second, last = err.strip().splitlines()
    assert first == f"mambacl: {photos / 'aa.png'} cannot be read as an image (unknown image format): repair or " \
        "remove it."  # fmt: skip
    assert second == "mambacl: nowhere.png is missing: repair or remove it."
    assert last == "mambacl: 2 of 4 images could not be read."
    err = predicted(capsys, run, str(photos), code=1)[1]  # one of three: its sentence says it all
    assert err.strip() == first
    rows = json.loads(predicted(capsys, run, str(photos), "--json", code=1)[0])
    good = ["calibrated", "file", "predictions", "unknown"]
    assert [sorted(row) for row in rows] == [good, ["error", "file"], good]
    lines = list(csv.reader(io.StringIO(predicted(capsys, run, str(photos), "--csv", code=1)[0])))
    assert lines[2][0] == str(photos / "aa.png") and "unknown image format" in lines[2][4] and not lines[2][1]


def test_an_exported_file_predicts_the_same(
    run: str, photos: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", run]) == 0 and "small.safetensors: " in capsys.readouterr().out
    assert main(["export", run, "--to", "safetensors", "--out", "model.safetensors"]) == 0
    words = [str(photos), "--json", "--top", "10"]
    assert predicted(capsys, "model.safetensors", *words)[0] == predicted(capsys, run, *words)[0]


def test_results_go_to_a_file(run: str, photos: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name, option in (("a.json", "--json"), ("a.csv", "--csv")):
        out, _ = predicted(capsys, run, str(photos), "--out", str(tmp_path / name))
        assert not out and (tmp_path / name).read_text() == predicted(capsys, run, str(photos), option)[0]
    predicted(capsys, run, str(photos), "--out", str(tmp_path / "a.txt"))
    assert (tmp_path / "a.txt").read_text() == predicted(capsys, run, str(photos))[0]


def test_a_threshold_makes_images_unknown(run: str, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predicted(capsys, run, str(photos), "--unknown-below", "1")[0].count("  unknown") == 2
    assert predicted(capsys, run, str(photos), "--unknown-below", "0")[0].count("  unknown") == 0


def test_mistakes_get_one_sentence(run: str, photos: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    image = str(photos / "a.png")
    for words, sentence in (
        (["predict", str(tmp_path / "gone"), image], "does not exist: give a run folder"),
        (["predict", str(tmp_path / "empty"), image], "is not a run folder"),
        (["predict", image, image], "is not a model that mambacl exported"),
        (["predict", run], "Name the images"),
        (["predict", run, str(tmp_path / "empty")], "has no images"),
        (["predict", run, image, "--json", "--csv"], "exclude each other"),
        (["predict", run, image, "--top", "0"], "at least 1"),
        (["predict", run, image, "--unknown-below", "2"], "between 0 and 1"),
        (["predict", run, image, "--out", str(tmp_path / "no" / "a.csv")], "does not exist: create it"),
        (["export", run, "--to", "tflite"], "safetensors"),
        (["export", image], "only a run can be exported"),
        (["export", run, "--out", str(tmp_path / "model.onnx")], "end in .safetensors"),
    ):
        assert sentence in fails(capsys, *words), words
