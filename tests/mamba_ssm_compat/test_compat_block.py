"""mamba-ssm's `Mamba` module: recorded outputs and gradients, the state for generation, Vim's second direction."""

import json

import pytest
import torch
from compat_help import DEVICES, assert_close, normal, plain_conv, plain_scan
from safetensors.torch import load_file

from mambacl.errors import UserError
from mambacl.mamba_ssm_compat import Mamba
from mambacl.mamba_ssm_compat.hub import InferenceParams
from mambacl.nullspace import NullSpace


@pytest.fixture
def recorded(goldens):
    """The recorded block, in float64, and its tensors."""
    tensors = load_file(goldens / "mamba1_block.safetensors")
    config = json.loads((goldens / "mamba1_block.json").read_text())["config"]
    block = Mamba(**{name: config[name] for name in ("d_model", "d_state", "d_conv", "expand", "dt_rank")}, layer_idx=0)
    weights = {name.removeprefix("state_dict/"): t for name, t in tensors.items() if name.startswith("state_dict/")}
    block.load_state_dict(weights)
    assert list(weights) == sorted(block.state_dict())
    return block.double(), tensors


@pytest.mark.parametrize(("dtype", "tag"), [(torch.float64, "f64"), (torch.float32, "f32")])
@pytest.mark.parametrize("device", DEVICES)
def test_the_recorded_block(recorded, device, dtype, tag):
    block, tensors = recorded
    block = block.to(device, dtype)
    tokens = tensors["input"].to(device, dtype).requires_grad_()
    out = block(tokens)
    out.square().sum().backward()
    # Sums over 11 tokens of 24 to 96 channels; the recording's own float32 values are 2.6e-7 of the largest off.
    terms = 8 * (11 * 4 + 16 + 24 + 48 + 96)
    assert_close(out.detach(), tensors[f"logits_{tag}"], terms)
    assert_close(tokens.grad, tensors[f"grad_input_{tag}"], terms, "input")
    for name, parameter in block.named_parameters():
        assert_close(parameter.grad, tensors[f"grad_{tag}/{name}"], 2 * terms, name)


@pytest.mark.parametrize("first", [1, 2, 7])
@pytest.mark.parametrize("device", DEVICES)
def test_tokens_one_by_one_are_the_whole(recorded, device, first):
    block, tensors = recorded
    block, tokens = block.to(device), tensors["input"].double().to(device)
    params = InferenceParams(max_seqlen=11, max_batch_size=2)
    with torch.no_grad():
        made = [block(tokens[:, :first], inference_params=params)]
        for t in range(first, 11):
            params.seqlen_offset = t
            made.append(block(tokens[:, t : t + 1], inference_params=params))
    assert_close(torch.cat(made, 1), tensors["logits_f64"], 8 * 256)


def test_steps_from_allocated_states(recorded):
    block, tensors = recorded
    tokens = tensors["input"].double()
    states = block.allocate_inference_cache(2, 11)
    assert [tuple(state.shape) for state in states] == [(2, 48, 4), (2, 48, 16)]
    assert {state.dtype for state in block.allocate_inference_cache(2, 11, torch.float16)} == {torch.float16}
    with torch.no_grad():
        for t in range(11):
            out, *returned = block.step(tokens[:, t : t + 1], *states)
            assert_close(out[:, 0], tensors["logits_f64"][:, t], 8 * 256 * 8)
            assert returned[0] is states[0] and returned[1] is states[1]
    with pytest.raises(UserError, match="one token"):
        block.step(tokens[:, :2], *states)


def test_a_cache_is_made_once_and_cleared_on_request(recorded):
    block, tensors = recorded
    params = InferenceParams(11, 2)
    block(tensors["input"].double(), inference_params=params)
    kept = params.key_value_memory_dict[0]
    assert block._get_states_from_cache(params, 2) is kept and kept[1].abs().max() > 0
    block._get_states_from_cache(params, 2, initialize_states=True)
    assert kept[0].abs().max() == 0 and kept[1].abs().max() == 0
    with pytest.raises(UserError, match="layer_idx"):
        Mamba(8)(torch.zeros(1, 2, 8), inference_params=params)


