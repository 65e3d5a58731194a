"""De-focus Mamba against the recorded public one, the public checkpoints' manifests, and its own documentation."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from backbones_help import assert_refused, gradients_like_recorded, on_meta, outputs_and_recorded, relative
from nullspace_help import observed
from safetensors.torch import load_file, save_file
from tolerance import assert_near

from mambacl.backbones import create_model, list_models, load_weights
from mambacl.backbones.layers import PatchEmbed, drop_path
from mambacl.errors import UserError
from mambacl.ops import scan

GOLDENS = Path(__file__).parents[1] / "goldens"
ORIGINAL_WEIGHTS = Path(__file__).parents[3] / "shared" / "weights" / "defocus_mamba_nano_tin32.pth"
MANIFESTS = {
    "defocus_mamba_small_GUESS": ("defocus_mamba_small", {}),
    "defocus_mamba_base": ("defocus_mamba_base", {}),
    "defocus_mamba_large": ("defocus_mamba_large", {}),
    "defocus_mamba_large_22k": ("defocus_mamba_large_22k", {}),
    "defocus_mamba_large_mambacl": (
        "defocus_mamba_large_22k",
        {"num_classes": 1000, "head_type": "IN1k_cls", "use_aux_loss": False},
    ),
}
SIZES = [name for name in list_models() if name.startswith("defocus_mamba")]


def images(count=2, size=16, seed=0):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


# The recorded public model


def test_logits_and_gradients_are_the_recorded_ones_in_float64(golden_model):
    model, tensors, _ = golden_model("defocus_base_like")
    gradients_like_recorded(model, tensors, count=38)


def test_logits_and_block_outputs_are_those_recorded_in_float32(golden_model):
    model, tensors, _ = golden_model("defocus_base_like")
    outputs, recorded = outputs_and_recorded(model, tensors)
    assert {"blocks.0", "blocks.1", "blocks.2", "norm"} <= recorded.keys()
    assert [name for name in recorded if relative(outputs[name], recorded[name]) > 2e-5] == []


def test_features_of_the_scan_are_the_recorded_ones(golden_model):
    model, tensors, _ = golden_model("defocus_base_like")
    for call in range(3):
        features = observed(model.double(), tensors["input"].double(), call)
        for name, word in {"x": "u", "delta": "delta", "B": "B", "C": "C"}.items():  # delta after softplus
            assert relative(features[name].mT, tensors[f"scan_f32/{call}/{word}"].squeeze(1)) < 2e-5


# The public checkpoints' names and shapes


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_names_and_shapes_are_the_manifests(manifest):
    recorded = json.loads((GOLDENS / "manifests" / f"{manifest}.json").read_text())
    name, options = MANIFESTS[manifest]
    model = on_meta(name, **options)
    shapes = {key: list(tensor.shape) for key, tensor in model.state_dict().items()}
    assert shapes == {key: entry["shape"] for key, entry in recorded["state_dict"].items()}
    assert sum(parameter.numel() for parameter in model.parameters()) == recorded["num_params"]


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_configuration_is_the_manifests(manifest):
    recorded = json.loads((GOLDENS / "manifests" / f"{manifest}.json").read_text())
    name, options = MANIFESTS[manifest]
    config = on_meta(name, **options).config
    assert config.img_size == recorded["img_size"]
    assert config.num_classes == recorded["config"]["NUM_CLASSES"]
    for key in ("depth", "use_rope", "use_pos_embed", "use_aux_loss", "head_type", "patch_embed_change_res"):
        assert getattr(config, key) == recorded["config"][key], key
    for key, value in recorded["config"]["MAMBA"].items():
        assert getattr(config.mamba, key) == value, key


def test_parameters_of_the_packaged_size_are_counted_as_published():
    assert sum(parameter.numel() for parameter in on_meta("defocus_mamba_nano").parameters()) == 3_069_320


# The contract of every size


def test_list_models_names_every_size():
    names = {f"defocus_mamba_{size}" for size in ("nano", "tiny", "small", "base", "large", "large_22k")}
    assert set(SIZES) == {"defocus_mamba", *names}
    assert list_models() == sorted(list_models())


# Heads and pooling


def test_the_class_token_is_the_last_and_is_what_is_pooled(tiny_model):
    model = tiny_model(num_classes=3)
    tokens = model.forward_features(images())
    assert tokens.shape == (2, 17, 32)
    assert torch.equal(model.forward_head(tokens, pre_logits=True), tokens[:, -1])
    assert torch.equal(model(images()), model.head(tokens[:, -1]))


def test_auxiliary_head_sees_every_patch_and_the_head_the_class_token(tiny_model):
    model = tiny_model(num_classes=3, use_aux_loss=True)
    tokens, output = model.forward_features(images()), model(images())
    assert output.shape == (2, 17, 3)
    torch.testing.assert_close(output[:, -1], model.head(tokens[:, -1]))
    torch.testing.assert_close(output[:, :-1], model.head2(tokens[:, :-1]))


def test_two_layer_head_has_a_tanh_between(tiny_model):
    model = tiny_model(num_classes=3, head_type="IN22k_cls")
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items() if name.startswith("head")}
    expected = {"head.0.weight": (96, 32), "head.0.bias": (96,), "head.2.weight": (3, 96), "head.2.bias": (3,)}
    assert shapes == expected
    pooled = model.forward_head(model.forward_features(images()), pre_logits=True)
    hidden = torch.tanh(F.linear(pooled, model.head[0].weight, model.head[0].bias))
    torch.testing.assert_close(model(images()), F.linear(hidden, model.head[2].weight, model.head[2].bias))


def test_average_pooling_has_no_class_token(tiny_model):
    model = tiny_model(head_type="IN1k_avg")
    assert model.cls_token is None and "cls_token" not in model.state_dict()
    tokens = model.forward_features(images())
    assert tokens.shape == (2, 16, 32)
    torch.testing.assert_close(model(images()), tokens.mean(1))


# Options of the mixer


def test_without_rope_is_rope_at_frequency_zero(tiny_model):
    rotated, plain = tiny_model(), tiny_model(use_rope=False)
    assert "blocks.0.mixer.freq" not in plain.state_dict()
    missing = plain.load_state_dict(rotated.state_dict(), strict=False)
    assert missing.missing_keys == [] and all(name.endswith("freq") for name in missing.unexpected_keys)
    assert not torch.allclose(rotated(images()), plain(images()), atol=1e-3)
    with torch.no_grad():
        for block in rotated.blocks:
            block.mixer.freq.zero_()
    torch.testing.assert_close(rotated(images()), plain(images()))


def test_rope_scale_divides_the_frequencies(tiny_model):
    scaled, plain = tiny_model(mamba={"rope_scale_factor": 4.0}), tiny_model()
    with torch.no_grad():
        for block in plain.blocks:
            block.mixer.freq /= 4.0
    torch.testing.assert_close(scaled(images()), plain(images()), rtol=1e-4, atol=1e-5)


def test_rotation_is_the_published_one_by_hand(tiny_model):
    mixer = tiny_model(mamba={"state_size": 2, "rope_scale_factor": 2.0}).blocks[0].mixer
    with torch.no_grad():
        mixer.freq.copy_(torch.tensor([0.3, 0.7]))
    M = torch.tensor([[[1.0, 2.0], [3.0, 5.0]]])
    a, b = torch.tensor(0.15), torch.tensor(0.35)  # position 1, scaled
    turned = torch.stack((3 * a.cos() - 5 * a.sin(), 5 * b.cos() + 3 * b.sin()))
    torch.testing.assert_close(mixer.rotate(M[:, :, None])[0, :, 0], torch.stack((M[0, 0], turned)))


def test_delta_scale_divides_delta(tiny_model):
    seen = {}
    for factor in (1.0, 2.0):
        seen[factor] = observed(tiny_model(mamba={"delta_scale_factor": factor}), images(), 0)["delta"]
    torch.testing.assert_close(seen[2.0], seen[1.0] / 2)


def test_group_norm_can_be_left_out(tiny_model):
    assert not torch.allclose(tiny_model(mamba={"group_norm_size": 0})(images()), tiny_model()(images()), atol=1e-3)


def test_optional_biases_appear_under_the_public_names(tiny_model):
    names = tiny_model(mamba={"use_bias": True, "use_conv_bias": False}).state_dict()
    assert "blocks.0.mixer.in_proj.bias" in names and "blocks.0.mixer.out_proj.bias" in names
    assert "blocks.0.mixer.conv1d.bias" not in names


def test_initial_values_are_mambas(tiny_model):
    torch.manual_seed(0)
    mixer = create_model("defocus_mamba_nano").blocks[0].mixer
    steps = F.softplus(mixer.dt_proj.bias)
    torch.testing.assert_close(steps[[0, -1]], torch.tensor([0.001, 0.1]), rtol=1e-4, atol=0)
    torch.testing.assert_close(steps[1:] / steps[:-1], (steps[1] / steps[0]).expand(383), rtol=1e-3, atol=0)
    torch.testing.assert_close(mixer.A_log.exp(), torch.arange(1.0, 17.0).expand(384, 16))
    torch.testing.assert_close(mixer.freq[[0, 15]], torch.tensor([(100 ** (-1 / 16) - 0.01) / 0.99, 0.0]))
    assert torch.equal(mixer.D, torch.ones(384))


def test_rescaled_residual_shrinks_the_output_layer_with_depth():
    def deviation(depth: int) -> float:
        torch.manual_seed(0)
        mamba = {"intermediate_size": 64, "time_step_rank": 4, "rescale_prenorm_residual": True}
        options = {"embed_dim": 32, "depth": depth, "mamba": mamba}
        return create_model("defocus_mamba", num_classes=0, **options).blocks[0].mixer.out_proj.weight.std().item()

    assert deviation(4) == pytest.approx(deviation(1) / 2, rel=0.1)


# Tokens


def test_tokens_see_only_those_before_them(tiny_model):
    model = tiny_model()
    batch = images(1)
    changed = batch.clone()
    changed[:, :, 8:12, 4:8] += 1.0  # the patch in row 2, column 1: token 9
    difference = (model.forward_features(changed) - model.forward_features(batch)).abs().amax((0, 2))
    assert difference[:9].max() < 1e-5 and difference[9] > 1e-2 and difference[-1] > 1e-5


def test_patches_follow_row_by_row():
    embed = PatchEmbed(patch_size=4, embed_dim=5)
    batch = images(1)
    tokens = embed(batch)
    patch = batch[:, :, 8:12, 4:8]
    by_hand = (embed.proj.weight * patch).sum((1, 2, 3)) + embed.proj.bias
    assert_near(tokens[0, 9], by_hand, terms=3 * 4 * 4)


def test_regions_follow_one_another_each_row_by_row():
    plain, regions = PatchEmbed(4, 5), PatchEmbed(4, 5, regions=2)
    regions.load_state_dict(plain.state_dict())
    order = [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    assert torch.equal(regions(images()), plain(images())[:, order])


def test_change_of_resolution_reads_the_patches_region_by_region(tiny_model):
    model = tiny_model(patch_embed_change_res=True)
    assert model.patch_embed.regions == 2
    assert not torch.allclose(model(images()), tiny_model()(images()), atol=1e-3)


def test_other_image_sizes_work_without_position_embedding(tiny_model):
    assert tiny_model().forward_features(images(size=24)).shape == (2, 37, 32)


def test_position_embedding_is_added_to_the_patches(tiny_model):
    model, plain = tiny_model(use_pos_embed=True), tiny_model()
    assert model.pos_embed.shape == (1, 16, 32)
    plain.load_state_dict(model.state_dict(), strict=False)
    assert not torch.allclose(model(images()), plain(images()), atol=1e-4)
    with torch.no_grad():
        model.pos_embed.zero_()
    assert torch.equal(model(images()), plain(images()))


def test_position_embedding_is_interpolated_at_loading(tiny_model, tmp_path):
    model, larger = tiny_model(use_pos_embed=True), tiny_model(use_pos_embed=True, img_size=32)
    with torch.no_grad():
        model.pos_embed.copy_(torch.linspace(-1, 1, 4).repeat_interleave(4)[None, :, None].expand(1, 16, 32))
    save_file(model.state_dict(), tmp_path / "small.safetensors")
    account = load_weights(larger, tmp_path / "small.safetensors")
    assert account.reshaped == ["pos_embed"] and account.missing == account.unexpected == []
    grid = larger.pos_embed.detach().view(8, 8, 32)
    assert torch.allclose(grid, grid[:, :1, :1].expand(8, 8, 32), atol=1e-6)  # still constant along a row
    assert (grid[1:, 0, 0] > grid[:-1, 0, 0]).all()  # and rising from row to row
    assert larger(images(size=32)).shape == (2, 32)


def test_drop_path_leaves_out_whole_images_and_keeps_the_mean():
    torch.manual_seed(0)
    x = torch.ones(4000, 3, 2)
    dropped = drop_path(x, 0.25, training=True)
    rows = dropped.flatten(1)
    assert ((rows == 0).all(1) | (rows - 4 / 3).abs().lt(1e-6).all(1)).all()
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.05)
    assert drop_path(x, 0.25, training=False) is x and drop_path(x, 0.0, training=True) is x


def test_drop_path_grows_linearly_with_depth_and_rests_in_evaluation(tiny_model):
    model = tiny_model(depth=3, drop_path_rate=0.4)
    assert [block.drop_path_rate for block in model.blocks] == pytest.approx([0.0, 0.2, 0.4])
    assert torch.equal(model(images()), model(images()))
    model.train()
    torch.manual_seed(0)
    assert len({model(images(1)).sum().item() for _ in range(12)}) > 1


# What a block shows


def test_observer_sees_input_step_sizes_and_gated_output(tiny_model):
    model = tiny_model()
    mixer, inputs = model.blocks[1].mixer, {}
    mixer.x_proj.register_forward_pre_hook(lambda _, args: inputs.__setitem__("x", args[0]))
    mixer.out_proj.register_forward_pre_hook(lambda _, args: inputs.__setitem__("out", args[0]))
    mixer.dt_proj.register_forward_hook(lambda _, __, output: inputs.__setitem__("delta", F.softplus(output)))
    seen = observed(model, images(3), 1)
    for name in ("x", "delta", "out"):
        assert seen[name].shape == (3, 17, 64)
        torch.testing.assert_close(seen[name], inputs[name])


def test_observer_sees_the_scan_and_what_follows_by_hand(tiny_model):
    mixer = tiny_model().blocks[0].mixer
    tokens = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    seen = observed(mixer, tokens, 0)
    x, z = mixer.in_proj(tokens).chunk(2, -1)
    padded = F.pad(x.mT, (3, 0))
    x = F.silu(F.conv1d(padded, mixer.conv1d.weight, mixer.conv1d.bias, groups=64)).mT
    dt, B, C = mixer.x_proj(x).split([4, 8, 8], -1)
    B, C = (mixer.rotate(M[:, :, None])[:, :, 0] for M in (B, C))
    delta = F.softplus(mixer.dt_proj(dt))
    h, ys = torch.zeros(2, 64, 8), []
    for t in range(5):
        step = delta[:, t, :, None]
        h = torch.exp(-step * mixer.A_log.exp()) * h + step * x[:, t, :, None] * B[:, t, None]
        ys.append((h * C[:, t, None]).sum(-1))
    groups = torch.stack(ys, 1).view(2, 5, 4, 16)
    y = (groups / (groups.square().mean(-1, keepdim=True) + 1e-6).sqrt()).view(2, 5, 64)
    torch.testing.assert_close(seen["out"], (y + mixer.D * x) * F.silu(z), rtol=1e-4, atol=1e-5)


def test_autocast_keeps_delta_the_decay_and_the_scan_in_float32(tiny_model, monkeypatch):
    model = tiny_model(num_classes=3)
    scanned = []

    def record(x, steps, A, *others, **options):
        result = original(x, steps, A, *others, **options)
        scanned.extend((steps.dtype, A.dtype, result[0].dtype))
        return result

    original = scan.scan_tokens
    monkeypatch.setattr(scan, "scan_tokens", record)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(images())
        seen = observed(model, images(), 0)
    assert logits.dtype == torch.bfloat16  # the linear layers around it do run in half precision
    assert len(scanned) == 12 and set(scanned) == {torch.float32}
    assert seen["delta"].dtype == torch.float32
    assert torch.allclose(logits.float(), model(images()), atol=0.2)
    logits.float().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


# Mistakes


@pytest.mark.parametrize(
    "options, message",
    [
        ({"embed_dims": 3}, "no option 'embed_dims'. Did you mean 'embed_dim'?"),
        ({"mamba": {"state_sise": 4}}, "there is no option 'mamba.state_sise'. Did you mean 'mamba.state_size'?"),
        ({"depth": "two"}, "depth takes a whole number, got 'two'"),
        ({"depth": 2.5}, "depth takes a whole number"),
        ({"depth": True}, "depth takes a whole number"),
        ({"use_rope": 1}, "use_rope takes true or false"),
        ({"mamba": {"rope_scale_factor": "4"}}, "mamba.rope_scale_factor takes a number"),
        ({"head_type": "linear_cls"}, "must contain IN1k"),
        ({"head_type": "IN1k"}, "one pooling, cls or avg"),
        ({"head_type": "IN1k_avg"}, "set use_aux_loss to false"),
        ({"mamba": {"hidden_act": "gelu"}}, "hidden_act 'silu'"),
        ({"mamba": {"use_out_norm": True}}, "use_out_norm false"),
        ({"mamba": {"group_norm_size": 100}}, "multiple of group_norm_size"),
        ({"mamba": 3}, "mamba"),
    ],
    ids=str,
)
def test_wrong_options_are_named_with_the_remedy(options, message):
    assert_refused("defocus_mamba", options, message)


def test_an_unknown_model_is_named_with_the_closest():
    with pytest.raises(UserError, match=r"no model 'defocus_mamba_nana'\. Did you mean 'defocus_mamba_nano'"):
        create_model("defocus_mamba_nana")


def test_whole_numbers_are_accepted_where_fractions_are(tiny_model):
    assert tiny_model(mamba={"rope_scale_factor": 4}).config.mamba.rope_scale_factor == 4


def test_images_that_do_not_divide_into_patches_are_refused(tiny_model):
    with pytest.raises(UserError, match="18 x 18 pixels do not divide into patches of 4"):
        tiny_model()(images(size=18))
    with pytest.raises(UserError, match="patches of 8"):
        tiny_model(patch_embed_change_res=True)(images(size=20))


def test_images_of_another_size_than_the_position_embedding_are_refused(tiny_model):
    with pytest.raises(UserError, match="build it with img_size=32"):
        tiny_model(use_pos_embed=True)(images(size=32))


# The packaged weights


@pytest.fixture(scope="module")
def parity():
    tensors = load_file(GOLDENS / "defocus_mamba_nano_tin32.parity.safetensors")
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    scaled = tensors["images_uint8"].float() / 255
    return {**tensors, "images": (scaled - mean[:, None, None]) / deviation[:, None, None]}


@torch.no_grad()
def features_and_logits(model, batch):
    features = model.forward_head(model.forward_features(batch), pre_logits=True)
    return features, model.head(features)


@pytest.mark.slow
def test_packaged_weights_predict_what_the_original_did(parity):
    model = create_model("defocus_mamba_nano", pretrained="tin32-39ep").eval()
    features, logits = features_and_logits(model, parity["images"])
    assert (logits.argmax(1) == parity["logits"].argmax(1)).float().mean() >= 0.99  # the closest two are 0.02 apart
    assert relative(features, parity["features"]) < 0.02  # the packaged weights are in half precision
    right = (logits.argmax(1) == parity["labels"]).float().mean().item()
    assert right == pytest.approx(0.406, abs=0.01)


@pytest.mark.slow
def test_the_default_weights_are_as_accurate_as_their_card_says(parity):
    """On a sample of the validation images, within four standard errors of the 47.24% on all of them."""
    model, labels = create_model("defocus_mamba_nano", pretrained=True).eval(), parity["labels"]
    right = (features_and_logits(model, parity["images"])[1].argmax(1) == labels).float().mean().item()
    assert abs(right - 0.4724) < 4 * (0.4724 * 0.5276 / len(labels)) ** 0.5 < 0.13


@pytest.mark.skipif(not ORIGINAL_WEIGHTS.exists(), reason="the original float32 weights are not on this machine")
def test_original_weights_give_the_recorded_logits(parity):
    model = create_model("defocus_mamba_nano", pretrained=ORIGINAL_WEIGHTS).eval()
    features, logits = features_and_logits(model, parity["images"])
    torch.testing.assert_close(features, parity["features"], rtol=0, atol=1e-4)
    torch.testing.assert_close(logits, parity["logits"], rtol=0, atol=1e-4)
    assert torch.equal(logits.argmax(1), parity["logits"].argmax(1))
