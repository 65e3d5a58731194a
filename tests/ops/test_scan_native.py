"""The C++ scan: every instruction set of this machine against the reference, in both layouts, gradients included."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mambacl.errors import UserError
from mambacl.ops import cpu, selective_scan_reference

pytestmark = pytest.mark.skipif(not cpu.built(), reason="the C++ scan was not built at installation")
ROUNDOFF = {torch.float32: 2**-24, torch.float64: 2**-53}
INPUTS = ("u", "delta", "A", "B", "C", "D", "z", "bias")
OPTIONAL = ("D", "z", "bias")
TOKENS_FIRST, CHANNELS_FIRST = "(b, l, d)", "(b, d, l)"
Tensors = dict[str, Tensor | None]


@pytest.fixture(params=cpu.instruction_sets())
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each instruction set in turn."""
    monkeypatch.setenv(cpu.ENVIRONMENT_VARIABLE, request.param)
    return request.param


def random_inputs(b=1, l=5, d=10, n=3, groups=1, dtype=torch.float32, seed=0, without=(), **options) -> Tensors:  # noqa: E741
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    steps = normal(b, l, d) * 0.5, normal(d) * 0.5
    if not options.get("softplus"):
        steps = steps[0].abs(), steps[1].abs()
    log_A = normal(d, n)
    found = {
        "u": normal(b, l, d),
        "delta": steps[0],
        "A": log_A if options.get("log_A") else -log_A.exp(),
        "B": normal(b, l, groups, n),
        "C": normal(b, l, groups, n),
        "D": normal(d),
        "z": normal(b, l, d),
        "bias": steps[1],
    }
    return {name: None if name in without else tensor.to(dtype) for name, tensor in found.items()}


def laid_out(inputs: Tensors, layout: str) -> Tensors:
    if layout == TOKENS_FIRST:
        return inputs
    turned = {name: inputs[name] for name in ("u", "delta", "z")}
    return inputs | {name: None if x is None else x.mT.contiguous().mT for name, x in turned.items()}


def slopes(inputs: Tensors) -> tuple[Tensor, Tensor]:
    """Gradients of the output and of the last state."""
    u, A = inputs["u"], inputs["A"]
    dout = torch.linspace(-1, 2, u.numel(), dtype=u.dtype).view(u.shape)
    return dout, torch.linspace(1, -1, u.shape[0] * A.numel(), dtype=u.dtype).view(u.shape[0], *A.shape)


def run(inputs: Tensors, dout: Tensor, dlast: Tensor | None, **options: bool) -> dict[str, Tensor]:
    out, last, kept = cpu.forward(**inputs, **options)
    alone = cpu.forward(**inputs, **options, keep=False)  # in longer tiles
    for found, wanted in zip(alone[:2], (out, last), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    gradients = cpu.backward(dout, dlast, *(inputs[name] for name in INPUTS), kept, **options)
    found = {f"d{name}": gradient for name, gradient in zip(INPUTS, gradients, strict=True)}
    assert [name for name in INPUTS if (found[f"d{name}"] is None) != (inputs[name] is None)] == []
    return {"out": out, "last": last} | {name: gradient for name, gradient in found.items() if gradient is not None}


def reference(
    inputs: Tensors, dout: Tensor, dlast: Tensor | None, log_A=False, softplus=False, reverse=False
) -> dict[str, Tensor]:
    leaves = {name: None if x is None else x.detach().double().requires_grad_() for name, x in inputs.items()}
    u, delta, A, B, C, D, z, bias = (leaves[name] for name in INPUTS)
    if reverse:
        u, delta, B, C = (x.flip(1) for x in (u, delta, B, C))
        z = None if z is None else z.flip(1)
    A = -A.exp() if log_A else A
    B, C = (M.permute(0, 2, 3, 1) for M in (B, C))
    y, last = selective_scan_reference(u.mT, delta.mT, A, B, C, D, None if z is None else z.mT, bias, softplus)
    out = y.mT.flip(1) if reverse else y.mT
    loss = (out * dout).sum() + (0 if dlast is None else (last * dlast).sum())
    there = {name: leaf for name, leaf in leaves.items() if leaf is not None}
    gradients = torch.autograd.grad(loss, list(there.values()))
    return {"out": out.detach(), "last": last.detach()} | {
        f"d{name}": gradient for name, gradient in zip(there, gradients, strict=True)
    }


def roundings(name: str, inputs: Tensors) -> int:
    """How many rounding errors, each at most the largest value times the roundoff, meet in an entry: four per step
    (decay, two products, sum), one per state, and one per term of the sum that a gradient is."""
    u, A = inputs["u"], inputs["A"]
    batch, length, channels = u.shape
    terms = {"dB": channels, "dC": channels, "dA": batch * length, "dD": batch * length, "dbias": batch * length}
    return 4 * length + A.shape[1] + terms.get(name, 0) + 8  # and some for the functions around the recurrence


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], inputs: Tensors, times: int = 1) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].shape == tensor.shape, name
        allowed = times * roundings(name, inputs) * ROUNDOFF[inputs["u"].dtype] * max(1.0, tensor.abs().max().item())
        error = (found[name].double() - tensor.double()).abs().max().item()
        assert error <= allowed, f"{name}: off by {error:.3g}, allowed {allowed:.3g}"


