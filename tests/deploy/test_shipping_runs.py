"""Export of runs: the answers of `mambacl predict`, from the command to the code of the page."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_help import fails
from data_help import fewer_test_images, write_images
from PIL import Image
from shipping_help import SIZE, elsewhere, needs, predictor
from small_run import CONFIG
from tolerance import assert_near

import mambacl
from mambacl.cli import main
from mambacl.data import TransformConfig
from mambacl.data.transforms import Transforms
from mambacl.deploy import graph, onnx_graph, resizing, shipping
from mambacl.deploy.foreign import FORMATS
from mambacl.deploy.graph import Scores
from mambacl.errors import UserError

SIZES = ((40, 30), (16, 16), (9, 70), (300, 200))


@pytest.fixture(autouse=True)
def few_timed_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "MOST", shipping.FEWEST)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "small"
    with fewer_test_images(10):
        mambacl.train(CONFIG, method="analytic", classifier_options={"width": 64}, out=str(out))
    return out


@pytest.mark.slow
def test_the_command_states_speeds_and_takes_files(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(run), "--to", "pt2", "--batch-size", "2"]) == 0
    out = capsys.readouterr().out
    assert "small.pt2: " in out and "Compared in torch.export on 64 images (test images of the run)" in out
    assert re.search(r"this CPU, 2 per call: \d+ in mambacl; in torch.export, .*: chunked \d+\. .* form chunked\.", out)
    mambacl.load(run).save("model.safetensors")
    write_images([tmp_path / "photos" / f"{i}.png" for i in range(2)])
    words = ["--to", "pt2", "--images", "photos", "--preprocessing", "--batch-size", "2", "--json"]
    assert main(["export", "model.safetensors", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["files"] == ["model.pt2"] and found["images"] == 2 and found["source"] == "photos"
    assert found["preprocessing"] and found["images_per_second"] > 0 and found["our_images_per_second"] > 0
    assert found["form"] == "chunked" and found["images_per_second_by_form"] == {"chunked": found["images_per_second"]}
    model = torch.export.load("model.pt2").module()
    assert model(torch.zeros(5, 16, 16, 3, dtype=torch.uint8)).shape == (5, 10)


def test_mistakes_of_an_export(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.pt2").write_text("hello")
    (tmp_path / "empty").mkdir()
    file = tmp_path / "model.safetensors"
    mambacl.load(run).save(file)
    pt2 = ["export", str(run), "--to", "pt2", "--out"]
    for words, sentence in (
        (["export", str(run), "--to", "tflite"], "safetensors"),
        (["export", str(file)], "only a run can be exported to safetensors"),
        (["export", str(run), "--preprocessing"], "need another format"),
        (["export", str(run), "--form", "loop"], "need another format"),
        ([*pt2, str(tmp_path / "a.pt2"), "--form", "loop"], "has no loops"),
        (["export", str(file), "--to", "pt2"], "--images FOLDER"),
        ([*pt2, str(tmp_path / "model.onnx")], "must end in .pt2"),
        ([*pt2, str(tmp_path / "other.pt2")], "is not an exported model"),
        ([*pt2, str(tmp_path / "no" / "a.pt2")], "does not exist: create it"),
        ([*pt2, str(tmp_path / "a.pt2"), "--images", str(tmp_path / "empty")], "no folder with images"),
    ):
        assert sentence in fails(capsys, *words), words
    assert not (tmp_path / "a.pt2").exists()


def test_a_run_whose_data_are_gone_asks_for_images(run: Path) -> None:
    copy = run.parent / "moved"
    shutil.copytree(run, copy)
    text = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(text.replace("dataset: fashion-mnist-small", "dataset: gone"))
    with pytest.raises(UserError, match=r"cannot be read .*--images FOLDER"):
        next(shipping.run_images(copy))


@pytest.mark.long
@pytest.mark.extras
def test_the_code_of_the_page_runs_without_mambacl(run: Path, tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "deploy.md"
    codes = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    model = mambacl.load(run, "cpu")
    write_images([tmp_path / "photo.png"], sizes=((40, 30),))
    (tmp_path / "photo.png").rename(tmp_path / "photo.jpg")  # Pillow looks at the content
    for to in ("onnx", "openvino"):
        needs(to)
        shipping.ship(
            model, tmp_path / f"model{FORMATS[to].suffix}", to, shipping.run_images(run), "test", preprocessing=True
        )
        [code] = [code for code in codes if f"import {FORMATS[to].runtime.lower()}\n" in code]
        command = [sys.executable, "-c", "import sys; sys.modules['mambacl'] = None\n" + code]
        done = subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, text=True)
        assert done.stdout.strip() == model.predict(tmp_path / "photo.jpg")[0].name


@pytest.mark.slow
@pytest.mark.extras
@pytest.mark.parametrize("to", FORMATS)
def test_files_answer_raw_images_as_predict_does(
    to: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needs(to)
    files = [tmp_path / "photos" / f"{number}.png" for number in range(len(SIZES))]
    write_images(files, sizes=SIZES)
    path = str(tmp_path / f"model{FORMATS[to].suffix}")
    words = ["--to", to, "--out", path, "--preprocessing", "--images", str(tmp_path / "photos"), "--json"]
    assert main(["export", str(run), *words]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["same_answers"] == done["images"] == len(files)
    assert 0 <= done["resized_difference"] <= done["resized_allowed"]
    assert main(["predict", str(run), *map(str, files), "--json"]) == 0
    said = [row["predictions"][0]["class"] for row in json.loads(capsys.readouterr().out)]
    found = elsewhere(path, to, [np.asarray(Image.open(file))[None] for file in files], tmp_path)
    model = mambacl.load(run, "cpu")
    assert [model.classes[int(scores.argmax())] for scores in found] == said
    expected = model.scores(torch.stack([model.transform(file) for file in files]))
    allowed = 2 * done["resized_allowed"] if to == "openvino" else 0.0  # it may be one grey level off
    for scores, wanted in zip(found, expected, strict=True):
        if allowed:
            assert (scores[0] - wanted).abs().max() <= allowed
        else:
            assert_near(scores[0], wanted, Scores(model, True).terms(), size=1.0)


@pytest.mark.long
@pytest.mark.extras
def test_a_model_that_learned_ships_all_its_classes(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needs("onnx")
    import onnxruntime

    copy, new = shutil.copytree(run, tmp_path / "more"), tmp_path / "new"
    for start, name in ((0, "cat"), (50, "狗")):
        write_images([new / name / f"{number}.png" for number in range(4)], start=start)
    mambacl.learn(copy, new)
    path = tmp_path / "model.onnx"
    assert main(["export", str(copy), "--to", "onnx", "--out", str(path), "--images", str(new)]) == 0
    assert "12 classes" in capsys.readouterr().out
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    about, model = session.get_modelmeta().custom_metadata_map, mambacl.load(copy, "cpu")
    classes, card = json.loads(about["classes"]), json.loads(about["card"])
    assert classes == model.classes and classes[-2:] == ["cat", "狗"]
    assert card == model.description.card and card["tasks"] == 4 and card["classes_per_task"] == [4, 3, 3, 2]
    inputs = torch.stack([model.transform(file) for file in sorted(new.rglob("*.png"))])
    [scores] = session.run(None, {"images": inputs.numpy()})
    assert scores.shape == (8, 12)
    assert_near(torch.from_numpy(scores), model.scores(inputs), Scores(model, False).terms(), size=1.0)


@pytest.mark.slow
@pytest.mark.extras
@pytest.mark.parametrize("to", ["onnx", "openvino"])
def test_a_broken_graph_leaves_the_old_file(
    to: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One step of the scan subtracts instead of adding: what is on the disk stays."""
    needs(to)
    made = onnx_graph.onnx_model

    def broken(program: torch.export.ExportedProgram) -> Any:
        model = made(program)
        scan = next(node for node in model.graph.node if node.op_type == "Scan")
        [body] = [attribute.g for attribute in scan.attribute if attribute.name == "body"]
        next(node for node in body.node if node.op_type == "Add").op_type = "Sub"
        return model

    monkeypatch.setattr(onnx_graph, "onnx_model", broken)
    path = tmp_path / f"model{FORMATS[to].suffix}"
    path.write_bytes(b"mambacl.export of yesterday")
    words = ("--to", to, "--out", str(path), "--form", "loop")
    assert "differ from ours by" in fails(capsys, "export", str(run), *words)
    assert [file.name for file in tmp_path.iterdir()] == [path.name] and path.read_bytes().endswith(b"yesterday")


