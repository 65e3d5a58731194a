"""What every backbone owes its user, over every registered model: its nano twin is run, its standard sizes are built
without values."""

import importlib
import json
import os
import subprocess
import sys

import pytest
import torch
from adapter_methods_help import SIZES as SIZES_OF_FAMILIES
from small_run import CONFIG
from tolerance import assert_near

from mambacl.backbones import create_model, list_models, load_weights
from mambacl.backbones.flops import count_flops
from mambacl.backbones.registry import MODELS
from mambacl.cli import main
from mambacl.config import resolve
from mambacl.errors import UserError
from mambacl.files import write_tensors

NANO = [name for name in list_models() if name.endswith("_nano")]
SIZES = [name for name in list_models() if name not in NANO]
SHRUNK = {
    "defocus_mamba": {"depth": 1, "img_size": 32},
    "vim": {"depth": 1, "img_size": 32},
    "vmamba": {"depths": [1, 1, 1], "dims": 16, "imgsize": 32},
    "mambavision": {"depths": (1, 1, 2, 1), "dim": 16, "resolution": 32, "num_heads": (1, 1, 2, 4)},
    "vit": {"depth": 1, "img_size": 32},
}


def images(count=2, height=32, width=32, seed=0):
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=NANO)
def nano(request):
    torch.manual_seed(0)
    return create_model(request.param, num_classes=7).eval()


def test_there_is_a_nano_twin_of_every_family():
    families = {MODELS.get(name).build for name in list_models()}
    assert {MODELS.get(name).build for name in NANO} == families and len(families) == 5


def test_forward_and_backward(nano):
    nano.zero_grad()
    logits = nano(images())
    assert logits.shape == (2, 7) and torch.equal(logits, nano.forward_head(nano.forward_features(images())))
    assert nano.forward_head(nano.forward_features(images()), pre_logits=True).shape == (2, nano.num_features)
    logits.square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in nano.parameters())


def test_the_classifier_is_behind_one_door(nano):
    """`get_classifier` is what makes logits of features; `default_cfg` has its name, as in timm."""
    features = nano.forward_head(nano.forward_features(images()), pre_logits=True)
    assert torch.equal(nano.get_classifier()(features), nano(images()))
    names = nano.default_cfg["classifier"]
    assert nano.get_submodule(names if isinstance(names, str) else names[0]) is nano.get_classifier()
    bare = create_model(nano_name(nano), num_classes=0)
    assert isinstance(bare.get_classifier(), torch.nn.Identity) and bare.num_features == nano.num_features


def test_weights_are_the_second_argument_as_in_timm(nano, tmp_path):
    write_tensors(tmp_path / "weights.safetensors", nano.state_dict(), {})
    other = create_model(nano_name(nano), tmp_path / "weights.safetensors", num_classes=7)
    assert all(torch.equal(a, b) for a, b in zip(nano.parameters(), other.parameters(), strict=True))
    with pytest.raises(TypeError):
        create_model(nano_name(nano), False, 7)


def test_the_data_it_wants_is_said(nano):
    data = nano.default_cfg
    assert data["input_size"] == (3, 32, 32) and len(data["mean"]) == len(data["std"]) == 3
    assert 0 < data["crop_pct"] <= 1 and data["interpolation"] == "bicubic"


def test_predictions_do_not_depend_on_the_batch(nano):
    with torch.no_grad():
        together, alone = nano(images(5)), torch.cat([nano(image[None]) for image in images(5)])
    assert_near(together, alone, terms=2**12)


def test_a_new_classifier_follows_the_models_device_and_precision(nano):
    model = create_model(nano_name(nano), num_classes=7).double()
    model.reset_classifier(3)
    assert model.num_classes == 3 and model(images().double()).shape == (2, 3)
    model.reset_classifier(0)
    pooled = model.forward_head(model.forward_features(images().double()), pre_logits=True)
    assert torch.equal(model(images().double()), pooled) or model.training
    assert model(images().double()).shape == (2, model.num_features)