def assert_same_bits(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


SHAPES = {
    "one of each": {"l": 1, "d": 1, "n": 1},
    "one token": {"b": 2, "l": 1, "d": 20, "n": 8},
    "one state, long": {"l": 70, "d": 40, "n": 1},
    "below a tile": {"l": cpu.TILE - 1, "d": 7, "n": 3},
    "a tile": {"l": cpu.TILE, "d": 16, "n": 8},
    "above a tile": {"b": 3, "l": cpu.TILE + 1, "d": 33, "n": 16},
    "several tiles and parts": {"b": 2, "l": 2 * cpu.TILE + 3, "d": 150, "n": 16},
    "an odd number of states": {"l": 19, "d": 24, "n": 20},
    "a long tile and a rest": {"l": 4 * cpu.TILE + 3, "d": 24, "n": 6},
    "several long tiles": {"b": 2, "l": 12 * cpu.TILE + 5, "d": 40, "n": 4},
    "groups": {"b": 2, "l": 18, "d": 12, "n": 3, "groups": 3},
    "a group per channel": {"b": 2, "l": 9, "d": 6, "n": 8, "groups": 6},
    "wide groups": {"b": 1, "l": 21, "d": 160, "n": 8, "groups": 2},
    "large enough to be fetched ahead": {"l": 67, "d": 523, "n": 2},
}


@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@pytest.mark.parametrize("layout", [TOKENS_FIRST, CHANNELS_FIRST])
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_the_reference(chosen, shape, layout, dtype, reverse) -> None:
    options = {"softplus": True, "log_A": reverse, "reverse": reverse}
    inputs = random_inputs(**SHAPES[shape], dtype=dtype, **options)
    dout, dlast = slopes(inputs)
    found = run(laid_out(inputs, layout), dout, dlast, **options)
    assert_close(found, reference(inputs, dout, dlast, **options), inputs)


@pytest.mark.parametrize("layout", [TOKENS_FIRST, CHANNELS_FIRST])
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("with_dlast", [False, True])
def test_every_combination_of_options(chosen, layout, reverse, with_dlast) -> None:
    for missing, softplus, log_A in itertools.product(itertools.product([False, True], repeat=3), *[[False, True]] * 2):
        without = [name for name, left_out in zip(OPTIONAL, missing, strict=True) if left_out]
        options = {"softplus": softplus, "log_A": log_A, "reverse": reverse}
        inputs = random_inputs(l=18, d=19, n=5, without=without, **options)
        dout, dlast = slopes(inputs)
        dlast = dlast if with_dlast else None
        found = run(laid_out(inputs, layout), dout, dlast, **options)
        assert_close(found, reference(inputs, dout, dlast, **options), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_instruction_sets_agree_with_each_other(monkeypatch: pytest.MonkeyPatch, dtype) -> None:
    inputs = random_inputs(b=2, l=37, d=72, n=16, dtype=dtype, softplus=True)
    results = []
    for name in cpu.instruction_sets():
        monkeypatch.setenv(cpu.ENVIRONMENT_VARIABLE, name)
        assert cpu.instruction_set() == name
        results.append(run(inputs, *slopes(inputs), softplus=True))
    for found in results[1:]:
        assert_close(found, results[0], inputs, times=2)  # each may be off


@pytest.mark.parametrize("layout", [TOKENS_FIRST, CHANNELS_FIRST])
@pytest.mark.parametrize("batch, groups", [(1, 1), (3, 2)])
def test_bits_do_not_depend_on_the_number_of_threads(chosen, layout, batch, groups) -> None:
    inputs = laid_out(random_inputs(b=batch, l=50, d=320, n=9, groups=groups, softplus=True), layout)
    one = run(inputs, *slopes(inputs), softplus=True)
    torch.set_num_threads(2)
    try:
        two = run(inputs, *slopes(inputs), softplus=True)
    finally:
        torch.set_num_threads(1)
    assert_same_bits(two, one)


@pytest.mark.parametrize("layout", [TOKENS_FIRST, CHANNELS_FIRST])
@pytest.mark.parametrize("shape", [{"l": 21, "d": 150, "n": 5}, {"l": 33, "d": 60, "n": 16, "groups": 3}])
def test_a_batch_cut_in_two_gives_the_same_bits(chosen, layout, shape) -> None:
    inputs = random_inputs(b=2, **shape, softplus=True)
    dout, dlast = slopes(inputs)
    whole = run(laid_out(inputs, layout), dout, dlast, softplus=True)
    per_image = ("u", "delta", "z", "B", "C")
    parts = []
    for i in range(2):
        cut = {name: x[i : i + 1] if name in per_image else x for name, x in inputs.items()}
        parts.append(run(laid_out(cut, layout), dout[i : i + 1], dlast[i : i + 1], softplus=True))
    shared = ("dA", "dD", "dbias")
    joined = {
        name: parts[0][name] + parts[1][name] if name in shared else torch.cat([part[name] for part in parts])
        for name in whole
    }
    assert_same_bits(joined, whole)


@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
def test_layouts_give_the_same_bits_and_keep_their_axes(chosen, reverse) -> None:
    inputs = random_inputs(b=2, l=39, d=52, n=5, softplus=True)
    dout, dlast = slopes(inputs)
    wanted = run(inputs, dout, dlast, softplus=True, reverse=reverse)
    turned = laid_out(inputs, CHANNELS_FIRST)
    found = run(turned, dout.mT.contiguous().mT, dlast, softplus=True, reverse=reverse)
    assert_same_bits(found, wanted)
    for name in ("out", "du", "ddelta", "dz"):
        assert wanted[name].stride(2) == 1 and found[name].stride(1) == 1, name


@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
def test_strides_may_be_anything_and_neighbours_do_not_matter(chosen, reverse) -> None:
    inputs = random_inputs(b=2, l=19, d=20, n=3, groups=2, softplus=True)
    dout, dlast = slopes(inputs)
    wanted = run(inputs, dout, dlast, softplus=True, reverse=reverse)

    def within_nan(x: Tensor, *steps: int) -> Tensor:
        """The same values as a slice of a larger tensor that is NaN elsewhere."""
        large = x.new_full([size * step + 6 for size, step in zip(x.shape, steps, strict=True)], torch.nan)
        view = large[tuple(slice(3, 3 + size * step, step) for size, step in zip(x.shape, steps, strict=True))]
        return view.copy_(x)

    strange = inputs | {
        "u": within_nan(inputs["u"], 1, 1, 1),
        "delta": within_nan(inputs["delta"].mT, 1, 1, 1).mT,
        "z": within_nan(inputs["z"], 2, 3, 2),
        "A": within_nan(inputs["A"].T, 1, 2).T,
        "B": within_nan(inputs["B"], 1, 1, 1, 1),
        "C": within_nan(inputs["C"], 1, 1, 1, 2),
        "D": within_nan(inputs["D"], 3),
        "bias": within_nan(inputs["bias"], 1),
    }
    found = run(strange, within_nan(dout, 1, 2, 1), within_nan(dlast, 1, 1, 2), softplus=True, reverse=reverse)
    assert_same_bits(found, wanted)


def test_inputs_may_be_broadcast(chosen) -> None:
    inputs = random_inputs(b=2, l=18, d=20, n=3)
    inputs["delta"] = inputs["delta"][:1, :1].expand(2, 18, 20)
    inputs["B"] = inputs["B"][:1, :1].expand(2, 18, 1, 3)
    dout, dlast = slopes(inputs)
    dout = dout[:1, :1, :1].expand(2, 18, 20)
    plain = {name: x.contiguous() for name, x in inputs.items()}
    assert_same_bits(run(inputs, dout, dlast), run(plain, dout.contiguous(), dlast))


# The functions inside, each by itself


def one_step(**changes: Tensor) -> Tensor:
    """The output of one token in one state, with B = C = 1 unless they are given: dt u + D u, gated."""
    u = changes["u"]
    ones = torch.ones(1, 1, 1, 1, dtype=u.dtype)
    inputs = {"A": torch.zeros(u.shape[2], 1, dtype=u.dtype), "B": ones, "C": ones} | changes
    softplus = bool(inputs.pop("softplus", False))
    return cpu.forward(**inputs, softplus=softplus)[0].double().flatten()


@pytest.mark.parametrize("dtype, least", [(torch.float32, -86.0), (torch.float64, -700.0)], ids=["f32", "f64"])
def test_softplus_keeps_its_digits(chosen, dtype, least) -> None:
    x = torch.cat([torch.linspace(least, 30, 1003, dtype=dtype), torch.tensor([0.0, 20.0, 100.0], dtype=dtype)])
    found = one_step(u=torch.ones(1, 1, len(x), dtype=dtype), delta=x.view(1, 1, -1), softplus=True)
    wanted = F.softplus(x.double())
    assert ((found - wanted).abs() <= 8 * ROUNDOFF[dtype] * wanted).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_gate_keeps_its_digits(chosen, dtype) -> None:
    z = torch.linspace(-80, 80, 1001, dtype=dtype)
    ones = torch.ones(1, 1, len(z), dtype=dtype)
    found = one_step(u=ones, delta=ones * 0, D=ones[0, 0], z=z.view(1, 1, -1))
    wanted = z.double() * torch.sigmoid(z.double())
    assert ((found - wanted).abs() <= 8 * ROUNDOFF[dtype] * wanted.abs()).all()


@pytest.mark.parametrize("dtype, most", [(torch.float32, 80.0), (torch.float64, 700.0)], ids=["f32", "f64"])
def test_decays_keep_their_digits(chosen, dtype, most) -> None:
    rates = torch.cat([torch.linspace(-most, most, 1001, dtype=dtype), -torch.logspace(-8, 0, 100, dtype=dtype)])
    u = torch.zeros(1, 2, len(rates), dtype=dtype)
    u[:, 0] = 1
    ones = torch.ones(1, 2, 1, 1, dtype=dtype)
    last = cpu.forward(u, torch.ones_like(u), rates[:, None], ones, ones)[1].flatten().double()
    wanted = rates.double().exp()
    allowed = (6 + 2 * rates.abs().double()) * ROUNDOFF[dtype] * wanted  # the rounding of A log2(e) is multiplied
    assert ((last - wanted).abs() <= allowed).all()


def test_the_exponent_of_a_decay_is_rounded_once(chosen) -> None:
    """dt A log2(e) is large and its fraction matters, so the product must not be rounded before k is subtracted."""
    if chosen == "baseline":
        pytest.skip("baseline has no fused multiplication")
    step = torch.tensor(0.7)  # not a power of two, or the product would be exact
    rates = torch.linspace(-80, 80, 1001) / step
    u, ones = torch.zeros(1, 2, len(rates)), torch.ones(1, 2, 1, 1)
    u[:, 0] = 1
    last = cpu.forward(u, step.expand_as(u), rates[:, None], ones, ones)[1].flatten().double()
    exponent = rates.double() * step.double()
    wanted = exponent.exp() * step.double()
    allowed = (6 + 1.25 * exponent.abs()) * ROUNDOFF[torch.float32] * wanted  # 1 of A log2(e), 0.22 of log2(e)
    assert ((last - wanted).abs() <= allowed).all()


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 87.0), (torch.float64, 708.0)], ids=["f32", "f64"])
def test_functions_far_out(chosen, dtype, bound) -> None:
    """Below -bound, exp is too small for the type's full precision, and functions may keep their values there."""
    x = torch.tensor([-90.0, -200.0, -1000.0, -1e6, -1e30, 1000.0, 1e30], dtype=dtype)
    u, edge = torch.ones(1, 1, len(x), dtype=dtype), 1.01 * math.exp(-bound)
    steps = one_step(u=u, delta=x.view(1, 1, -1), softplus=True)
    gates = one_step(u=u, delta=0 * u, D=u[0, 0], z=x.view(1, 1, -1))
    wanted = x.double().sigmoid() * x.double()
    torch.testing.assert_close(steps, F.softplus(x.double()), rtol=1e-6, atol=edge)
    torch.testing.assert_close(gates, wanted, rtol=1e-6, atol=bound * edge)
    low, ones = x[:5], torch.ones(1, 2, 5, dtype=dtype)
    last = cpu.forward(ones, ones, low[:, None], ones[:, :, :1, None], ones[:, :, :1, None])[1].flatten()
    torch.testing.assert_close(last, 1 + low.exp(), rtol=1e-6, atol=0)


