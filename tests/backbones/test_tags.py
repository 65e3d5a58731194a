"""A model's weights by tag, and every file in the package."""

import dataclasses
import logging
import re
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from data_help import MEAN, SHARED, STD
from safetensors.torch import load_file, save_file

from mambacl.backbones import create_model, load_weights
from mambacl.backbones.loading import weights_file
from mambacl.backbones.registry import MODELS, PublicWeights
from mambacl.config import resolve
from mambacl.data import open_dataset
from mambacl.errors import UserError

FOLDER = Path(str(files("mambacl.backbones") / "weights"))
TAGS = [(name, tag) for name in MODELS.names() for tag in MODELS.get(name).weights]
PACKAGED = [(name, tag) for name, tag in TAGS if MODELS.get(name).weights[tag].packaged]


@pytest.fixture
def said(caplog):
    """The lines that the package logs, whether or not a command has set up logging."""
    logger = logging.getLogger("mambacl")
    logger.addHandler(caplog.handler)
    yield lambda: "\n".join(record.getMessage() for record in caplog.records)
    logger.removeHandler(caplog.handler)


# The package's files


@pytest.mark.parametrize("name, tag", PACKAGED)
def test_a_packaged_file_is_whole_small_in_half_precision_and_has_a_card(name, tag):
    weights = MODELS.get(name).weights[tag]
    model = create_model(name)
    account = load_weights(model, weights_file(MODELS.get(name), tag))
    assert account.missing == account.unexpected == account.reshaped == []
    assert sum(parameter.numel() for parameter in model.parameters()) <= 5_000_000
    for key, tensor in load_file(FOLDER / weights.packaged).items():
        too_large = tensor.is_floating_point() and tensor.abs().max() > torch.finfo(torch.float16).max
        assert not tensor.is_floating_point() or tensor.dtype == torch.float16 or too_large, key
    assert any(f"`{weights.packaged}`" in card.read_text(encoding="utf-8") for card in FOLDER.glob("*.md"))
    assert weights.licence and weights.top1 is not None and weights.top1 > 0


@cache
def validation_images():
    return open_dataset("tiny-imagenet-32", SHARED / "tiny-imagenet-32").test


@pytest.mark.skipif(not (SHARED / "tiny-imagenet-32").exists(), reason="the sheets of Tiny-ImageNet are not here")
@pytest.mark.parametrize("name, tag", PACKAGED)
def test_packaged_weights_reach_about_the_accuracy_of_their_card(name, tag):
    images = validation_images()
    chosen = np.arange(0, len(images.labels), 50)
    pixels = images.stack(chosen) / 255
    inputs = (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    with torch.no_grad():
        found = create_model(name, pretrained=tag).eval()(inputs).argmax(1)
    right = np.mean(found.numpy() == images.labels[chosen])
    expected = (MODELS.get(name).weights[tag].top1 or 0.0) / 100
    assert abs(right - expected) < 4 * (expected * (1 - expected) / len(chosen)) ** 0.5


def test_every_file_of_the_package_is_registered_once():
    registered = [MODELS.get(name).weights[tag].packaged for name, tag in PACKAGED]
    assert sorted(registered) == sorted(path.name for path in FOLDER.glob("*.safetensors")) and registered


# Tags


@pytest.mark.parametrize("name, tag", TAGS)
def test_a_tag_is_a_word(name, tag):
    assert re.fullmatch(r"[a-z0-9_-]+", tag) and tag not in ("true", "false")


def test_the_first_weights_are_the_default_and_others_have_a_tag():
    first, second = (PublicWeights(packaged=f"{word}.safetensors") for word in ("first", "second"))
    entry = dataclasses.replace(MODELS.get("vim_nano"), weights={"a": first, "b-2": second})
    assert weights_file(entry).name == weights_file(entry, "a").name == "first.safetensors"
    assert weights_file(entry, "b-2") == FOLDER / "second.safetensors"
    with pytest.raises(UserError, match=r"'vim_nano' has no weights 'c': its weights are a, b-2; for a file, give"):
        weights_file(entry, "c")
    with pytest.raises(UserError, match=r"'vim_nano' has no weights 'c': it has no public weights; for a file"):
        create_model("vim_nano", pretrained="c")


def test_a_tag_loads_the_weights_and_a_path_the_file(tmp_path, monkeypatch):
    """Also where a file has the name of the tag."""
    monkeypatch.chdir(tmp_path)
    by_tag = create_model("defocus_mamba_nano", pretrained="tin32-39ep").state_dict()
    stored = load_file(FOLDER / "defocus_mamba_nano_tin32.safetensors")
    other = {name: tensor + 1 for name, tensor in stored.items()}
    torch.save(other, "tin32-39ep")
    again = create_model("defocus_mamba_nano", pretrained="tin32-39ep").state_dict()
    for path in ("./tin32-39ep", Path("tin32-39ep")):
        from_file = create_model("defocus_mamba_nano", pretrained=path).state_dict()
        for name, tensor in stored.items():
            assert torch.equal(by_tag[name], tensor.float()) and torch.equal(again[name], tensor.float())
            assert torch.equal(from_file[name], other[name].float())


def test_a_configuration_keeps_a_tag_and_makes_a_path_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve("demo", {"pretrained": "tin32-39ep"}).pretrained == "tin32-39ep"
    assert resolve("demo", {"pretrained": "./tin32-39ep"}).pretrained == str(tmp_path / "tin32-39ep")
    tagged = resolve({"extends": "demo", "pretrained": "tin32-39ep"}, {"backbone": "vim_nano"})
    assert tagged.pretrained is False  # the tag was the other model's


# Licences


def test_the_licence_of_registered_weights_is_logged(said):
    create_model("defocus_mamba_nano", pretrained="tin32-39ep")
    assert "from defocus_mamba_nano_tin32.safetensors" in said() and said().endswith(" Licence: Apache-2.0.")


@pytest.mark.parametrize("file, nvidias", [("mambavision_tiny_1k.pth.tar", True), ("mine.safetensors", False)])
def test_nvidias_licence_is_logged_for_its_files_only(file, nvidias, tmp_path, said):
    """A file that somebody trained from random weights has the same names; by its own name NVIDIA's is known."""
    state = create_model("mambavision_nano").state_dict()
    if nvidias:
        torch.save({"state_dict": state}, tmp_path / file)
    else:
        save_file(state, tmp_path / file)
    create_model("mambavision_nano", pretrained=tmp_path / file)
    assert f"{len(state)} tensors loaded from {file}" in said()
    assert ("non-commercial" in said()) == nvidias
