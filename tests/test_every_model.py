"""What every backbone owes its user, over every registered model: its nano twin is run, its standard sizes are built
without values."""

import json
import subprocess
import sys

import pytest
import torch
from small_run import CONFIG

import mambacl
from mambacl.backbones import create_model, list_models, load_weights
from mambacl.backbones.flops import count_flops
from mambacl.backbones.registry import MODELS
from mambacl.cli import main
from mambacl.config import resolve
from mambacl.tensorfile import write_tensors

NANO = [name for name in list_models() if name.endswith("_nano")]
SIZES = [name for name in list_models() if name not in NANO]


def images(count=2, height=32, width=32, seed=0):
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=NANO)
def nano(request):
    torch.manual_seed(0)
    return create_model(request.param, num_classes=7).eval()


def test_there_is_a_nano_twin_of_every_family():
    families = {MODELS.get(name).build for name in list_models()}
    assert {MODELS.get(name).build for name in NANO} == families and len(families) == 4


def test_forward_and_backward(nano):
    nano.zero_grad()
    logits = nano(images())
    assert logits.shape == (2, 7) and torch.equal(logits, nano.forward_head(nano.forward_features(images())))
    assert nano.forward_head(nano.forward_features(images()), pre_logits=True).shape == (2, nano.num_features)
    logits.square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in nano.parameters())


def test_the_data_it_wants_is_said(nano):
    data = nano.default_cfg
    assert data["input_size"] == (3, 32, 32) and len(data["mean"]) == len(data["std"]) == 3
    assert 0 < data["crop_pct"] <= 1 and data["interpolation"] == "bicubic"


def test_predictions_do_not_depend_on_the_batch(nano):
    with torch.no_grad():
        together, alone = nano(images(5)), torch.cat([nano(image[None]) for image in images(5)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_a_new_classifier_follows_the_models_device_and_precision(nano):
    model = create_model(nano_name(nano), num_classes=7).double()
    model.reset_classifier(3)
    assert model.num_classes == 3 and model(images().double()).shape == (2, 3)
    model.reset_classifier(0)
    pooled = model.forward_head(model.forward_features(images().double()), pre_logits=True)
    assert torch.equal(model(images().double()), pooled) or model.training
    assert model(images().double()).shape == (2, model.num_features)


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
    state.pop(next(name for name in state if "A_log" in name))
    write_tensors(tmp_path / "part.safetensors", state, {})
    with pytest.raises(mambacl.errors.UserError, match=r"lacks .*A_log"):
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


def test_it_compiles_without_a_break(nano):
    compiled = torch.compile(nano, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(images()), nano(images()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NANO)
def test_two_tasks_of_mamba_cl(name, tmp_path, capsys):
    """As typed: `mambacl train demo --backbone vim_nano`, on few images."""
    options = ["--stream.train_per_class", "4", "--stream.tasks", "[5,5]", "--training.passes", "1"]
    assert main(["train", "demo", "--backbone", name, *options, "--out", str(tmp_path / "run")]) == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["status"] == "finished" and results["backbone"] == name and len(results["correct"]) == 2
    audit = json.loads((tmp_path / "run" / "audit.json").read_text())
    assert {part["kind"] for part in audit["updates"][0]["parts"]} == {"W_B", "W_C", "out"}  # what the demo protects


def test_another_backbone_drops_what_a_preset_chose_for_its_own():
    config = resolve("demo", {"backbone": "vim_nano"})
    assert config.pretrained is False and config.nullspace.blocks is None
    assert config.nullspace.rank == resolve("demo", {}).nullspace.rank
    kept = resolve("demo", {"backbone": "defocus_mamba_nano"})
    assert kept.pretrained is True and kept.nullspace.blocks
    assert resolve("demo", {"backbone": "vim_tiny"}).pretrained is True  # it has public weights
    assert resolve("demo", {"backbone": "vim_nano", "pretrained": "x.pth"}).pretrained.endswith("x.pth")
    assert resolve(CONFIG, {}).backbone_options


@pytest.mark.parametrize("name", SIZES)
def test_every_size_is_built_and_counted_on_the_meta_device(name):
    with torch.device("meta"):
        model = create_model(name).eval()
    flops, scan = count_flops(model, model.default_cfg["input_size"][-1])
    assert flops > scan > 0


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
    assert main(["models", "vmmba"]) == 2
    assert "No model's name contains 'vmmba'. Did you mean 'vmamba'?" in capsys.readouterr().err


@pytest.mark.parametrize("first, second", [("mambacl", "timm"), ("timm", "mambacl")])
def test_timm_knows_them_whichever_comes_first(first, second):
    pytest.importorskip("timm")
    code = (
        f"import {first}, {second}, torch, timm; m = timm.create_model('vim_nano', num_classes=3);"
        "print(tuple(m(torch.zeros(1, 3, 32, 32)).shape), timm.is_model('vmamba_base_s2l15'),"
        "timm.create_model('defocus_mamba_nano', pretrained=True, num_classes=0).num_features)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(1, 3) True 192"


def test_importing_it_imports_neither_torch_nor_timm():
    code = "import mambacl, sys; print([name for name in ('torch', 'timm') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
