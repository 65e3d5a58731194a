"""MambaVision against the recorded public one, the public checkpoints' manifests, and its own documentation."""

import json
import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from backbones_help import assert_refused, gradients_like_recorded, on_meta, outputs_and_recorded, relative, under
from torch import nn

from mambacl.backbones import create_model, list_models, load_weights, mambavision
from mambacl.backbones.registry import MODELS
from mambacl.errors import UserError

GOLDENS = Path(__file__).parents[1] / "goldens"
GOLDEN = "mambavision_T_like"
MANIFESTS = {
    "mamba_vision_T": ("mambavision_tiny", 31_794_248),
    "mamba_vision_T2": ("mambavision_tiny2", 35_104_008),
    "mamba_vision_S": ("mambavision_small", 50_140_584),
    "mamba_vision_B": ("mambavision_base", 97_685_288),
    "mamba_vision_B_21k": ("mambavision_base_21k", 97_685_288),
    "mamba_vision_L": ("mambavision_large", 227_961_048),
    "mamba_vision_L_21k": ("mambavision_large_21k", 227_961_048),
    "mamba_vision_L2": ("mambavision_large2", 241_554_824),
}
SIZES = [name for name in list_models() if name.startswith("mambavision")]
TINY = {
    "dim": 8,
    "in_dim": 4,
    "depths": (1, 1, 3, 2),
    "window_size": (8, 8, 4, 2),
    "num_heads": (1, 1, 2, 4),
    "mlp_ratio": 2,
    "stem_stride": 1,
    "resolution": 32,
    "num_classes": 5,
}


