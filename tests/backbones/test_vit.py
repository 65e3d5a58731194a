"""The Vision Transformer: timm's numbers, timm's weights by name, and the three kinds of weights kept apart."""

import sys

import pytest
import timm
import torch
from safetensors.torch import save_file

from mambacl.backbones import create_model
from mambacl.backbones.registry import MODELS
from mambacl.errors import UserError

SMALL = {"depth": 2, "img_size": 32}


def images(height=32, width=32):
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
def test_it_computes_what_timms_model_computes(size):
    """Bit for bit, at its own size and at others, with timm's names."""
    ours = create_model(f"vit_{size}", num_classes=5, **SMALL).eval()
    theirs = timm.create_model(f"vit_{size}_patch16_224", num_classes=5, dynamic_img_size=True, **SMALL).eval()
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        for shape in ((32, 32), (48, 64)):
            assert torch.equal(ours(images(*shape)), theirs(images(*shape)))
            assert torch.equal(ours.forward_features(images(*shape)), theirs.forward_features(images(*shape)))


@pytest.mark.parametrize("name", ["vit_tiny", "vit_small", "vit_base"])
def test_the_input_goes_with_the_weights(name):
    """timm says for each of them what pixels it wants; all are as the model says."""
    with torch.device("meta"):
        model = create_model(name)
    for tag, weights in MODELS.get(name).weights.items():
        config = timm.get_pretrained_cfg(weights.full_name)
        assert config.tag == tag and config.num_classes == weights.classes
        for key in ("input_size", "mean", "std", "crop_pct", "interpolation"):
            assert model.default_cfg[key] == getattr(config, key)


def test_vit_nano_is_small():
    with torch.device("meta"):
        model = create_model("vit_nano")
    assert sum(p.numel() for p in model.parameters()) <= 5_000_000 and model.default_cfg["input_size"] == (3, 32, 32)
    assert model.default_cfg["mean"] == create_model("vim_nano").default_cfg["mean"]  # pre-trained like the others


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MAMBACL_CACHE", str(tmp_path))
    return tmp_path


def as_timm_saves(path, classes):
    """Weights of a small ViT under the names of a file of timm's."""
    torch.manual_seed(0)
    state = create_model("vit_tiny", num_classes=classes, **SMALL).state_dict()
    save_file(state, path)
    return state


@pytest.mark.parametrize("pretrained", ["augreg_in21k_ft_in1k", "vit_tiny_patch16_224.augreg_in21k_ft_in1k"])
def test_weights_by_timms_names(pretrained, cache):
    state = as_timm_saves(cache / "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors", 1000)
    model = create_model("vit_tiny", pretrained, num_classes=0, **SMALL)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_kinds_of_weights_are_never_mixed_in_silence(cache):
    as_timm_saves(cache / "vit_tiny_patch16_224.augreg_in21k.safetensors", 1000)
    with pytest.raises(UserError, match=r"is not augreg_in21k: its classifier has 1000 classes.* 21843.*another kind"):
        create_model("vit_tiny", True, num_classes=0, **SMALL)
    with pytest.raises(UserError, match=r"no weights 'orig_in21k': its weights are augreg_in21k, augreg_in21k_ft_in1k"):
        create_model("vit_tiny", "orig_in21k", **SMALL)
    other = cache / "vim.safetensors"
    save_file(create_model("vim_nano").state_dict(), other)
    with pytest.raises(UserError, match="does not fit this model"):
        create_model("vit_tiny", other, num_classes=0, **SMALL)


def test_a_local_file_of_another_size_is_interpolated(tmp_path):
    state = as_timm_saves(tmp_path / "mine.safetensors", 7)
    model = create_model("vit_tiny", tmp_path / "mine.safetensors", num_classes=7, depth=2, img_size=64)
    assert model.pos_embed.shape[1] == 17 and torch.equal(model.pos_embed[:, 0], state["pos_embed"][:, 0])
    assert torch.equal(model.head.weight, state["head.weight"])


@pytest.mark.parametrize(
    "options, words",
    [
        ({"num_heads": 5}, "multiple of num_heads"),
        ({"img_size": 30}, "do not divide into patches of 16"),
        ({"std": (1.0, 0.0, 1.0)}, "std positive"),
        ({"depth": 0}, "depth must be positive"),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    with pytest.raises(UserError, match=words):
        create_model("vit", **options)


def test_without_timm_one_sentence_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name == "timm" or name.startswith("timm.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UserError, match=r"timm's, which is not installed: pip install 'mambacl\[vit\]'"):
        create_model("vit_nano")
