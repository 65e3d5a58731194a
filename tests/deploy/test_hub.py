"""push and pull with the real library of the Hugging Face Hub, against a small server on this machine."""

import dataclasses
import json
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from cli_help import fails
from hub_help import TOKEN, Hub, Repository, local_hub
from serving_help import small_run

import mambacl
from mambacl.cli import main
from mambacl.deploy.description import Description
from mambacl.deploy.model_card import front_matter, model_card
from mambacl.deploy.serve_options import ServeOptions
from mambacl.errors import UserError

constants = pytest.importorskip("huggingface_hub.constants")
pytestmark = pytest.mark.extras


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("runs") / "small")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Also keeps the real cache, token and address of the Hub away."""
    with local_hub() as started:
        monkeypatch.setenv("HF_ENDPOINT", started.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # another protocol, to another server
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
        monkeypatch.chdir(tmp_path)
        yield started


def test_a_pushed_model_comes_back_as_it_was(run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["push", str(run), "ada/clothes", "--private", "--tag", "v1"]) == 0
    [(oid, files)] = hub.repositories["ada/clothes"].commits
    assert capsys.readouterr().out.strip() == f"{hub.url}/ada/clothes/commit/{oid}"
    assert set(files) == {"mambacl.safetensors", "README.md"} and hub.repositories["ada/clothes"].private
    assert hub.repositories["ada/clothes"].tags == {"v1": oid}
    assert main(["pull", "ada/clothes"]) == 0 and capsys.readouterr().out.startswith("clothes.safetensors: ")
    images = torch.randint(256, (3, 3, 20, 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    answers = mambacl.load(run, "cpu").predict(images)
    for model in ("clothes.safetensors", "hf://ada/clothes", "hf://ada/clothes@v1", f"hf://ada/clothes@{oid}"):
        assert mambacl.load(model, "cpu").predict(images) == answers


@pytest.fixture
def photos(tmp_path: Path, run: Path) -> Path:
    from PIL import Image

    name = mambacl.load(run, "cpu").classes[0]
    (tmp_path / "photos" / name).mkdir(parents=True)
    for number in range(3):
        Image.new("RGB", (20, 20), (80 * number, 30, 60)).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


def test_commands_take_an_address(run: Path, hub: Hub, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(run), "ada/clothes", "--tag", "v1"]) == 0
    capsys.readouterr()
    answers = []
    for model in (str(run), "hf://ada/clothes", "hf://ada/clothes@v1"):
        assert main(["predict", model, str(photos), "--csv", "--device", "cpu"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0].count("\n") == 4 and len(set(answers)) == 1
    words = ["compare", str(run), "hf://ada/clothes", "--test", str(photos), "--max-drop", "0", "--device", "cpu"]
    assert main([*words, "--json", "found.json"]) == 0
    found = json.loads(Path("found.json").read_text())
    assert found["new"]["path"] == "hf://ada/clothes" and found["shared"]["lost"] == found["shared"]["gained"] == 0
    assert main(["export", "hf://ada/clothes", "--to", "pt2", "--images", str(photos)]) == 0
    assert Path("clothes.pt2").is_file()


def test_where_an_address_cannot_do_it_is_one_sentence(
    run: Path, hub: Hub, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, sentence in (
        (["learn", "hf://ada/clothes", "--new", str(photos)], "give the run folder that it was pushed from"),
        (["rollback", "hf://ada/clothes", "--task", "1"], "give the run folder that it was pushed from"),
        (["export", "hf://ada/clothes"], "get it with `mambacl pull`"),
        (["export", "hf://ada/clothes", "--to", "onnx"], "with --images FOLDER"),
        (["predict", "hf://clothes", str(photos)], "must be OWNER/NAME"),
        (["serve", "hf://ada/no/such", "--port", "0"], "must be OWNER/NAME"),
        (["predict", "hf://ada/nothing", str(photos)], "ada/nothing"),
    ):
        assert sentence in fails(capsys, *words), words
    with pytest.raises(UserError, match="give the run folder that it was pushed from"):
        mambacl.learn("hf://ada/clothes", photos)


def test_a_server_names_the_address_and_not_the_file() -> None:
    options = ServeOptions(model="/cache/models--ada--clothes/mambacl.safetensors", name="hf://ada/clothes")
    assert options.shown == "hf://ada/clothes" and ServeOptions(model="/home/ada/runs/mine").shown == "mine"
    assert ServeOptions.from_text(options.as_text()) == options


def test_a_file_is_pushed_and_a_revision_is_pulled(run: Path, hub: Hub, tmp_path: Path) -> None:
    predictor = mambacl.load(run, "cpu")
    predictor.save(tmp_path / "model.safetensors")
    assert main(["push", str(tmp_path / "model.safetensors"), "ada/clothes", "--tag", "v1"]) == 0
    with torch.no_grad():
        predictor.method.classifier.weights.mul_(2)
    predictor.save(tmp_path / "model.safetensors")
    assert main(["push", str(tmp_path / "model.safetensors"), "ada/clothes"]) == 0
    assert len(hub.repositories["ada/clothes"].commits) == 2
    for words, factor in ((["--revision", "v1"], 1), ([], 2)):
        assert main(["pull", "ada/clothes", "--out", "new/pulled.safetensors", *words]) == 0
        found = mambacl.load("new/pulled.safetensors", "cpu").method.classifier.weights
        assert torch.equal(2 * found, factor * predictor.method.classifier.weights)


def test_mistakes_are_one_sentence(
    run: Path, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    capsys.readouterr()
    hub.repositories["ada/taken"] = Repository()
    hub.repositories["ada/taken"].tags["v1"] = hub.repositories["ada/taken"].commit({"README.md": b"x"})
    assert "must be OWNER/NAME, such as ada/flowers, got 'clothes'" in fails(capsys, "push", str(run), "clothes")
    assert "has the tag 'v1' already" in fails(capsys, "push", str(run), "ada/taken", "--tag", "v1")
    assert "does not let you write other/clothes" in fails(capsys, "push", str(run), "other/clothes")
    assert "nowhere does not exist" in fails(capsys, "push", "nowhere", "ada/clothes")
    assert "There is no repository ada/gone, or you may not read it" in fails(capsys, "pull", "ada/gone")
    assert "ada/taken has no revision 'v9'" in fails(capsys, "pull", "ada/taken", "--revision", "v9")
    assert "must end in .safetensors" in fails(capsys, "pull", "ada/taken", "--out", "model.bin")
    (tmp_path / "mine.safetensors").write_text("mine")
    assert "is not an exported model" in fails(capsys, "pull", "ada/taken", "--out", "mine.safetensors")
    assert len(hub.repositories["ada/taken"].commits) == 1 and (tmp_path / "mine.safetensors").read_text() == "mine"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "hf auth login" in fails(capsys, "push", str(run), "ada/clothes")
    monkeypatch.delenv("HF_TOKEN")
    assert "you need a token: run `hf auth login`" in fails(capsys, "push", str(run), "ada/clothes")
    hub.repositories["ada/secret"] = Repository(private=True)
    assert "you may not read it" in fails(capsys, "pull", "ada/secret")


class Payload:
    """Leaves a trace if it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return shutil.copyfile, (__file__, str(self.trace))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "mambacl.safetensors"])