def tiny(**options):
    """A model of a few thousand values, the same each time, with features and statistics of a usual size."""
    torch.manual_seed(0)
    model = create_model("mambavision", **{**TINY, **options})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Linear):
                parameter.normal_(std=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(std=0.1)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
    return model.eval()


def images(count=2, height=32, width=None, seed=0):
    return torch.randn(count, 3, height, width or height, generator=torch.Generator().manual_seed(seed))


# The recorded public model


@pytest.fixture
def golden(golden_model):
    """The recorded model with its weights, and all recorded tensors."""
    model, tensors, _ = golden_model(GOLDEN)
    return model, tensors


def test_logits_and_gradients_are_the_recorded_ones_in_float64(golden):
    gradients = gradients_like_recorded(*golden, count=52)
    norms = json.loads((GOLDENS / f"{GOLDEN}.json").read_text())["grad_norms_f64"]
    assert {name: gradient.norm().item() for name, gradient in gradients.items()} == pytest.approx(norms, rel=1e-9)


def test_logits_and_block_outputs_are_those_recorded_in_float32(golden):
    outputs, expected = outputs_and_recorded(*golden)
    outputs["avgpool"] = golden[0].forward_head(outputs["norm"], pre_logits=True)[:, :, None, None]
    assert len(expected) == 16
    assert [name for name in expected if relative(outputs[name], expected[name]) > 2e-5] == []


def test_each_scan_is_the_recorded_one(golden, monkeypatch):
    scans, outputs = [], []
    original = mambavision.ops.scan_tokens

    def record(*tensors, **options):
        scans.append(tensors)
        return original(*tensors, **options)

    monkeypatch.setattr(mambavision.ops, "scan_tokens", record)
    model, tensors = golden
    for module in model.modules():
        if isinstance(module, mambavision.MambaVisionMixer):
            module.out_proj.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    with torch.no_grad():
        model.double()(tensors["input"].double())
    assert len(scans) == len(outputs) == 4
    for call, ((u, steps, _, B, C), y) in enumerate(zip(scans, outputs, strict=True)):
        expected = under(tensors, f"scan_f32/{call}/")
        features = {"u": u, "delta": F.softplus(steps), "B": B.squeeze(2), "C": C.squeeze(2), "out": y.chunk(2, -1)[0]}
        assert {name: relative(features[name].mT, expected[name]) < 2e-5 for name in expected} == dict.fromkeys(
            features, True
        )


# The public checkpoints' names and shapes


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_names_and_shapes_are_the_manifests(manifest):
    recorded = json.loads((GOLDENS / "manifests" / f"{manifest}.json").read_text())
    name, count = MANIFESTS[manifest]
    model = on_meta(name)
    entries = {key: [list(value.shape), str(value.dtype)[6:]] for key, value in model.state_dict().items()}
    assert entries == {key: [entry["shape"], entry["dtype"]] for key, entry in recorded["state_dict"].items()}
    parameters = dict(model.named_parameters())
    assert parameters.keys() == {key for key, entry in recorded["state_dict"].items() if entry["kind"] == "param"}
    assert sum(parameter.numel() for parameter in parameters.values()) == count == recorded["num_params"]


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_preprocessing_address_and_licence_are_the_manifests(manifest):
    recorded = json.loads((GOLDENS / "manifests" / f"{manifest}.json").read_text())
    name, _ = MANIFESTS[manifest]
    assert recorded["preprocessing"].pop("crop_mode") == "center"
    default_cfg = on_meta(name).default_cfg
    assert default_cfg.pop("classifier") == "head"  # not about images
    assert {key: list(v) if isinstance(v, tuple) else v for key, v in default_cfg.items()} == recorded["preprocessing"]
    weights = MODELS.get(name).weights["in1k"]
    assert weights.url == recorded["checkpoint"] and weights.licence == "CC-BY-NC-SA-4.0, non-commercial"


def test_nano_is_small():
    model = on_meta("mambavision_nano")
    assert sum(parameter.numel() for parameter in model.parameters()) == 468_400
    assert model.num_classes == 200 and model.default_cfg["input_size"] == (3, 32, 32)


# The contract of every size


def test_list_models_names_every_size():
    names = "nano", "mini", "tiny", "tiny2", "small", "base", "base_21k", "large", "large_21k", "large2"
    assert set(SIZES) == {"mambavision", *(f"mambavision_{name}" for name in names)}


def test_initial_values_are_the_public_ones():
    torch.manual_seed(0)
    block = create_model("mambavision_nano", layer_scale=1e-5).levels[3].blocks[0]
    mixer = block.mixer
    torch.testing.assert_close(mixer.A_log.exp(), torch.arange(1.0, 9.0).expand(64, 8))
    assert torch.equal(mixer.D, torch.ones(64)) and torch.equal(mixer.dt_proj.bias, torch.zeros(64))
    for layer in (mixer.dt_proj, mixer.in_proj, mixer.x_proj, mixer.out_proj, block.mlp.fc1):
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.15)
    assert torch.equal(block.gamma_1, torch.full((128,), 1e-5)) and block.gamma_1 is not block.gamma_2


# Stages, windows and image sizes


def test_mixers_come_first_and_take_the_odd_block():
    levels = on_meta("mambavision_tiny2").levels
    kinds = [[type(block.mixer).__name__ for block in level.blocks] for level in levels[2:]]
    assert kinds == [["MambaVisionMixer"] * 6 + ["Attention"] * 5, ["MambaVisionMixer"] * 2 + ["Attention"] * 2]


@pytest.mark.parametrize("height, width", [(32, 32), (32, 48), (40, 33), (37, 61), (9, 130), (1, 1)])
def test_any_image_size_works(height, width):
    model = tiny()
    features = model.forward_features(images(2, height, width))
    for _ in range(3):
        height, width = (height + 1) // 2, (width + 1) // 2
    assert features.shape == (2, 64, height, width) and features.isfinite().all()
    public = create_model("mambavision", **{**TINY, "stem_stride": 4, "window_size": (8, 8, 14, 7)}).eval()
    assert public(images(1, 45, 30)).shape == (1, 5)