def test_gate_and_softplus_at_infinity(chosen) -> None:
    x = torch.tensor([torch.inf, -torch.inf])
    u, one = torch.ones(1, 1, 2), torch.ones(1, 1, 1, 1)
    gates = one_step(u=u, delta=0 * u, D=u[0, 0], z=x.view(1, 1, -1))
    steps = cpu.forward(u, x.view(1, 1, -1), -u.view(2, 1), one, one, softplus=True)[0].flatten()
    assert gates[0] == torch.inf and gates[1].abs() < 1e-35
    assert steps[0] == torch.inf and steps[1].abs() < 1e-37


def test_channels_beyond_the_range_leave_the_others_as_they_are(chosen) -> None:
    inputs = random_inputs(l=20, d=40, n=3, softplus=True)
    dout, dlast = slopes(inputs)
    wanted = run(inputs, dout, dlast, softplus=True)
    delta = inputs["delta"].clone()
    delta[:, :, 7] = 1000.0
    found = run(inputs | {"delta": delta}, dout, dlast, softplus=True)
    others = [d for d in range(40) if d != 7]
    for name in ("out", "du", "ddelta", "dz"):
        assert torch.equal(found[name][..., others], wanted[name][..., others]), name
        assert found[name].isfinite().all(), name
    delta[:, 3, 7] = torch.nan
    found = run(inputs | {"delta": delta}, dout, dlast, softplus=True)
    assert torch.equal(found["out"][..., others], wanted["out"][..., others])
    assert found["out"][:, :3, 7].isfinite().all() and found["out"][:, 3:, 7].isnan().all()