def test_the_start_of_the_weights():
    block = Mamba(32, dt_min=0.01, dt_max=0.1, dtype=torch.bfloat16, bias=True, conv_bias=False)
    steps = torch.nn.functional.softplus(block.dt_proj.bias.float())
    assert steps.min() > 0.0099 and steps.max() < 0.102  # as near as bfloat16 comes
    assert block.dt_proj.weight.abs().max() <= block.dt_rank**-0.5 * (1 + 2**-8)
    assert torch.allclose(block.A_log.exp(), torch.arange(1.0, 17).expand(64, -1))
    assert block.A_log.dtype == block.D.dtype == torch.float32 and block.conv1d.bias is None
    assert block.A_log._no_weight_decay and block.D._no_weight_decay and block.dt_proj.bias._no_reinit
    assert block(torch.zeros(1, 3, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert (Mamba(32, dt_init="constant", dt_scale=0.5).dt_proj.weight == 0.5 * 2**-0.5).all()
    for options in ({"dt_init": "other"}, {"bimamba_type": "v3"}):
        with pytest.raises(UserError, match="must be"):
            Mamba(32, **options)


@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_the_second_direction(kind):
    torch.manual_seed(0)
    block = Mamba(8, d_state=4, bimamba_type=kind, if_divide_out=True, init_layer_scale=0.5).double()
    with torch.no_grad():
        block.A_b_log.add_(normal(*block.A_b_log.shape) / 4)
    tokens = normal(2, 9, 8)
    xz = block.in_proj(tokens).mT
    tail = "_b" if kind == "v2" else ""

    def way(xz, tail, A_log, convolved=None):
        conv, x_proj, dt_proj = (getattr(block, name + tail) for name in ("conv1d", "x_proj", "dt_proj"))
        x, z = xz.chunk(2, dim=1)
        x = plain_conv(x, conv.weight[:, 0], conv.bias, "silu") if convolved is None else convolved
        dt, B, C = (x_proj.weight @ x).split([block.dt_rank, 4, 4], dim=1)
        D = getattr(block, f"D{tail}")
        return x, plain_scan(x, dt_proj.weight @ dt, -A_log.exp(), B, C, D, z, dt_proj.bias, True)

    x, y = way(xz, "", block.A_log)
    # The first kind convolves forwards only and scans the result both ways; the second kind does all of it both ways.
    _, back = way(xz.flip(-1), tail, block.A_b_log, x.flip(-1) if kind == "v1" else None)
    y = (y + back.flip(-1)) / (2 if kind == "v2" else 1)
    assert_close(block(tokens).detach(), 0.5 * (y.mT @ block.out_proj.weight.T), 8 * (4 * 9 + 4 + 8 + 16 + 32))
    with pytest.raises(UserError, match="backwards"):
        block.step(tokens[:, :1], *block.allocate_inference_cache(2, 1))


def test_a_null_space_protects_it():
    torch.manual_seed(0)
    model = torch.nn.Sequential(Mamba(8, d_state=4)).double()
    tokens, others = normal(1, 3, 8, seed=1) * torch.tensor([1.0] * 3 + [0.0] * 5).double(), normal(4, 6, 8, seed=2)
    space = NullSpace(model, "exact")
    before = model(tokens).detach()
    space.consolidate([tokens])
    optimizer = space.wrap(torch.optim.Adam(space.parameters(), lr=1e-2))
    for _ in range(5):
        optimizer.zero_grad()
        model(others).square().sum().backward()
        optimizer.step()
    moved = (model(tokens) - before).abs().max() / before.abs().max()
    assert moved < 1e-5 and not torch.equal(model(others), before)