@pytest.mark.parametrize("name", list_models())
def test_every_size_keeps_the_contract(name):
    """Each with its options, but few and narrow blocks."""
    model = create_model(name, num_classes=11, **next(o for family, o in SHRUNK.items() if family in name)).eval()
    assert model.default_cfg["input_size"] == (3, 32, 32)
    assert {"mean", "std", "crop_pct", "interpolation"} <= model.default_cfg.keys()
    features = model.forward_features(images())
    pooled = model.forward_head(features, pre_logits=True)
    assert pooled.shape == (2, model.num_features)
    logits = model(images())
    assert torch.equal(logits, model.forward_head(features))
    assert model.num_classes == 11 and len(logits) == 2 and logits.shape[-1] == 11

    model.reset_classifier(5)
    assert model.num_classes == 5 and model(images()).shape[-1] == 5
    assert torch.equal(model.forward_features(images()), features)
    model.reset_classifier(0)
    assert model.num_classes == 0 and torch.equal(model(images()), pooled)
    assert not [key for key in model.state_dict() if key.startswith(("head", "classifier.head"))]


def nano_name(model):
    return next(name for name in NANO if isinstance(model, MODELS.get(name).build) and same_size(name, model))


def same_size(name, model):
    with torch.device("meta"):
        other = create_model(name, num_classes=7)
    return {n: p.shape for n, p in other.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}


def test_its_state_comes_back(nano, tmp_path):
    write_tensors(tmp_path / "weights.safetensors", nano.state_dict(), {})
    other = create_model(nano_name(nano), num_classes=7).eval()
    account = load_weights(other, tmp_path / "weights.safetensors")
    assert not account.missing and not account.unexpected and not account.reshaped
    with torch.no_grad():
        assert torch.equal(other(images()), nano(images()))


def test_a_missing_tensor_of_the_backbone_is_an_error_and_another_head_is_not(nano, tmp_path):
    state = nano.state_dict()
    write_tensors(tmp_path / "whole.safetensors", state, {})
    other = create_model(nano_name(nano), num_classes=9)
    assert any("head" in name for name in load_weights(other, tmp_path / "whole.safetensors").missing)
    lost = next(name for name in state if name.endswith(("A_log", "A_logs", "qkv.weight")))
    state.pop(lost)
    write_tensors(tmp_path / "part.safetensors", state, {})
    with pytest.raises(UserError, match=f"lacks .*{lost}"):
        load_weights(other, tmp_path / "part.safetensors")


def test_checkpointing_changes_no_gradient(nano):
    gradients = []
    for enable in (False, True):
        nano.set_grad_checkpointing(enable)
        nano.zero_grad()
        nano(images()).square().sum().backward()
        gradients.append([p.grad.clone() for p in nano.parameters()])
    nano.set_grad_checkpointing(False)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_images_may_be_larger_and_oblong(nano):
    with torch.no_grad():
        assert nano(images(1, 48, 40)).shape == (1, 7)


@pytest.mark.parametrize(
    "shape", [(3, 32, 32), (1, 1, 32, 32), (1, 4, 32, 32), (2, 3, 0, 0), (2, 3, 32, 0), (32,)], ids=str
)
def test_a_wrong_shape_is_refused_with_the_right_one(nano, shape):
    with pytest.raises(UserError, match=r"images|pixels") as caught, torch.no_grad():
        nano(torch.zeros(shape))
    assert str(shape) in str(caught.value) or f"{shape[-2]} x {shape[-1]}" in str(caught.value)


def test_a_new_classifier_takes_timms_second_argument_and_pools_in_one_way(nano):
    model = create_model(nano_name(nano), num_classes=7)
    model.reset_classifier(3, None)
    model.reset_classifier(4, global_pool=None)
    assert model.num_classes == 4
    with pytest.raises(UserError, match="has only one pooling: omit global_pool, got 'max'"):
        model.reset_classifier(5, "max")
    assert model.num_classes == 4 and model.eval()(images()).shape == (2, 4)


def test_a_file_without_counters_of_batches_is_loaded(nano, tmp_path):
    state = {name: tensor for name, tensor in nano.state_dict().items() if not name.endswith("num_batches_tracked")}
    write_tensors(tmp_path / "weights.safetensors", state, {})
    other = create_model(nano_name(nano), num_classes=7).eval()
    account = load_weights(other, tmp_path / "weights.safetensors")
    assert len(account.missing) == len(nano.state_dict()) - len(state)
    with torch.no_grad():
        assert torch.equal(other(images()), nano(images()))