@pytest.mark.parametrize("place", ["A", "u", "delta", "B", "z"])
@pytest.mark.parametrize("payload", [0x7FC00000, 0x7FFFFFFF, 0x7FC00155])
def test_nan_stays_nan(chosen, place, payload) -> None:
    nan = torch.tensor([payload], dtype=torch.int32).view(torch.float32)
    inputs = random_inputs(l=3, d=5, n=2, softplus=True)
    inputs[place].view(-1)[0] = nan
    out = cpu.forward(**inputs, softplus=True)[0]
    t = 1 if place == "A" else 0  # a rate matters once there is a state
    assert out[0, t, 0].isnan()


def test_a_growing_state_overflows_to_infinity(chosen) -> None:
    u, ones = torch.ones(1, 4, 1), torch.ones(1, 4, 1, 1)
    out = cpu.forward(u, torch.ones_like(u), torch.full((1, 1), 88.0), ones, ones)[0].flatten()
    assert out[:2].isfinite().all() and out[1] > 1e38 and (out[2:] == torch.inf).all()


# What surrounds the call


def test_what_is_not_wanted_is_left_out(chosen) -> None:
    inputs = random_inputs(l=20, d=9, n=3)
    dout, dlast = slopes(inputs)
    out, last, kept = cpu.forward(**inputs)
    again = cpu.forward(**inputs, keep=False)
    assert torch.equal(again[0], out) and torch.equal(again[1], last) and again[2].numel() == 0
    assert kept.shape == cpu.kept_shape(inputs["u"], inputs["A"], inputs["B"])
    every = cpu.backward(dout, dlast, *inputs.values(), kept)
    frozen = cpu.backward(dout, dlast, *inputs.values(), kept, need_A=False)
    assert frozen[2] is None
    assert all(torch.equal(x, y) for i, (x, y) in enumerate(zip(every, frozen, strict=True)) if i != 2)


