"""Vim against the recorded public one, the public checkpoints' manifests, and its own documentation."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from backbones_help import assert_refused, gradients_like_recorded, on_meta, outputs_and_recorded, relative, under
from tolerance import assert_near, rounding
from vim_help import tiny

from mambacl.backbones import create_model, list_models, vim
from mambacl.errors import UserError

GOLDENS = Path(__file__).parents[1] / "goldens"
MANIFESTS = ("vim_tiny", "vim_tiny_stride8", "vim_small", "vim_small_stride8", "vim_base")
SIZES = ("vim", "vim_nano", *MANIFESTS)


def images(count=2, height=16, width=None, seed=0):
    return torch.randn(count, 3, height, width or height, generator=torch.Generator().manual_seed(seed))


# The recorded public model


@pytest.fixture
def golden(golden_model):
    """The recorded model with its weights, and all recorded tensors."""
    model, tensors, _ = golden_model("vim_tiny_like")
    return model, tensors


def test_logits_and_gradients_are_the_recorded_ones_in_float64(golden):
    gradients_like_recorded(*golden, count=55)


def test_logits_and_block_outputs_are_those_recorded_in_float32(golden):
    outputs, recorded = outputs_and_recorded(*golden)
    assert relative(outputs["patch_embed"], recorded["patch_embed"]) < 2e-5
    for i in range(3):  # the public layer gives its mixer's output, and the residual before it
        hidden, residual = recorded[f"layers.{i}/0"], recorded[f"layers.{i}/1"]
        assert relative(outputs[f"layers.{i}.mixer"], hidden) < 2e-5
        assert relative(outputs[f"layers.{i}"], hidden + residual) < 2e-5


def test_features_of_each_scan_are_the_recorded_ones(golden):
    model, tensors = golden
    calls, outs = [], []

    def watch_direction(mixer, suffix):
        x_proj, dt_proj = getattr(mixer, "x_proj" + suffix), getattr(mixer, "dt_proj" + suffix)
        x_proj.register_forward_hook(lambda _, args, output: calls.append({"u": args[0], "BC": output[..., -32:]}))
        dt_proj.register_forward_hook(lambda _, __, output: calls[-1].__setitem__("delta", F.softplus(output)))

    for layer in model.layers:
        watch_direction(layer.mixer, "")
        watch_direction(layer.mixer, "_b")
        layer.mixer.out_proj.register_forward_pre_hook(lambda _, args: outs.append(args[0]))
    with torch.no_grad():
        model.double()(tensors["input"].double())

    assert len(calls) == 6 and len(outs) == 3  # forward and backward by turns, the latter in flipped order
    recorded = under(tensors, "scan_f32/")
    for i, call in enumerate(calls):
        B, C = call.pop("BC").chunk(2, -1)
        for name, found in {**call, "B": B, "C": C}.items():
            assert found.shape[1] == 17  # tokens before channels
            assert relative(found.mT, recorded[f"{i}/{name}"]) < 2e-5, (i, name)
    for i, out in enumerate(outs):
        wanted = (recorded[f"{2 * i}/out"] + recorded[f"{2 * i + 1}/out"].flip(-1)) / 2
        assert relative(out.mT, wanted) < 2e-5


# The public checkpoints' names and shapes


@pytest.mark.parametrize("name", MANIFESTS)
def test_names_and_shapes_are_the_manifests(name):
    recorded = json.loads((GOLDENS / "manifests" / f"{name}.json").read_text())
    model = on_meta(name)
    shapes = {key: list(tensor.shape) for key, tensor in model.state_dict().items()}
    assert shapes == {key: entry["shape"] for key, entry in recorded["state_dict"].items()}
    assert sum(parameter.numel() for parameter in model.parameters()) == recorded["num_params"]
    assert model.config.img_size == recorded["img_size"]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("vim_nano", 265_032),
        ("vim_tiny", 7_148_008),
        ("vim_tiny_stride8", 7_250_344),
        ("vim_small", 25_796_584),
        ("vim_small_stride8", 26_001_256),
        ("vim_base", 97_598_440),
    ],
)
def test_parameters_are_counted_as_published(name, count):
    assert sum(parameter.numel() for parameter in on_meta(name).parameters()) == count


def test_every_size_is_listed_with_the_licence_of_its_weights():
    assert set(SIZES) <= set(list_models())
    for name in MANIFESTS:
        weights = vim.MODELS.get(name).weights["in1k"]
        assert weights.licence == "Apache-2.0" and weights.top1 > 75 and weights.url.endswith(".pth")


def test_initial_values_are_the_public_ones():
    torch.manual_seed(0)
    model = create_model("vim_nano")
    mixer = model.layers[0].mixer
    steps = F.softplus(mixer.dt_proj.bias)
    assert 0.00099 < steps.min() < 0.002 and 0.05 < steps.max() < 0.101
    assert mixer.dt_proj.weight.abs().max() <= 0.5  # rank 4
    assert torch.equal(mixer.dt_proj_b.bias, torch.zeros(128))
    for A_log, D in ((mixer.A_log, mixer.D), (mixer.A_b_log, mixer.D_b)):
        torch.testing.assert_close(A_log.exp(), torch.arange(1.0, 17.0).expand(128, 16))
        assert torch.equal(D, torch.ones(128))
    assert mixer.A_log.data_ptr() != mixer.A_b_log.data_ptr()
    bound = 128**-0.5 / 6**0.5  # a residual branch each of the six layers
    assert 0.9 * bound < mixer.out_proj.weight.abs().max() <= bound
    assert model.head.weight.std().item() == pytest.approx(0.02, rel=0.1) and not model.head.bias.any()
    assert model.pos_embed.std().item() == pytest.approx(0.02, rel=0.1)


# Tokens


@pytest.mark.parametrize(("side", "middle"), [(4, 0), (8, 2), (12, 4), (16, 8)])
def test_the_class_token_is_in_the_middle_and_is_what_is_pooled(side, middle):
    model = tiny(img_size=side, num_classes=3)
    with torch.no_grad():
        model.cls_token.fill_(100.0)
    seen = []
    model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    tokens = model.forward_features(images(height=side))
    assert tokens.shape == (2, (side // 4) ** 2 + 1, 32)
    assert (seen[0].mean(-1)[0] > 90).nonzero().flatten().tolist() == [middle]
    torch.testing.assert_close(seen[0][0, middle], 100 + model.pos_embed[0, middle])  # a row a token, in their order
    assert torch.equal(model.forward_head(tokens, pre_logits=True), tokens[:, middle])
    assert torch.equal(model(images(height=side)), model.head(tokens[:, middle]))


def test_tokens_see_those_on_both_sides():
    model = tiny(depth=1)
    changed = images(1).clone()
    changed[:, :, 8:12, 4:8] += 1.0  # the patch in row 2, column 1: token 10, since the class token is token 8
    difference = (model.forward_features(changed) - model.forward_features(images(1))).abs().amax((0, 2))
    assert difference.argmax() == 10 and (difference > 1e-6).all()


def test_overlapping_patches_follow_row_by_row():
    embed = tiny(patch_size=8, stride=4).patch_embed
    patch = images(1)[:, :, 8:16, 4:12]
    by_hand = (embed.proj.weight * patch).sum((1, 2, 3)) + embed.proj.bias
    tokens = embed(images(1))
    assert tokens.shape == (1, 9, 32)
    assert_near(tokens[0, 7], by_hand, terms=3 * 8 * 8)


def test_the_mixer_by_hand():
    mixer = tiny().layers[0].mixer
    seen = []
    mixer.out_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    tokens = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    mixer(tokens)

    def direction(xz, conv, x_proj, dt_proj, A_log, D):
        x, z = xz.chunk(2, -1)
        x = F.silu(F.conv1d(F.pad(x.mT, (3, 0)), conv.weight, conv.bias, groups=64)).mT
        dt, B, C = x_proj(x).split([2, 8, 8], -1)
        delta = F.softplus(dt_proj(dt))
        h, ys = torch.zeros(2, 64, 8), []
        for t in range(5):
            step = delta[:, t, :, None]
            h = torch.exp(-step * A_log.exp()) * h + step * x[:, t, :, None] * B[:, t, None]
            ys.append((h * C[:, t, None]).sum(-1))
        return (torch.stack(ys, 1) + D * x) * F.silu(z)

    m, xz = mixer, mixer.in_proj(tokens)
    ahead = direction(xz, m.conv1d, m.x_proj, m.dt_proj, m.A_log, m.D)
    back = direction(xz.flip(1), m.conv1d_b, m.x_proj_b, m.dt_proj_b, m.A_b_log, m.D_b)
    torch.testing.assert_close(seen[0], (ahead + back.flip(1)) / 2, rtol=1e-4, atol=1e-5)


# Image sizes


@pytest.mark.parametrize(("height", "width"), [(16, 24), (28, 12), (12, 12), (4, 4), (32, 32)])
def test_rectangles_and_other_sizes_work(height, width):
    model = tiny(num_classes=3)
    tokens = model.forward_features(images(2, height, width))
    assert tokens.shape == (2, height * width // 16 + 1, 32) and tokens.isfinite().all()
    assert model(images(2, height, width)).shape == (2, 3)


def gradient_rows(model):
    """Positions that rise from row to row of patches; the class row is a 7."""
    side = model.grid_size[0]
    patches = torch.linspace(-1, 1, side).repeat_interleave(side)[None, :, None].expand(1, -1, 32)
    with torch.no_grad():
        model.pos_embed.copy_(vim.with_middle(patches, torch.full((1, 1, 32), 7.0)))
    return model


def test_positions_are_interpolated_around_the_class_row():
    positions = gradient_rows(tiny()).pos_embed.detach()
    assert vim.resized_positions(positions, (4, 4), (4, 4)) is positions
    for rows, columns in ((8, 8), (3, 5), (2, 8)):
        resized = vim.resized_positions(positions, (4, 4), (rows, columns))
        half = rows * columns // 2
        assert torch.equal(resized[0, half], torch.full((32,), 7.0))
        grid = torch.cat((resized[:, :half], resized[:, half + 1 :]), 1).view(rows, columns, 32)
        assert grid.max() < 2
        torch.testing.assert_close(grid, grid[:, :1, :1].expand_as(grid))  # still constant along a row
        assert (grid[1:, 0, 0] > grid[:-1, 0, 0]).all()  # and rising from row to row
    assert vim.resized_positions(positions.bfloat16(), (4, 4), (2, 2)).dtype == torch.bfloat16


def test_positions_learn_from_images_of_another_size():
    model = tiny(num_classes=3)
    model(images(height=24)).square().sum().backward()
    assert model.pos_embed.grad.shape == (1, 17, 32) and (model.pos_embed.grad.abs().amax((0, 2)) > 0).all()


def test_a_file_of_another_size_is_adapted():
    model, larger = gradient_rows(tiny(num_classes=3)), tiny(num_classes=3, img_size=32)
    state = model.state_dict()
    adapted = larger.adapt_state(state)
    assert state["pos_embed"].shape == (1, 17, 32)  # the caller's own is left alone
    larger.load_state_dict(adapted)
    with torch.no_grad():
        torch.testing.assert_close(larger(images(height=32)), model(images(height=32)))  # as interpolated in forward
    assert model.adapt_state(state) is state
    assert tiny(img_size=16, patch_size=8, stride=4).adapt_state(state)["pos_embed"].shape == (1, 10, 32)
    crooked = {"pos_embed": torch.zeros(1, 16, 32)}
    assert model.adapt_state(crooked) is crooked  # the loader then names it


# Training


def test_drop_path_grows_linearly_with_depth_and_rests_in_evaluation():
    model = tiny(depth=3, drop_path_rate=0.4)
    assert [layer.drop_path_rate for layer in model.layers] == pytest.approx([0.0, 0.2, 0.4])
    assert torch.equal(model(images()), model(images()))
    model.train()
    torch.manual_seed(0)
    assert len({model(images(1)).sum().item() for _ in range(12)}) > 1


def test_checkpointing_gives_the_same_gradients_from_less_memory():
    model = tiny(num_classes=3, drop_path_rate=0.3).train()
    gradients, kept = [], []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        torch.manual_seed(3)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t.numel()) or t, lambda t: t):
            loss = model(images()).square().sum()
        loss.backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        kept.append(sum(saved))
    assert kept[1] < kept[0] / 4
    for name, gradient in gradients[0].items():
        assert torch.equal(gradients[1][name], gradient), name


def test_autocast_keeps_delta_the_decay_and_the_scan_in_float32(monkeypatch):
    model = tiny(num_classes=3)
    scanned = []

    def record(x, steps, A, *others, **options):
        result = original(x, steps, A, *others, **options)
        scanned.extend((steps.dtype, A.dtype, result[0].dtype))
        return result

    original = vim.ops.scan_tokens
    monkeypatch.setattr(vim.ops, "scan_tokens", record)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(images())
    assert logits.dtype == torch.bfloat16  # the linear layers around it do run in half precision
    assert len(scanned) == 6 and set(scanned) == {torch.float32}
    assert relative(logits.float(), model(images())) < rounding(32, torch.bfloat16)
    logits.float().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("height", [16, 24])
def test_compiles_as_one_graph(height):
    model = tiny(num_classes=3, depth=1)
    expected = model(images(height=height))
    expected.square().sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    torch._dynamo.reset()
    logits = torch.compile(model, backend="aot_eager", fullgraph=True)(images(height=height))
    logits.square().sum().backward()
    torch.testing.assert_close(logits, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-4)


# Mistakes


@pytest.mark.parametrize(
    "options, message",
    [
        ({"embed_dims": 3}, "no option 'embed_dims'. Did you mean 'embed_dim'?"),
        ({"depth": "two"}, "depth takes a whole number, got 'two'"),
        ({"depth": 0}, "depth must be positive, got 0"),
        ({"num_classes": -1}, "num_classes must not be negative, got -1"),
        ({"drop_path_rate": 1.0}, "drop_path_rate must be in [0, 1), got 1.0"),
        ({"img_size": 230}, "230 x 230 pixels do not divide into patches of 16 with stride 16"),
        ({"img_size": 8}, "do not divide into patches"),
        ({"if_rope": True}, "Vim supports only if_rope False, as in every public model, got True"),
        ({"bimamba_type": "v1"}, "Vim supports only bimamba_type 'v2', as in every public model, got 'v1'"),
        ({"use_middle_cls_token": False}, "use_middle_cls_token True"),
    ],
    ids=str,
)
def test_wrong_options_are_named_with_the_remedy(options, message):
    assert_refused("vim", options, message)


def test_wrong_images_are_refused():
    with pytest.raises(UserError, match="16 x 18 pixels do not divide into patches of 4 with stride 4; resize them"):
        tiny()(images(2, 16, 18))
    with pytest.raises(UserError, match="2 x 2 pixels do not divide"):
        tiny()(images(2, 2))
    with pytest.raises(UserError, match=r"needs images \(b, 3, height, width\), got .* \(2, 1, 16, 16\)"):
        tiny()(torch.zeros(2, 1, 16, 16))
    with pytest.raises(UserError, match="needs images"):
        tiny()(torch.zeros(3, 16, 16))
