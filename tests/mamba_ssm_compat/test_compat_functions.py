"""mamba-ssm's and causal-conv1d's functions, as mambacl provides them, against plain twins in float64."""

import pytest
import torch
import torch.nn.functional as F
from compat_help import (
    DEVICES,
    WHERE,
    assert_close,
    compare,
    normal,
    outputs_and_gradients,
    plain_conv,
    plain_inner,
    plain_norm,
    plain_scan,
)
from safetensors.torch import load_file

from mambacl import mamba_ssm_compat as compat
from mambacl.errors import UserError
from mambacl.mamba_ssm_compat import raw
from mambacl.mamba_ssm_compat.scan import selective_scan_ref

b, d, n, L, K, RANK = 2, 6, 4, 11, 4, 3
# Per step a product, a sum and an exponential, then the sum over states; the backward goes through all of it again.
SCAN = 8 * (4 * L + n)
INNER = SCAN + 8 * (K + 2 * d + RANK + n)


def scan_inputs() -> dict[str, object]:
    steps = {"u": normal(b, d, L, seed=1), "delta": normal(b, d, L, seed=2) - 1, "A": -normal(d, n, seed=3).exp()}
    return {**steps, "B": normal(b, n, L, seed=4), "C": normal(b, n, L, seed=5)}


OPTIONS = {
    "nothing": {},
    "D": {"D": normal(d, seed=6)},
    "z": {"z": normal(b, d, L, seed=7)},
    "bias": {"delta_bias": normal(d, seed=8)},
    "everything": {"D": normal(d, seed=6), "z": normal(b, d, L, seed=7), "delta_bias": normal(d, seed=8)},
}
MATRICES = {"constant": (d, n), "of all": (b, n, L), "one group": (b, 1, n, L), "groups": (b, 3, n, L)}


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_scan_with_every_option(options, last, device, dtype):
    inputs = {**scan_inputs(), **OPTIONS[options], "delta_softplus": True, "return_last_state": last}
    compare(compat.selective_scan_fn, plain_scan, inputs, device, dtype, SCAN)


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("C", MATRICES)
@pytest.mark.parametrize("B", MATRICES)
def test_the_scan_with_every_kind_of_B_and_C(B, C, device, dtype):
    inputs = scan_inputs()
    inputs.update(delta=inputs["delta"].exp(), B=normal(*MATRICES[B], seed=9), C=normal(*MATRICES[C], seed=10))
    compare(compat.selective_scan_fn, plain_scan, {**inputs, "return_last_state": True}, device, dtype, SCAN)