@pytest.mark.parametrize("layout", [TOKENS_FIRST, CHANNELS_FIRST])
@pytest.mark.parametrize("without", [(), OPTIONAL])
@pytest.mark.parametrize("groups", [1, 3])
def test_channels_first_is_the_same_scan(chosen, layout, groups, without) -> None:
    inputs = laid_out(random_inputs(b=2, l=21, d=30, n=5, groups=groups, without=without), layout)
    wanted, wanted_last = cpu.infer(*(inputs[name] for name in INPUTS), False, True, False)
    turned = {name: None if inputs[name] is None else inputs[name].mT for name in ("u", "delta", "z")}
    turned |= {name: inputs[name].permute(0, 2, 3, 1) for name in ("B", "C")}
    for drop in (False, True) if groups == 1 else (False,):
        if drop:
            turned |= {name: turned[name].squeeze(1) for name in ("B", "C")}
        given = inputs | turned
        out, last = cpu.infer_channels_first(*(given[name] for name in INPUTS), True)
        assert torch.equal(out.mT, wanted) and torch.equal(last, wanted_last)
        assert out.mT.stride() == wanted.stride()


def test_a_missing_gradient_of_the_last_state_is_zero(chosen) -> None:
    inputs = random_inputs(l=20, d=9, n=3)
    dout, dlast = slopes(inputs)
    assert_same_bits(run(inputs, dout, None), run(inputs, dout, torch.zeros_like(dlast)))