def test_windows_are_cut_and_joined_row_by_row():
    x = torch.randn(2, 3, 4, 6)
    windows = mambavision.to_windows(x, 2)
    assert windows.shape == (12, 4, 3) and windows.is_contiguous()
    by_hand = []
    for image in x:
        for top in (0, 2):
            for left in (0, 2, 4):
                by_hand.append(image[:, top : top + 2, left : left + 2].flatten(1).T)
    assert torch.equal(windows, torch.stack(by_hand))
    assert torch.equal(mambavision.from_windows(windows, 2, x.shape), x)


def test_windows_do_not_see_one_another():
    level = tiny().levels[3]
    x = torch.randn(1, 64, 4, 6)
    changed = x.clone()
    changed[:, :, 2:4, 4:6] += 1.0
    difference = (level(changed) - level(x)).abs().amax((0, 1))
    assert difference[2:4, 4:6].min() > 1e-3
    difference[2:4, 4:6] = 0.0
    assert difference.max() == 0.0


def test_padding_is_zeros_that_take_part_and_are_cropped():
    level = tiny(window_size=(8, 8, 4, 4)).levels[3]
    x = torch.randn(2, 64, 3, 2)
    padded = torch.zeros(2, 64, 4, 4)
    padded[:, :, :3, :2] = x
    torch.testing.assert_close(level(x), level(padded)[:, :, :3, :2])
    unpadded = x.flatten(2).mT
    for block in level.blocks:
        unpadded = block(unpadded)
    assert not torch.allclose(unpadded.mT.reshape(x.shape), level(x), atol=1e-3)


def test_the_stem_may_keep_the_resolution():
    shapes = {stride: tiny(stem_stride=stride).patch_embed(images()).shape[-1] for stride in (1, 2, 4)}
    assert shapes == {1: 32, 2: 16, 4: 8}


# The mixer


def test_mixer_by_hand():
    mixer = tiny().levels[3].blocks[0].mixer
    nn.init.normal_(mixer.dt_proj.bias)
    seen = {}
    for name in ("x_proj", "out_proj"):
        module = getattr(mixer, name)
        module.register_forward_pre_hook(lambda _, args, name=name: seen.__setitem__(name, args[0]))
    tokens = torch.randn(2, 5, 64)
    output = mixer(tokens)
    with torch.no_grad():
        x, z = mixer.in_proj(tokens).mT.chunk(2, 1)  # channels before tokens
        x, z = (
            F.silu(F.conv1d(v, c.weight, padding=1, groups=32)) for v, c in ((x, mixer.conv1d_x), (z, mixer.conv1d_z))
        )
        dt, B, C = F.linear(x.mT, mixer.x_proj.weight).split([4, 8, 8], -1)
        delta = F.softplus(dt @ mixer.dt_proj.weight.T + 2 * mixer.dt_proj.bias)
        h, ys = torch.zeros(2, 32, 8), []
        for t in range(5):
            step, u = delta[:, t, :, None], x[:, :, t, None]
            h = torch.exp(-step * mixer.A_log.exp()) * h + step * u * B[:, t, None]
            ys.append((h * C[:, t, None]).sum(-1) + mixer.D * u[..., 0])
        joined = torch.cat((torch.stack(ys, 1), z.mT), -1)
    torch.testing.assert_close(seen["x_proj"], x.mT)
    torch.testing.assert_close(seen["out_proj"], joined)
    torch.testing.assert_close(output, F.linear(joined, mixer.out_proj.weight))


@pytest.mark.parametrize("options", [{"expand": 2}, {"d_conv": 5}, {"d_state": 3}])
def test_other_mixers_work(options):
    assert tiny(**options)(images()).isfinite().all()