def test_arguments_come_in_the_public_order():
    inputs = {**scan_inputs(), **OPTIONS["everything"]}
    given = [inputs[name] for name in ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")]
    for scan in (compat.selective_scan_fn, selective_scan_ref):
        y, last = scan(*given, True, True)
        wanted, state = plain_scan(*given, True, True)
        assert_close(y, wanted, SCAN)
        assert_close(last, state, SCAN)


@pytest.mark.parametrize("device", DEVICES)
def test_half_precision_comes_back_as_it_went_in(device):
    inputs = {name: M.to(device, torch.float32 if name == "A" else torch.bfloat16) for name, M in scan_inputs().items()}
    y, last = compat.selective_scan_fn(**inputs, delta_softplus=True, return_last_state=True)
    assert y.dtype == torch.bfloat16 and last.dtype == torch.float32


@pytest.mark.parametrize("name", ["A", "B"])
def test_complex_states_are_refused(name):
    inputs = scan_inputs()
    inputs[name] = inputs[name] + 0j
    with pytest.raises(UserError, match="real A, B and C"):
        compat.selective_scan_fn(**inputs)


# One step


@pytest.mark.parametrize(("device", "dtype"), WHERE)
def test_steps_one_after_the_other_are_the_scan(device, dtype):
    inputs = {**scan_inputs(), **OPTIONS["everything"]}

    def steps(u, delta, A, B, C, D, z, delta_bias):
        state, made = torch.zeros(b, d, n, device=device, dtype=u.dtype), []
        for t in range(L):
            at = (u[..., t], delta[..., t], A, B[..., t], C[..., t])
            made.append(compat.selective_state_update(state, *at, D, z[..., t], delta_bias, True))
        return torch.stack(made, -1), state

    def whole(**inputs):
        return plain_scan(**inputs, delta_softplus=True, return_last_state=True)

    compare(steps, whole, inputs, device, dtype, SCAN)


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_with_heads_groups_and_chosen_rows(device):
    heads, groups, rows = 4, 2, torch.tensor([3, 0])
    state = normal(5, heads, d, n, seed=1)
    x, dt, z = (normal(b, heads, d, seed=seed) for seed in (2, 3, 4))
    A, D, bias = -normal(heads, d, n, seed=5).exp(), normal(heads, d, seed=6), normal(heads, d, seed=7)
    B, C = normal(b, groups, n, seed=8), normal(b, groups, n, seed=9)
    after = state.to(device, copy=True)
    given = [tensor.to(device) for tensor in (x, dt, A, B, C, D)]
    options = {"z": z.to(device), "dt_bias": bias.to(device), "dt_softplus": True}
    y = compat.selective_state_update(after, *given, **options, state_batch_indices=rows.to(device).int())
    for i, row in enumerate(rows):
        for head in range(heads):
            step = F.softplus(dt[i, head] + bias[head])[:, None]
            g = head // (heads // groups)
            h = torch.exp(step * A[head]) * state[row, head] + step * x[i, head, :, None] * B[i, g]
            wanted = (h @ C[i, g] + D[head] * x[i, head]) * F.silu(z[i, head])
            assert_close(after[row, head], h, 32)
            assert_close(y[i, head], wanted, 32 + 2 * n)
    for row in (1, 2, 4):
        assert torch.equal(after[row].cpu(), state[row])


def test_a_step_keeps_the_dtypes_of_the_state_and_of_x():
    state = torch.zeros(b, d, n)
    token = torch.ones(b, d, dtype=torch.bfloat16)
    matrices = -torch.ones(d, n), torch.ones(b, n, dtype=torch.bfloat16), torch.ones(b, n, dtype=torch.bfloat16)
    assert compat.selective_state_update(state, token, token, *matrices).dtype == torch.bfloat16
    assert state.dtype == torch.float32 and state.abs().min() > 0


def test_a_step_of_another_shape_is_refused():
    state, token = torch.zeros(b, d, n), torch.zeros(b, d)
    with pytest.raises(UserError, match="takes B of shape"):
        compat.selective_state_update(state, token, token, torch.zeros(d, n), torch.zeros(b, n + 1), torch.zeros(b, n))


# The scan with what is around it


def inner_inputs() -> dict[str, object]:
    return {
        "xz": normal(b, 2 * d, L, seed=1),
        "conv1d_weight": normal(d, 1, K, seed=2),
        "conv1d_bias": normal(d, seed=3),
        "x_proj_weight": normal(RANK + 2 * n, d, seed=4) / 2,
        "delta_proj_weight": normal(d, RANK, seed=5) / 2,
        "out_proj_weight": normal(5, d, seed=6),
        "out_proj_bias": normal(5, seed=7),
        "A": -normal(d, n, seed=8).exp(),
        "D": normal(d, seed=9),
        "delta_bias": normal(d, seed=10),
    }


NORMS = {"b_rms_weight": normal(n, seed=13), "c_rms_weight": normal(n, seed=14), "dt_rms_weight": normal(d, seed=15)}
INNER_OPTIONS = {
    "as Mamba": {},
    "without biases": {"conv1d_bias": None, "out_proj_bias": None, "D": None},
    "biases of B and C": {"B_proj_bias": normal(n, seed=11), "C_proj_bias": normal(n, seed=12)},
    "B and C given": {
        "B": normal(b, n, L, seed=11),
        "C": normal(b, n, L, seed=12),
        "x_proj_weight": normal(RANK, d, seed=4),
    },
    "norms as in FalconMamba": {**NORMS, "b_c_dt_rms_eps": 1e-3},
    "without softplus": {"delta_softplus": False, "delta_bias": None, "A": -normal(d, n, seed=8).abs() / 8},
}


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("options", INNER_OPTIONS)
def test_the_inner_function_is_its_parts(options, device, dtype):
    compare(compat.mamba_inner_fn, plain_inner, {**inner_inputs(), **INNER_OPTIONS[options]}, device, dtype, INNER)


@pytest.mark.parametrize(("device", "dtype"), WHERE)
def test_the_inner_functions_of_vim(device, dtype):
    inputs = {**inner_inputs(), "A_b": -normal(d, n, seed=16).exp()}
    compare(compat.bimamba_inner_fn, plain_inner, inputs, device, dtype, 2 * INNER)

    inputs = {name: M for name, M in inner_inputs().items() if "out_proj" not in name}

    def without_projection(**inputs):
        return plain_inner(**inputs, out_proj_weight=torch.eye(d).double(), out_proj_bias=None).mT

    compare(compat.mamba_inner_fn_no_out_proj, without_projection, inputs, device, dtype, INNER)


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_reaches_the_projections(device):
    inputs = {name: M.float().to(device) for name, M in inner_inputs().items()}
    with torch.autocast(device, torch.bfloat16):
        assert compat.mamba_inner_fn(**inputs).dtype == torch.bfloat16


# The convolution


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize(("taps", "length"), [(2, 11), (4, 11), (4, 2), (4, 1)])
def test_the_convolution(taps, length, device, dtype, activation, channels_last):
    inputs = {"x": normal(b, d, length, seed=1), "weight": normal(d, taps, seed=2), "bias": normal(d, seed=3)}

    def fast(x, **rest):
        given = x.mT.contiguous().mT if channels_last else x
        y = compat.causal_conv1d_fn(given, activation=activation, **rest)
        assert length == 1 or y.stride(1) == (1 if channels_last else length)
        return y

    def plain(**inputs):
        return plain_conv(**inputs, activation=activation)

    compare(fast, plain, inputs, device, dtype, 8 * (taps + length * b))


def test_the_recorded_convolutions(goldens):
    tensors = load_file(goldens / "causal_conv1d.safetensors")
    for case in ("case0", "case1", "case2"):
        x, weight, bias = (tensors.get(f"{case}/{name}") for name in ("x", "weight", "bias"))
        found = compat.causal_conv1d_fn(x, weight, bias, activation="silu")
        assert_close(found, tensors[f"{case}/out_silu"], 8 * weight.shape[1])


@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_sequence_in_two_parts_is_the_whole(length):
    x, weight, bias = normal(b, d, 12, seed=1), normal(d, K, seed=2), normal(d, seed=3)

    def halves(x, weight, bias):
        first, states = compat.causal_conv1d_fn(x[..., :length], weight, bias, return_final_states=True)
        kept = torch.empty(b, d, K - 1, dtype=x.dtype)
        second, last = compat.causal_conv1d_fn(
            x[..., length:], weight, bias, initial_states=states, return_final_states=True, final_states_out=kept
        )
        assert last is kept
        return torch.cat((first, second), -1), last

    def whole(x, weight, bias):
        return plain_conv(x, weight, bias), x[..., -(K - 1) :]

    compare(halves, whole, {"x": x, "weight": weight, "bias": bias}, "cpu", torch.float64, 8 * (K + 12 * b))


def test_packed_sequences_do_not_see_each_other():
    lengths = (5, 3, 4)
    x, weight, bias = normal(1, d, sum(lengths) + 2, seed=1), normal(d, K, seed=2), normal(d, seed=3)
    numbers = torch.tensor([[0] * 5 + [1] * 3 + [2] * 4 + [-1] * 2])

    def packed(x, weight, bias):
        return compat.causal_conv1d_fn(x, weight, bias, numbers, activation="silu")

    def apart(x, weight, bias):
        parts = [plain_conv(part, weight, bias, "silu") for part in x.split((*lengths, 2), dim=-1)]
        return torch.cat((*parts[:3], 0 * parts[3]), -1)

    inputs = {"x": x, "weight": weight, "bias": bias}
    compare(packed, apart, inputs, "cpu", torch.float64, 8 * (K + x.shape[-1]))
    with pytest.raises(UserError, match="not both"):
        compat.causal_conv1d_fn(x, weight, bias, numbers, return_final_states=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("slots", [K - 1, K, K + 3])
@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_tokens_one_by_one_are_the_convolution(device, ring, slots, at_once):
    length = 15
    x, weight, bias = (M.to(device) for M in (normal(b, d, length, seed=1), normal(d, K, seed=2), normal(d, seed=3)))
    state, made = torch.zeros(b, d, slots, dtype=torch.float64, device=device), []
    for start in range(0, length, at_once):
        part = x[..., start : start + at_once]
        seen = torch.full((b,), start, dtype=torch.int32, device=device) if ring else None
        token = part[..., 0] if at_once == 1 else part
        made.append(compat.causal_conv1d_update(token, state, weight, bias, "silu", seen).reshape(part.shape))
    assert_close(torch.cat(made, -1), plain_conv(x, weight, bias, "silu").cpu(), 8 * K)
    last = x[..., -slots:]
    where = torch.arange(length - slots, length) % slots if ring else torch.arange(slots)
    assert torch.equal(state[..., where.to(device)], last)


def test_a_state_of_more_rows_than_sequences():
    state, x = normal(4, d, K, seed=1), normal(3, d, seed=2)
    weight, rows, before = normal(d, K, seed=3), torch.tensor([2, -1, 0], dtype=torch.int32), state.clone()
    out = compat.causal_conv1d_update(x, state, weight, conv_state_indices=rows)
    for i, row in ((0, 2), (2, 0)):
        seen = torch.cat((before[row], x[i, :, None]), -1)
        assert_close(out[i], (seen[:, 1:] * weight).sum(-1), 8 * K)
        assert torch.equal(state[row], seen[:, 1:])
    assert out[1].abs().max() == 0 and torch.equal(state[[1, 3]], before[[1, 3]])


def test_other_activations_and_short_states_are_refused():
    x, weight = torch.zeros(b, d, L), torch.zeros(d, K)
    with pytest.raises(NotImplementedError, match="relu"):
        compat.causal_conv1d_fn(x, weight, activation="relu")
    with pytest.raises(UserError, match="holds 2 tokens"):
        compat.causal_conv1d_update(x, torch.zeros(b, d, 2), weight)


# The norms


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("options", [{}, {"residual": normal(b, L, d, seed=4)}, {"x1": normal(b, L, d, seed=5)}])
def test_the_norms(rms, options, device, dtype):
    inputs = {"x": normal(b, L, d, seed=1), "weight": normal(d, seed=2), "bias": normal(d, seed=3), **options}
    inputs.update(weight1=normal(d, seed=6), bias1=normal(d, seed=7))

    def fast(**inputs):
        norm = compat.rms_norm_fn if rms else compat.layer_norm_fn
        return norm(**inputs, eps=1e-3, prenorm=True)

    def plain(x, weight, bias, weight1, bias1, residual=0, x1=0):
        total = x + x1 + residual
        centred = total if rms else total - total.mean(-1, keepdim=True)
        y = plain_norm(centred.mT, torch.ones(d).double(), 1e-3).mT
        return y * weight + bias, y * weight1 + bias1, total

    compare(fast, plain, inputs, device, dtype, 16 * (d + b * L))


def test_the_residual_keeps_its_dtype():
    x, weight = torch.ones(b, d, dtype=torch.bfloat16), torch.ones(d)
    y, residual = compat.rms_norm_fn(x, weight, None, prenorm=True, residual_in_fp32=True)
    assert (y.dtype, residual.dtype) == (torch.bfloat16, torch.float32)
    y, residual = compat.rms_norm_fn(x, weight, None, residual=residual, prenorm=True)
    assert (y.dtype, residual.dtype) == (torch.bfloat16, torch.float32) and residual.max() == 2
    assert compat.layer_norm_fn(x, weight, None).dtype == torch.bfloat16


def test_the_norm_module_drops_in_training_only():
    norm = compat.RMSNorm(d, dropout_p=0.5)
    x = normal(b, L, d).float()
    assert list(norm.state_dict()) == ["weight"] and norm.bias is None
    assert (norm(x, prenorm=True)[1] == 0).any()
    y, residual = norm.eval()(x, prenorm=True)
    assert torch.equal(residual, x)
    assert_close(y, plain_norm(x.double().mT, torch.ones(d).double(), 1e-5).mT, 8 * d)


# The compiled modules' interface


@pytest.mark.parametrize("gated", [False, True])
def test_the_scan_below_autograd(gated):
    inputs = {**scan_inputs(), "D": normal(d, seed=6), "delta_bias": normal(d, seed=8)}
    inputs["z"] = normal(b, d, L, seed=7) if gated else None
    wanted = outputs_and_gradients(plain_scan, {**inputs, "delta_softplus": True})
    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
    given = [inputs[name] for name in names]
    ungated, x, *gate = raw.selective_scan_cuda.fwd(*given, True)
    assert_close((gate or [ungated])[0], wanted["output 0"], SCAN)
    last = plain_scan(*given, True, True)[1]
    assert_close(x[:, :, -1, 1::2], last, SCAN)
    dout = torch.linspace(-1, 2, b * d * L, dtype=torch.float64).reshape(b, d, L)
    room = torch.empty(b, 2 * d, L, dtype=torch.float64)
    dz = room[:, d:] if gated else None
    *found, again = raw.selective_scan_cuda.bwd(*given, dout, x, ungated if gated else None, dz, True, True)
    assert_close(again, wanted["output 0"], SCAN)
    for name, gradient in zip(("u", "delta", "A", "B", "C", "D", "delta_bias", "z"), found, strict=False):
        assert_close(gradient, wanted[f"gradient of {name}"], SCAN, name)
    assert len(found) == (8 if gated else 7)
    assert not gated or found[-1].data_ptr() == dz.data_ptr()


@pytest.mark.parametrize("device", DEVICES)
def test_vmambas_scans(device):
    inputs = {**scan_inputs(), "D": normal(d, seed=6), "delta_bias": normal(d, seed=8)}
    given = [inputs[name].float().to(device) for name in ("u", "delta", "A", "B", "C", "D", "delta_bias")]
    half = [M.bfloat16() if i in (0, 1, 3, 4) else M for i, M in enumerate(given)]
    dout = torch.linspace(-1, 2, b * d * L).reshape(b, d, L).to(device)
    wanted = outputs_and_gradients(plain_scan, {**inputs, "delta_softplus": True})
    for module, flags in ((raw.selective_scan_cuda_core, (1,)), (raw.selective_scan_cuda_oflex, (1, True))):
        out, x = module.fwd(*given, True, *flags)
        assert_close(out, wanted["output 0"], SCAN)
        assert x.shape == (b, d, 1, 2 * n)
        gradients = module.bwd(*given, dout, x, True, 1)
        for name, gradient in zip(("u", "delta", "A", "B", "C", "D", "delta_bias"), gradients, strict=True):
            assert_close(gradient, wanted[f"gradient of {name}"], SCAN, name)
    assert raw.selective_scan_cuda_core.fwd(*half, True, 1)[0].dtype == torch.bfloat16
    assert raw.selective_scan_cuda_oflex.fwd(*half, True, 1, False)[0].dtype == torch.bfloat16
    out, x = raw.selective_scan_cuda_oflex.fwd(*half, True, 1, True)
    assert out.dtype == torch.float32 and not torch.equal(out, out.bfloat16().float())
    assert raw.selective_scan_cuda_oflex.bwd(*half, dout, x, True, 1)[0].dtype == torch.bfloat16