def test_a_pickle_is_never_loaded(name: str, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace"
    hub.repositories["eve/model"] = Repository()
    hub.repositories["eve/model"].commit({name: pickle.dumps(Payload(trace)), "config.json": b"{}"})
    capsys.readouterr()
    words = fails(capsys, "pull", "eve/model")
    if name == "mambacl.safetensors":
        assert "is not a model that mambacl exported, and nothing of it was loaded" in words
    else:
        assert "eve/model has no mambacl.safetensors (it has config.json, pytorch_model.bin)" in words
    with pytest.raises(UserError, match="loaded"):
        mambacl.load("hf://eve/model")
    assert not trace.exists() and not list(tmp_path.glob("*.safetensors"))


def test_no_network_is_one_sentence(
    run: Path, hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    capsys.readouterr()
    for words in (["push", str(run), "ada/clothes"], ["pull", "ada/clothes"]):
        assert "The Hub at http://127.0.0.1:9 cannot be reached (" in fails(capsys, *words)


def test_without_a_network_the_copy_of_an_earlier_download_is_used(
    run: Path, hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["push", str(run), "ada/clothes"]) == main(["pull", "ada/clothes"]) == 0
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert mambacl.load("hf://ada/clothes", "cpu").classes == mambacl.load(run, "cpu").classes


def test_the_code_of_the_page_runs(run: Path, hub: Hub) -> None:
    page = Path(__file__).parents[2] / "docs" / "hub.md"
    [code] = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    assert main(["push", str(run), "ada/flowers"]) == 0
    names = {"mambacl": mambacl}
    exec(code, names)
    assert names["predictor"].classes == mambacl.load(run, "cpu").classes


# The card


def about(run: Path) -> Description:
    return mambacl.load(run, "cpu").description


def test_the_card_says_what_the_model_is(run: Path) -> None:
    description = about(run)
    text = model_card("ada/clothes", description, "mambacl.safetensors")
    _, front, body = text.split("---\n", 2)
    given = yaml.safe_load(front)
    assert given["pipeline_tag"] == "image-classification" and "mambacl" in given["tags"] and "license" not in given
    [result] = given["model-index"][0]["results"]
    assert result["metrics"][0]["value"] == round(description.card["metrics"]["final_accuracy_images"], 6)
    assert 'mambacl.load("hf://ada/clothes")' in body and "| 0 | " in body and '"resize": 16' in body
    assert "10 classes, learned in 3 tasks" in body and str(run) not in text
    assert f"{100 * description.card['metrics']['forgetting']:.1f}%" in body


@pytest.mark.parametrize(
    "licence, expected",
    [
        ("Apache-2.0", {"license": "apache-2.0"}),
        ("CC-BY-NC-SA-4.0, non-commercial", {"license": "cc-by-nc-sa-4.0"}),
        ("unknown", {"license": "other", "license_name": "unknown"}),
        ("Some Licence (2)", {"license": "other", "license_name": "some-licence-2"}),
    ],
)
def test_the_card_has_the_weights_licence(run: Path, licence: str, expected: dict[str, str]) -> None:
    found = front_matter("ada/clothes", dataclasses.replace(about(run), licence=licence))
    assert {name: value for name, value in found.items() if name.startswith("license")} == expected


def test_any_class_name_stays_text(run: Path) -> None:
    names = ["a|b", "<script>", "caf\udce9", "猫", "*bold*", "two\nlines"]
    text = model_card("ada/x", dataclasses.replace(about(run), classes=names), "f")
    rows = [line for line in text.encode().decode().splitlines() if line.startswith("| ") and line[2].isdecimal()]
    shown = [r"a\|b", r"\<script\>", r"caf\\udce9", "猫", r"\*bold\*", "two lines"]
    assert rows == [f"| {n} | {name} |" for n, name in enumerate(shown)]
