"""A run that starts from the backbone of another run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_run import CONFIG

import mambacl
from mambacl.backbones import create_model
from mambacl.errors import UserError

SHORT = {"training": {"passes": 1}, "stream": {**CONFIG["stream"], "tasks": [5, 5]}}


def train(folder: Path, **options: Any) -> Path:
    return mambacl.train(CONFIG, out=str(folder), **SHORT, **options).folder


def backbone(run: Path) -> dict[str, torch.Tensor]:
    """The backbone that a run starts from."""
    return load_file(run / "checkpoints" / "backbone.safetensors")


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
def test_the_trained_backbone_of_a_run_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train(tmp_path / "first")
    learned = load_file(first / "checkpoints" / "task-end.safetensors")
    trained = {n.removeprefix("method.model."): t for n, t in learned.items() if n.startswith("method.model.")}
    assert trained
    monkeypatch.chdir(tmp_path)
    for start in ("first", str(first), first / "checkpoints" / "task-end.safetensors"):
        second = train(tmp_path / "second", pretrained=str(start), method="frozen", overwrite=True)
        begun = backbone(second)
        assert all(torch.equal(begun[name], tensor) for name, tensor in trained.items())
        others = begun.keys() - trained.keys()
        assert others and all(torch.equal(begun[name], backbone(first)[name]) for name in others)
    again = train(tmp_path / "again", pretrained=str(first / "checkpoints" / "backbone.safetensors"), method="frozen")
    assert all(torch.equal(tensor, backbone(first)[name]) for name, tensor in backbone(again).items())


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
def test_what_cannot_be_taken_over(tmp_path: Path) -> None:
    first = train(tmp_path / "first", method="frozen")
    smaller = {**CONFIG["backbone_options"], "depth": 1}
    with pytest.raises(UserError, match="has another backbone, defocus_mamba: use the same --backbone"):
        train(tmp_path / "second", pretrained=str(first), backbone_options=smaller)
    with pytest.raises(UserError, match=r"known_classes takes the classifier of a weights file, and .* is a run"):
        train(tmp_path / "second", pretrained=str(first), known_classes=True)
    adapters = train(tmp_path / "adapters", method="seq-adapter")
    with pytest.raises(UserError, match=r"The method seq-adapter of .* adds layers to the backbone"):
        train(tmp_path / "second", pretrained=str(adapters))
    assert not (tmp_path / "second").exists()
    mambacl.load(first, "cpu").save(tmp_path / "model.safetensors")
    for given, words in (
        (first, "is a run folder: load its model with mambacl.load"),
        (tmp_path / "model.safetensors", "is a model that `mambacl export` wrote: load it with mambacl.load"),
        (first / "checkpoints" / "task-end.safetensors", "--pretrained RUN"),
    ):
        with pytest.raises(UserError, match=words):
            create_model("defocus_mamba", pretrained=given, **CONFIG["backbone_options"])