def test_layer_scale_multiplies_both_branches():
    plain, scaled = tiny(), tiny(layer_scale=1.0)
    assert "levels.2.blocks.0.gamma_1" in scaled.state_dict() and "levels.2.blocks.0.gamma_1" not in plain.state_dict()
    scaled.load_state_dict(plain.state_dict(), strict=False)
    torch.testing.assert_close(scaled(images()), plain(images()))
    block, tokens = scaled.levels[2].blocks[0], torch.randn(2, 16, 32)
    nn.init.zeros_(block.gamma_1), nn.init.constant_(block.gamma_2, 0.5)
    torch.testing.assert_close(block(tokens), tokens + 0.5 * block.mlp(block.norm2(tokens)))


def test_layer_scale_of_the_convolutions():
    assert tiny(layer_scale_conv=None).state_dict().keys() == tiny().state_dict().keys()
    plain, scaled = tiny(), tiny(layer_scale_conv=1.0)
    assert scaled.state_dict().keys() - plain.state_dict().keys() == {f"levels.{i}.blocks.0.gamma" for i in (0, 1)}
    scaled.load_state_dict(plain.state_dict(), strict=False)
    torch.testing.assert_close(scaled(images()), plain(images()))
    block, image = scaled.levels[0].blocks[0], torch.randn(2, len(scaled.levels[0].blocks[0].gamma), 8, 8)
    branch = plain.levels[0].blocks[0](image) - image
    nn.init.constant_(block.gamma, 0.5)
    torch.testing.assert_close(block(image), image + 0.5 * branch)
    with pytest.raises(UserError, match="layer_scale_conv"):
        tiny(layer_scale_conv="large")


# Training