@pytest.mark.slow
@pytest.mark.parametrize("name", NANO)
def test_it_compiles_without_a_break(name):
    """With few blocks where the family is known here: the compiler takes its time for each."""
    torch.manual_seed(0)
    model = create_model(name, num_classes=7, pretrained=False, **SIZES_OF_FAMILIES.get(name, {})).eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert_near(compiled(images()), model(images()), terms=2**10)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NANO if name != "vit_nano"])  # which has no selective SSM
@pytest.mark.usefixtures("few_test_images")
def test_two_tasks_of_mamba_cl(name, tmp_path, capsys):
    """As typed: `mambacl train demo --method mamba-cl --backbone vim_nano`, on few images."""
    options = ["--stream.train_per_class", "4", "--stream.tasks", "[5,5]", "--training.passes", "1"]
    options += ["--method", "mamba-cl", "--nullspace.A.trains", "false", "--nullspace.W_delta.trains", "false"]
    assert main(["train", "demo", "--backbone", name, *options, "--out", str(tmp_path / "run")]) == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["status"] == "finished" and results["backbone"] == name and len(results["correct"]) == 2
    audit = json.loads((tmp_path / "run" / "audit.json").read_text())
    assert {part["kind"] for part in audit["updates"][0]["parts"]} == {"W_B", "W_C", "out"}  # what trains


def test_another_backbone_drops_what_a_preset_chose_for_its_own():
    chosen = {"extends": "demo", "nullspace": {"blocks": [6, 7], "rank": "energy:0.77"}}
    config = resolve(chosen, {"backbone": "vim_nano"})
    assert config.pretrained is False and config.nullspace.blocks is None
    assert config.nullspace.rank == "energy:0.77"
    assert config.stream.transforms.image_size == 24 and config.stream.train_per_class == 200  # both are made for 32
    kept = resolve(chosen, {"backbone": "defocus_mamba_nano"})
    assert kept.pretrained == "tin32-39ep" and kept.nullspace.blocks == [6, 7]
    larger = resolve(chosen, {"backbone": "vim_tiny"})
    assert larger.pretrained is True and larger.stream.transforms.image_size is None  # it has public weights, at 224
    assert resolve("demo", {"backbone": "vim_nano", "pretrained": "x.pth"}).pretrained.endswith("x.pth")
    assert resolve(CONFIG, {}).backbone_options


def test_another_backbone_keeps_an_image_size_only_where_its_own_is_the_same():
    def size(source, **overrides):
        return resolve(source, overrides).stream.transforms.image_size

    assert size("demo", backbone="vim_nano") == size("demo", backbone="defocus_mamba_nano") == size("demo") == 24
    for name in ("vim_tiny", "vmamba_base_s2l15", "mambavision_base"):
        assert size("demo", backbone=name) is None
        assert size("demo", backbone=name, **{"stream.transforms.image_size": 64}) == 64  # given by hand
    assert size("demo", backbone="vim_nano", backbone_options={"img_size": 64}) is None
    assert size(CONFIG, backbone="vim_nano") is None  # its own model is made for 16 pixels
    assert size(CONFIG, backbone="vmamba_nano", backbone_options={"imgsize": 16}) == 16
    resized = {**CONFIG, "stream": {"transforms": {"image_size": 16, "resize": 18, "augment": "flip"}}}
    dropped = resolve(resized, {"backbone": "vim_nano"}).stream.transforms
    assert dropped.image_size is None and dropped.resize is None and dropped.augment == "flip"
    assert resolve(resized, {}).stream.transforms.resize == 18
    assert size({**CONFIG, "backbone": "not_installed"}, backbone="vim_nano") is None


def test_images_that_do_not_fit_the_model_name_the_option(tmp_path, capsys):
    options = ["--backbone", "vim_nano", "--stream.transforms.image_size", "30", "--out", str(tmp_path / "run")]
    assert main(["train", "demo", *options]) == 2
    said = capsys.readouterr().err
    assert "30 x 30 pixels do not divide into patches" in said
    assert "Set --stream.transforms.image_size; the size of vim_nano is 32." in said and not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", SIZES)
def test_every_size_is_built_and_counted_on_the_meta_device(name):
    with torch.device("meta"):
        model = create_model(name).eval()
    flops, scan = count_flops(model, model.default_cfg["input_size"][-1])
    assert flops > scan and (scan > 0) != name.startswith("vit")