def test_the_fastest_instruction_set_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cpu.ENVIRONMENT_VARIABLE, raising=False)
    assert cpu.instruction_set() == cpu.instruction_sets()[0]
    assert set(cpu.instruction_sets()) <= {"avx512", "avx2", "baseline", "neon"}


@pytest.mark.parametrize("name", ["avx1024", "AVX2"])
def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch, name) -> None:
    monkeypatch.setenv(cpu.ENVIRONMENT_VARIABLE, name)
    with pytest.raises(UserError, match=f"{name}.*choose one of: {cpu.instruction_sets()[0]}"):
        cpu.forward(**random_inputs())


def test_an_instruction_set_of_another_processor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = next(name for name in cpu.SETS if name not in cpu.instruction_sets())
    monkeypatch.setenv(cpu.ENVIRONMENT_VARIABLE, absent)
    with pytest.raises(UserError, match="unset it"):
        cpu.forward(**random_inputs())


def test_the_most_states(chosen) -> None:
    inputs = random_inputs(l=3, d=2, n=cpu.MOST_STATES)
    dout, dlast = slopes(inputs)
    assert_close(run(inputs, dout, dlast), reference(inputs, dout, dlast), inputs)
    assert not cpu.supports(inputs["u"], torch.float32, cpu.MOST_STATES + 1)
    with pytest.raises(RuntimeError, match="1 to 256 states"):
        cpu.forward(**random_inputs(l=3, d=2, n=cpu.MOST_STATES + 1))


def test_what_it_takes() -> None:
    u = torch.zeros(1, 2, 3)
    assert cpu.supports(u, torch.float32, 16) and cpu.supports(u, torch.float64, 1)
    assert not cpu.supports(u, torch.bfloat16, 16)
    assert not cpu.supports(u.to("meta"), torch.float32, 16)


@pytest.mark.parametrize("channels, groups, suited", [(6, 6, False), (6, 3, True), (6, 1, True), (1, 1, True)])
def test_groups_of_one_channel_are_left_to_pytorch(channels, groups, suited) -> None:
    assert cpu.suits(channels, groups) == suited
