"""VMamba against the recorded public one, the public checkpoints' manifests, and a plain SS2D written out by hand."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from backbones_help import assert_refused, gradients_like_recorded, on_meta, outputs_and_recorded, relative
from safetensors.torch import save_file

from mambacl.backbones import create_model, load_weights, vmamba
from mambacl.errors import UserError

GOLDENS = Path(__file__).parents[1] / "goldens"
PARAMETERS = {  # as published
    "vmamba_tiny_s2l5": 30_705_832,
    "vmamba_small_s2l15": 50_147_752,
    "vmamba_base_s2l15": 88_557_800,
    "vmamba_tiny_s1l8": 30_249_064,
    "vmamba_small_s1l20": 49_012_840,
    "vmamba_base_s1l20": 86_614_504,
    "vanilla_vmamba_tiny": 22_893_448,
    "vanilla_vmamba_small": 44_417_416,
    "vanilla_vmamba_base": 76_254_056,
}
NANOS = ["vmamba_nano", "vanilla_vmamba_nano"]
TINY = {"depths": [1, 1], "dims": 16, "num_classes": 5, "imgsize": 16}


def images(count=2, height=32, width=32, seed=0):
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(seed))


def lively(name="vmamba_nano", **options):
    """A model in evaluation mode whose blocks do something: weights well above those that training starts from."""
    torch.manual_seed(0)
    model = create_model(name, **options)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.normal_(std=module.in_features**-0.5)
    return model.eval()


def manifest(name):
    return json.loads((GOLDENS / "manifests" / f"{name}.json").read_text())


# The recorded public model


@pytest.fixture
def golden(golden_model):
    """The recorded model with its weights, and all recorded tensors."""
    model, tensors, _ = golden_model("vmamba_s2_like")
    return model, tensors


def test_logits_and_gradients_are_the_recorded_ones_in_float64(golden):
    model, tensors = golden
    gradients = gradients_like_recorded(model, tensors, count=80)
    norms = json.loads((GOLDENS / "vmamba_s2_like.json").read_text())["grad_norms_f64"]
    assert gradients.keys() == norms.keys()  # of those whose values were not recorded, the norm was
    assert [name for name in norms if gradients[name].norm().item() != pytest.approx(norms[name], rel=1e-9)] == []


def test_logits_and_block_outputs_are_those_recorded_in_float32(golden):
    model, tensors = golden
    outputs, expected = outputs_and_recorded(model, tensors)
    with torch.no_grad():
        pooled = model.forward_head(model.forward_features(tensors["input"].double()), pre_logits=True)
    assert relative(pooled, expected.pop("classifier.flatten")) < 2e-5
    assert {"patch_embed", "layers.0", "layers.2.blocks.1", "layers.3"} <= expected.keys() and len(expected) == 11
    assert [name for name in expected if relative(outputs[name].permute(0, 3, 1, 2), expected[name]) > 2e-5] == []


def test_every_scan_is_the_recorded_one(golden, monkeypatch):
    model, tensors = golden
    calls = []

    def record(u, steps, A, B, C, **options):
        result = original(u, steps, A, B, C, **options)
        calls.append({"u": u, "delta": F.softplus(steps), "B": B, "C": C, "out": result[0]})
        return result

    original = vmamba.ops.scan_tokens
    monkeypatch.setattr(vmamba.ops, "scan_tokens", record)
    with torch.no_grad():
        model.double()(tensors["input"].double())
    mixers = [module for module in model.modules() if isinstance(module, vmamba.SS2D)]
    assert len(calls) == len(mixers) == 6
    for i, (call, mixer) in enumerate(zip(calls, mixers, strict=True)):
        call["out"] = call["out"] + mixer.Ds * call["u"]  # recorded with D
        for name in ("u", "delta", "out"):
            assert relative(call[name].mT, tensors[f"scan_f32/{i}/{name}"]) < 2e-5
        for name in ("B", "C"):
            assert relative(call[name].permute(0, 2, 3, 1), tensors[f"scan_f32/{i}/{name}"]) < 2e-5


# The public checkpoints' names and shapes


@pytest.mark.parametrize("name", PARAMETERS)
def test_names_shapes_and_configuration_are_the_manifests(name):
    record = manifest(name)
    model = on_meta(name)
    shapes = {key: list(tensor.shape) for key, tensor in model.state_dict().items()}
    assert shapes == {key: entry["shape"] for key, entry in record["state_dict"].items()}
    assert sum(parameter.numel() for parameter in model.parameters()) == record["num_params"] == PARAMETERS[name]
    for key, value in record["config"].items():
        if key != "drop_path_rate":  # a matter of the training recipe: off unless asked for
            assert getattr(model.config, key) == (tuple(value) if key == "depths" else value), key
    assert vmamba.MODELS.get(name).weights["in1k"].url.endswith("/" + record["checkpoint"])


@pytest.mark.parametrize("name", PARAMETERS)
def test_names_and_shapes_of_the_one_file_variant_are_adapted(name):
    entries = manifest(f"{name}__rootfile")["state_dict"]
    model = on_meta(name)
    file = {key: torch.empty(entry["shape"], device="meta") for key, entry in entries.items()}
    adapted = model.adapt_state(file)
    assert adapted.keys() == model.state_dict().keys() != file.keys()
    assert [key for key, tensor in model.state_dict().items() if adapted[key].shape != tensor.shape] == []


def to_one_file(state):
    """The names and shapes of the one-file variant, linear layers as 1 x 1 convolutions."""
    file = {}
    for name, tensor in state.items():
        if name.endswith(("x_proj_weight", "dt_projs_weight")):
            name, tensor = name.replace("_weight", ".weight"), tensor.flatten(0, 1)
        name = name.replace("downsample.norm", "downsample.1").replace("downsample.reduction", "downsample.2")
        if name.endswith((".in_proj.weight", ".out_proj.weight", ".fc1.weight", ".fc2.weight", "x_proj.weight")):
            tensor = tensor[:, :, None, None]
        file[name] = tensor
    return file


def to_older_names(state):
    file = {}
    for name, tensor in state.items():
        name = name.removeprefix("classifier.")
        if name.startswith("patch_embed."):
            name = name.replace(".0.", ".proj.").replace(".2.", ".norm.")
        elif ".blocks." in name:
            name = name.replace(".op.", ".self_attention.")
            parts = name.split(".")
            name = ".".join(["ln_1" if i == 4 and part == "norm" else part for i, part in enumerate(parts)])
        file[name] = tensor
    return file


@pytest.mark.parametrize("name, rename", [(NANOS[0], to_one_file), (NANOS[1], to_one_file), (NANOS[1], to_older_names)])
def test_files_with_other_names_give_the_same_model(name, rename):
    model, other = lively(name), create_model(name).eval()
    file = rename(model.state_dict())
    assert file.keys() != model.state_dict().keys()
    other.load_state_dict(other.adapt_state(file))
    assert torch.equal(other(images()), model(images()))


def test_files_with_the_models_own_names_are_left_alone():
    model = lively()
    state = {**model.state_dict(), "foreign": torch.ones(2)}
    adapted = model.adapt_state(state)
    assert adapted.keys() == state.keys() and all(adapted[name] is tensor for name, tensor in state.items())


def test_the_account_of_a_file_with_other_names_says_so(tmp_path):
    model, other = lively(), create_model("vmamba_nano").eval()
    file = to_one_file(model.state_dict())
    save_file(file, tmp_path / "weights.safetensors")
    account = load_weights(other, tmp_path / "weights.safetensors")
    assert account.missing == account.unexpected == account.dropped == []
    assert set(account.renamed) == model.state_dict().keys() - file.keys() != set()
    changed = ("x_proj_weight", "dt_projs_weight", "in_proj.weight", "out_proj.weight", "fc1.weight", "fc2.weight")
    assert set(account.reshaped) == {name for name in model.state_dict() if name.endswith(changed)}
    assert f"{len(account.renamed)} renamed; {len(account.reshaped)} reshaped" in str(account)
    assert torch.equal(other(images()), model(images()))


# The contract of every size


def test_nano_sizes_are_small():
    counts = [sum(parameter.numel() for parameter in on_meta(name).parameters()) for name in NANOS]
    assert counts == [477_224, 371_304]
    assert [on_meta(name).num_classes for name in NANOS] == [200, 200]


# SS2D


def by_hand(mixer, image):
    """SS2D in plain sight: every direction a list of pixels, one state after the other."""
    batch, height, width, _ = image.shape
    x = F.linear(image, mixer.in_proj.weight)
    x, z = x.chunk(2, -1) if mixer.gated else (x, None)
    bias, padding, channels = mixer.conv2d.bias, mixer.conv2d.kernel_size[0] // 2, x.shape[-1]
    x = F.conv2d(x.permute(0, 3, 1, 2), mixer.conv2d.weight, bias, padding=padding, groups=channels)
    x = F.silu(x.permute(0, 2, 3, 1))
    rows = [(i, j) for i in range(height) for j in range(width)]
    columns = [(i, j) for j in range(width) for i in range(height)]
    A, D = -mixer.A_logs.exp().view(4, channels, -1), mixer.Ds.view(4, channels)
    y = torch.zeros_like(x)
    for k, order in enumerate((rows, columns, rows[::-1], columns[::-1])):
        h = x.new_zeros(batch, channels, mixer.states)
        for i, j in order:
            u = x[:, i, j]
            dt, B, C = (u @ mixer.x_proj_weight[k].T).split([mixer.rank, mixer.states, mixer.states], -1)
            delta = F.softplus(dt @ mixer.dt_projs_weight[k].T + mixer.dt_projs_bias[k])
            h = torch.exp(delta[..., None] * A[k]) * h + (delta * u)[..., None] * B[:, None]
            y[:, i, j] += (h * C[:, None]).sum(-1) + D[k] * u
    y = F.layer_norm(y, (channels,), mixer.out_norm.weight, mixer.out_norm.bias, eps=1e-5)
    return F.linear(y if z is None else y * F.silu(z), mixer.out_proj.weight)


@pytest.mark.parametrize("name", NANOS)
@pytest.mark.parametrize("height, width", [(3, 5), (4, 2), (1, 1)])
def test_ss2d_is_the_one_written_out_by_hand(name, height, width):
    mixer = lively(name).layers[1].blocks[0].op.double()
    with torch.no_grad():
        for parameter in (mixer.Ds, mixer.A_logs, mixer.out_norm.weight, mixer.out_norm.bias):
            parameter += torch.randn_like(parameter) * 0.3
        image = torch.randn(2, height, width, 64, dtype=torch.float64)
        torch.testing.assert_close(mixer(image), by_hand(mixer, image), rtol=1e-9, atol=1e-11)


def test_directions_run_by_rows_by_columns_and_both_backwards():
    pixels = torch.arange(6.0).view(1, 2, 3, 1, 1).expand(1, 2, 3, 4, 1)
    orders = vmamba.cross_scan(pixels)[0, :, :, 0].T.tolist()
    rows, columns = [0, 1, 2, 3, 4, 5], [0, 3, 1, 4, 2, 5]
    assert orders == [rows, columns, rows[::-1], columns[::-1]]
    maps = torch.randn(2, 3, 5, 4, 7)
    torch.testing.assert_close(vmamba.cross_merge(vmamba.cross_scan(maps), 3, 5), maps.sum(3))


@pytest.mark.parametrize("name", NANOS)
def test_hooks_on_act_and_out_proj_see_the_input_and_the_output_of_the_ssm(name):
    model = lively(name)
    mixer, seen = model.layers[0].blocks[0].op, {}
    mixer.act.register_forward_hook(lambda _, __, output: seen.__setitem__("x", output))
    mixer.out_proj.register_forward_hook(lambda _, args, output: seen.update(out=args[0], after=output))
    mixer.register_forward_hook(lambda _, __, output: seen.__setitem__("result", output))
    model(images(height=24))
    assert mixer.channels_last
    assert seen["x"].shape == seen["out"].shape == (2, 6, 8, 64)
    assert torch.equal(seen["after"], seen["result"])
    u, steps, B, C = mixer.scan_inputs(seen["x"])
    assert u.shape == steps.shape == (2, 48, 256) and B.shape == C.shape == (2, 48, 4, mixer.states)
    assert torch.equal(u[:, :, :64], seen["x"].flatten(1, 2))


def test_parameters_start_as_published():
    present, first = (create_model(name).layers[1].blocks[0].op for name in NANOS)
    assert torch.equal(present.A_logs, torch.zeros(512, 1))
    torch.testing.assert_close(first.A_logs.exp(), torch.arange(1.0, 17.0).expand(512, 16))
    assert torch.equal(present.Ds, torch.ones(512))
    steps = F.softplus(present.dt_projs_bias).log10()
    assert -3.001 < steps.min() < -2.9 and -1.1 < steps.max() < -0.999 and -2.1 < steps.mean() < -1.9
    assert present.dt_projs_weight.abs().max() <= 4**-0.5  # of rank 4
    assert present.dt_projs_weight.std().item() == pytest.approx((4 * 3) ** -0.5, rel=0.05)
    assert present.in_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)


# Images


@pytest.mark.parametrize("name, height, width, grid", [(NANOS[0], 33, 50, (3, 4)), (NANOS[1], 30, 45, (2, 3))])
def test_odd_and_rectangular_images(name, height, width, grid):
    model = lively(name)
    batch = images(2, height, width).requires_grad_()
    features = model.forward_features(batch)
    assert features.shape == (2, *grid, 128)
    features.square().sum().backward()
    assert batch.grad.isfinite().all()


def test_the_smallest_images():
    assert lively(NANOS[0])(images(2, 1, 1)).shape == lively(NANOS[1])(images(2, 4, 4)).shape == (2, 200)


def test_patch_merging_is_the_published_one_by_hand():
    merging = vmamba.PatchMerging(2, 3)
    x = torch.randn(1, 3, 4, 2)
    padded = torch.cat((x, torch.zeros(1, 1, 4, 2)), 1)
    squares = torch.cat([padded[:, i::2, j::2] for i, j in ((0, 0), (1, 0), (0, 1), (1, 1))], -1)
    torch.testing.assert_close(merging(x), F.linear(F.layer_norm(squares, (8,)), merging.reduction.weight))


# Training


def test_drop_path_grows_linearly_with_depth_and_rests_in_evaluation():
    model = lively(drop_path_rate=0.3)
    rates = [block.drop_path_rate for stage in model.layers for block in stage.blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert torch.equal(model(images()), model(images()))
    model.train()
    assert len({model(images(1)).sum().item() for _ in range(12)}) > 1


@pytest.mark.parametrize("name", NANOS)
def test_checkpointing_computes_the_blocks_twice_and_the_same_gradients(name):
    model = lively(name, drop_path_rate=0.2).train()
    calls = []
    model.layers[1].blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))

    def gradients():
        calls.clear()
        model.zero_grad()
        torch.manual_seed(0)
        model(images()).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients()
    assert len(calls) == 1
    model.set_grad_checkpointing()
    again = gradients()
    assert len(calls) == 2
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    model.set_grad_checkpointing(False)
    gradients()
    assert len(calls) == 1


def test_use_checkpoint_switches_checkpointing_on():
    assert all(stage.grad_checkpointing for stage in on_meta("vmamba_nano", use_checkpoint=True).layers)


@pytest.mark.long
@pytest.mark.parametrize("name", ["vmamba", "vanilla_vmamba_nano"])
def test_compiles_as_one_graph(name):
    model = lively(name, **TINY)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    batch = images(2, 16, 12)
    logits = compiled(batch)
    torch.testing.assert_close(logits, model(batch))
    logits.sum().backward()
    assert model.layers[0].blocks[0].op.x_proj_weight.grad.abs().sum() > 0


@pytest.mark.parametrize("name", NANOS)
def test_autocast_keeps_delta_the_decay_and_the_scan_in_float32(name, monkeypatch):
    model = lively(name)
    scanned = []

    def record(x, steps, A, *others, **options):
        result = original(x, steps, A, *others, **options)
        scanned.extend((steps.dtype, A.dtype, result[0].dtype))
        return result

    original = vmamba.ops.scan_tokens
    monkeypatch.setattr(vmamba.ops, "scan_tokens", record)
    plain = model(images())
    scanned.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(images())
    assert logits.dtype == torch.bfloat16
    assert len(scanned) == 12 and set(scanned) == {torch.float32}
    assert relative(logits.float(), plain) < 0.1
    logits.float().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize("name", NANOS)
def test_a_model_in_bfloat16_runs(name):
    model = lively(name)
    expected = model(images())
    assert relative(model.bfloat16()(images().bfloat16()).float(), expected) < 0.2


# Mistakes


@pytest.mark.parametrize(
    "options, message",
    [
        ({"depth": 3}, "no option 'depth'. Did you mean 'depths'?"),
        ({"depths": 3}, "depths takes a list of whole numbers, got 3"),
        ({"depths": [2, 0, 2, 2]}, "got [2, 0, 2, 2] and 96"),
        ({"dims": [16, 32]}, "dims must be the first stage's width or list all widths"),
        ({"dims": 0}, "and 0."),
        ({"dims": "wide"}, "got 'wide'."),
        ({"num_classes": -1}, "num_classes and mlp_ratio must not be negative"),
        ({"drop_path_rate": 1.0}, "drop_path_rate must be at least 0 and below 1"),
        ({"forward_type": "v3"}, "supports only forward_type 'v05_noz' or 'v0', got 'v3'"),
        ({"patchembed_version": "v3"}, "supports only patchembed_version 'v2' or 'v1'"),
        ({"posembed": True}, "supports only posembed False, got True"),
        ({"ssm_dt_rank": "full"}, "positive number or 'auto', got 'full'"),
        ({"ssm_dt_rank": 0}, "ssm_dt_rank must be a positive number"),
        ({"ssm_conv": 4}, "odd kernel size"),
        ({"ssm_ratio": 0.0}, "ssm_ratio leaves no channel"),
        ({"ssm_d_state": 0}, "ssm_d_state must be positive, got 0"),
        ({"patch_size": 2}, "'v2' needs patch_size 4"),
    ],
    ids=str,
)
def test_wrong_options_are_named_with_the_remedy(options, message):
    assert_refused("vmamba", options, message)


@pytest.mark.parametrize("shape", [(3, 32, 32), (2, 1, 32, 32), (2, 3, 3, 32)], ids=str)
def test_images_of_a_wrong_shape_are_refused(shape):
    with pytest.raises(UserError, match="needs images \\(batch, 3, height, width\\) of at least 4 x 4 pixels"):
        create_model("vanilla_vmamba_nano")(torch.zeros(shape))


def test_other_options_of_a_whole_configuration():
    options = {**TINY, "ssm_dt_rank": 3, "ssm_conv": 5, "ssm_conv_bias": True, "ssm_d_state": 2, "mlp_ratio": 0.0}
    model = lively("vmamba", **options, patchembed_version="v1", patch_size=2)
    assert model.layers[0].blocks[0].op.x_proj_weight.shape == (4, 7, 32)
    assert model.forward_features(images(2, 16, 16)).shape == (2, 4, 4, 32)
    assert not [name for name, _ in model.named_parameters() if "mlp" in name or "norm2" in name]