def test_operations_by_hand():
    """One De-focus block of known sizes: the products, the convolutions and the scan."""
    with torch.device("meta"):
        model = create_model(
            "defocus_mamba", img_size=32, patch_size=16, embed_dim=8, depth=1, num_classes=0, use_aux_loss=False,
            mamba={"intermediate_size": 16, "state_size": 4, "time_step_rank": 3, "group_norm_size": 4},
        ).eval()  # fmt: skip
    tokens = 2 * 2 + 1
    linear = 8 * 32 + 16 * (3 + 8) + 3 * 16 + 16 * 8
    convolutions = 4 * 3 * 16 * 16 * 8 + tokens * 16 * 4
    assert count_flops(model, 32) == (2 * (tokens * linear + convolutions) + 9 * tokens * 16 * 4, 9 * tokens * 16 * 4)


def test_the_papers_count_of_defocus_large():
    with torch.device("meta"):
        model = create_model("defocus_mamba_large_22k", num_classes=1000, head_type="IN1k_cls", use_aux_loss=False)
    flops, scan = count_flops(model.eval(), 192)
    assert (flops - scan) / 1e9 == pytest.approx(91.7, abs=0.2)


def test_the_list(capsys):
    assert main(["models", "mambavision_tiny"]) == 0
    text = capsys.readouterr().out
    assert "31.79 M" in text and "82.3" in text and "mambavision_tiny_1k.pth.tar" in text and "non-commercial" in text
    assert "in1k" in text and "ImageNet-1k" in text and "Tiny-ImageNet" not in text
    assert main(["models", "defocus_mamba_nano"]) == 0
    text = capsys.readouterr().out
    assert "tin32-148ep  47.2  Tiny-ImageNet at 32 px, Apache-2.0, in the package\n" in text
    assert "tin32-39ep   38.9  Tiny-ImageNet at 32 px, Apache-2.0, in the package\n" in text
    assert main(["models", "vmmba"]) == 2
    assert "No model's name contains 'vmmba'. Did you mean 'vmamba'?" in capsys.readouterr().err


@pytest.mark.slow
def test_timm_knows_them_after_an_import():
    pytest.importorskip("timm")
    code = (
        "import mambacl, timm; print(timm.is_model('vim_nano')); import mambacl.timm, torch;"
        "m = timm.create_model('vim_nano', num_classes=3);"
        "print(tuple(m(torch.zeros(1, 3, 32, 32)).shape), timm.is_model('vmamba_base_s2l15'),"
        "timm.create_model('defocus_mamba_nano', pretrained=True, num_classes=0).num_features,"
        "timm.create_model('defocus_mamba_nano.tin32-39ep', pretrained=True).num_features)\n"
        "try: timm.create_model('defocus_mamba_nano.tin64', pretrained=True)\n"
        "except mambacl.UserError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n", 1) == [
        "False",
        "(1, 3) True 192 192\n'defocus_mamba_nano' has no weights 'tin64': its weights are "
        f"{', '.join(MODELS.get('defocus_mamba_nano').weights)}; for a file, give its path, such as ./tin64.\n",
    ]


def test_without_timm_the_import_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setitem(sys.modules, "timm.models", None)
    monkeypatch.delitem(sys.modules, "mambacl.timm", raising=False)
    with pytest.raises(ImportError, match="needs timm: pip install timm"):
        importlib.import_module("mambacl.timm")


@pytest.mark.slow
def test_a_broken_package_of_others_is_named(tmp_path):
    pytest.importorskip("timm")
    about = tmp_path / "theirs-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[mambacl.backbones]\nbroken = theirs_is_gone\n")
    code = (
        "import importlib, mambacl, timm\n"
        "for fails in (lambda: mambacl.create_model('vim_nano'), lambda: importlib.import_module('mambacl.timm')):\n"
        "    try: fails()\n"
        "    except mambacl.UserError as error: print(error)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    said = "The model 'broken' of another package (theirs_is_gone) cannot be loaded"
    refused = done.stdout.splitlines()
    assert len(refused) == 2
    assert all(line.startswith(said) and "uninstall that package" in line for line in refused)
    command = [sys.executable, "-m", "mambacl", "models"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and said in done.stderr