def test_drop_path_grows_linearly_over_all_blocks_and_rests_in_evaluation():
    model = tiny(drop_path_rate=0.6)
    rates = [block.drop_path_rate for level in model.levels for block in level.blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert torch.equal(model(images()), model(images()))
    model.levels[2].train()
    assert len({model(images(1)).sum().item() for _ in range(12)}) > 1


@pytest.mark.parametrize("training", [False, True])
def test_checkpointing_gives_the_same_gradients_and_statistics(training):
    plain, saving = tiny(drop_path_rate=0.3).train(training), tiny(drop_path_rate=0.3).train(training)
    saving.set_grad_checkpointing()
    calls = []
    saving.levels[2].blocks[0].mixer.register_forward_pre_hook(lambda *_: calls.append(1))
    for model in (plain, saving):
        torch.manual_seed(1)
        model(images()).square().sum().backward()
    assert len(calls) == 2  # forward, and again for the backward
    other = dict(saving.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(other[name].grad, parameter.grad, msg=name)
    others = dict(saving.named_buffers())
    assert all(torch.equal(others[name], buffer) for name, buffer in plain.named_buffers())
    saving.set_grad_checkpointing(False)
    saving(images()).sum().backward()
    assert len(calls) == 3


@pytest.mark.slow
def test_compiles_as_one_graph():
    model = create_model("mambavision_nano").eval()
    eager = model(images())
    eager.sum().backward()
    expected = model.levels[2].blocks[0].mixer.x_proj.weight.grad.clone()
    model.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(images())
    compiled.sum().backward()
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(model.levels[2].blocks[0].mixer.x_proj.weight.grad, expected)


@pytest.mark.parametrize("way", ["autocast", "half-precision weights"])
def test_half_precision_keeps_delta_the_decay_and_the_scan_in_float32(way, monkeypatch):
    model, scanned, steps = tiny(), [], []
    expected = model(images())
    original = mambavision.ops.scan_tokens

    def record(x, steps, A, *others, **options):
        result = original(x, steps, A, *others, **options)
        scanned.extend((steps.dtype, result[0].dtype))
        return result

    monkeypatch.setattr(mambavision.ops, "scan_tokens", record)
    model.levels[2].blocks[0].mixer.dt_proj.register_forward_hook(lambda _, __, output: steps.append(output.dtype))
    if way == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(images())
        assert steps == [torch.float32]
    else:
        logits = model.bfloat16()(images().bfloat16())
    assert logits.dtype == torch.bfloat16
    assert len(scanned) == 6 and set(scanned) == {torch.float32}
    assert relative(logits.float(), expected) < 0.1
    logits.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


# Public files


@pytest.mark.parametrize("prefix", ["", "module.", "model.", "encoder.", "module.encoder."])
def test_public_names_lose_their_prefix(prefix, caplog):
    model = tiny()
    state = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    if "encoder" in prefix:
        state[prefix.replace("encoder.", "decoder.weight")] = torch.zeros(3)
    logger = logging.getLogger("mambacl")
    logger.addHandler(caplog.handler)
    try:
        adapted = model.adapt_state(state)
    finally:
        logger.removeHandler(caplog.handler)
    assert adapted.keys() - {"decoder.weight"} == model.state_dict().keys()
    assert ("decoder.weight" in adapted) == ("encoder" in prefix)  # for the account
    model.load_state_dict({name: tensor for name, tensor in adapted.items() if name != "decoder.weight"})
    said = {record.getMessage() for record in caplog.records}
    assert len(said) == (prefix.removeprefix("module.") != "")  # without a prefix it can be anybody's
    assert all("models trained from them: CC-BY-NC-SA-4.0, non-commercial" in line for line in said)


def test_of_a_pre_training_file_all_but_the_encoder_is_left_over_and_named(tmp_path):
    model, other = tiny(), tiny()
    state = {f"encoder.{name}": tensor + 1 for name, tensor in model.state_dict().items() if "head" not in name}
    outside = {"decoder.weight": torch.zeros(3), "mask_token": torch.zeros(1)}
    own = {"norm.weight": torch.zeros_like(model.norm.weight), "head.weight": torch.zeros_like(model.head.weight)}
    torch.save({**outside, **own, **state}, tmp_path / "w.pth")
    account = load_weights(other, tmp_path / "w.pth")
    assert account.unexpected == ["decoder.weight", "mask_token"] and account.dropped == ["norm.weight", "head.weight"]
    assert len(account.renamed) == len(account.loaded) == len(state) and account.reshaped == []
    assert torch.equal(other.norm.weight, model.norm.weight + 1) and other.head.weight.abs().sum() > 0


def test_other_names_are_left_for_the_account():
    assert tiny().adapt_state({"module.strange": torch.zeros(1)}).keys() == {"strange"}


# Mistakes


@pytest.mark.parametrize(
    "options, message",
    [
        ({"depth": 3}, "no option 'depth'. Did you mean 'depths'?"),
        ({"depths": (1, 2)}, "depths must be four positive whole numbers, one per stage, got (1, 2)"),
        ({"depths": 3}, "depths takes a list of whole numbers, got 3"),
        ({"depths": "1234"}, "depths takes a list of whole numbers, got '1234'"),
        ({"window_size": [8, 8, 0, 7]}, "window_size must be four positive whole numbers"),
        ({"num_heads": [2, 4, True, 16]}, "num_heads takes a list of whole numbers"),
        ({"num_heads": [2, 4, 7, 16]}, "The 320 channels of stage 2 (counted from 0) do not divide into 7"),
        ({"dim": 0}, "dim must be positive"),
        ({"dim": "80"}, "dim takes a whole number"),
        ({"num_classes": -1}, "num_classes must not be negative"),
        ({"drop_path_rate": 1.0}, "drop_path_rate must be at least 0 and below 1"),
        ({"mlp_ratio": 0}, "mlp_ratio must be positive"),
        ({"stem_stride": 3}, "stem_stride must be 1, 2 or 4"),
    ],
    ids=str,
)
def test_wrong_options_are_named_with_the_remedy(options, message):
    assert_refused("mambavision", options, message)


@pytest.mark.parametrize("shape", [(3, 32, 32), (2, 1, 32, 32), (2, 3, 0, 32)])
def test_what_is_no_batch_of_images_is_refused(shape):
    with pytest.raises(UserError, match=r"images of shape \(b, 3, height, width\), got"):
        tiny()(torch.zeros(shape))