@pytest.mark.slow
def test_other_resizing_is_refused_and_nothing_is_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of the model's size would not show it."""
    monkeypatch.setattr(graph, "resized", lambda images, size, _: resizing.resized(images, size, "bilinear"))
    write_images([tmp_path / "photos" / f"{number}.png" for number in range(2)], sizes=((40, 30),))
    images = shipping.folder_images(tmp_path / "photos")
    with pytest.raises(UserError, match=r"images that it resizes differ .* than one grey level explains .*nothing was"):
        shipping.ship(
            mambacl.load(run, "cpu"), tmp_path / "a.pt2", "pt2", images, "photos", preprocessing=True, batch=1
        )
    assert [file.name for file in tmp_path.iterdir()] == ["photos"]


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [16, 37])
def test_resizing_has_the_grey_levels_of_the_transform(mode: Any, size: int) -> None:
    transforms = Transforms(TransformConfig(image_size=16, resize=size, interpolation=mode), 16, [0.5] * 3, [0.5] * 3)
    draw = torch.Generator().manual_seed(0)
    exact = mode == "bicubic" or torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    for sides in (*SIZES, (1, 1), (1, 500), (size, 8)):
        images = torch.randint(0, 256, (2, 3, *sides), generator=draw, dtype=torch.uint8)
        wanted = transforms.resized(images)
        assert (resizing.resized(images, size, mode) - wanted).abs().max() <= (0 if exact else 1)


def test_the_graph_crops_as_the_transform_does() -> None:
    stream = {"transforms": {"image_size": SIZE, "resize": SIZE + 5, "interpolation": "bicubic"}}
    model = predictor(method="frozen", stream=stream)
    image = torch.randint(0, 256, (3, 50, 41), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    with torch.no_grad():
        found = Scores(model, True)(image.permute(1, 2, 0)[None])
    assert_near(found, model.scores(model.transform(image)[None]), Scores(model, True).terms(), size=1.0)
