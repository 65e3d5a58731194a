"""The backend `triton` of the selective scan against the recorded public one, against the reference, and by itself.

Without a CUDA device the kernels run in Triton's interpreter, on the CPU: every size is small.
"""

import pytest
import torch
from kernels_help import DEVICE, kernels, kernels_run
from safetensors.torch import load_file
from scan_help import (
    CASES,
    GOLDEN,
    INPUTS,
    SOFTPLUS_IS_EXACT,
    assert_close,
    assert_same_bits,
    compare,
    reference,
    run,
    slope,
    tokens,
)
from torch import Tensor

from mambacl.ops import scan, scan_tokens, scan_triton, selective_scan, switch


@pytest.fixture(scope="module")
def recorded() -> dict[str, Tensor]:
    return load_file(GOLDEN.with_suffix(".safetensors"), device=DEVICE)


@pytest.fixture(autouse=True)
def open_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """No backend forced from outside."""
    monkeypatch.delenv(scan.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.delenv(switch.ENVIRONMENT_VARIABLE, raising=False)


LONG = ("03_groups4_z_last", "07_mixed_constB_varC")


@kernels
@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.long) if c in LONG else c for c in CASES])
def test_output_last_state_and_gradients_are_the_recorded_ones(recorded: dict[str, Tensor], case: str) -> None:
    prefix = f"case{case}/"
    inputs = {
        key.removeprefix(prefix + "in/"): tensor.float().clone().requires_grad_()
        for key, tensor in recorded.items()
        if key.startswith(prefix + "in/")
    }
    y, last = selective_scan(**inputs, delta_softplus=CASES[case]["sp"], return_last_state=True, backend="triton")
    (y * recorded[prefix + "grad_out"].float()).sum().backward()
    assert_close(y, recorded[f"{prefix}out_f32"], what="output")
    if CASES[case]["last"]:
        assert_close(last, recorded[f"{prefix}last_state_f32"], what="last state")
    for name, tensor in inputs.items():
        assert_close(tensor.grad, recorded[f"{prefix}grad_f32/{name}"], what=f"gradient of {name}")


SHORT = {
    "one of each": {"b": 1, "l": 1, "d": 1, "n": 1},
    "one token, one state": {"b": 2, "l": 1, "d": 33, "n": 1},
    "two tokens, channels beyond a block": {"b": 1, "l": 2, "d": 65, "n": 2},
    "three states, five channels": {"b": 2, "l": 3, "d": 5, "n": 3},
    "four tokens, groups": {"b": 1, "l": 4, "d": 12, "n": 5, "groups": 2, "groups_C": 4},
    "five tokens, eight states": {"b": 1, "l": 5, "d": 6, "n": 8, "groups": 2},
    "eight tokens, sixteen states": {"b": 1, "l": 8, "d": 17, "n": 16},
    "as many states as there may be": {"b": 1, "l": 2, "d": 3, "n": scan_triton.MOST_STATES},
}


@kernels
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("softplus", [False, True], ids=["steps", "softplus"])
@pytest.mark.parametrize("shape", SHORT)
def test_short_sequences_are_those_of_the_reference(shape: str, softplus: bool, reverse: bool) -> None:
    compare(tokens(**SHORT[shape], positive=not softplus), softplus=softplus, reverse=reverse)


LONGER = {
    "nine tokens, 24 states": ({"l": 9, "d": 9, "n": 24}, False, False),
    "nine tokens, 24 states, both ways": ({"l": 9, "d": 9, "n": 24}, True, True),
    "17 tokens, 33 states": ({"l": 17, "d": 8, "n": 33, "groups_C": 2}, True, False),
    "17 tokens, 33 states, backwards": ({"l": 17, "d": 4, "n": 33}, False, True),
    "37 tokens, 64 states": ({"l": 37, "d": 3, "n": 64}, True, False),
    "37 tokens, 4 states, backwards": ({"l": 37, "d": 6, "n": 4}, True, True),
    "37 tokens, 1 state": ({"l": 37, "d": 6, "n": 1, "groups": 2}, True, False),
    "23 tokens, 1 state, backwards": ({"l": 23, "d": 6, "n": 1, "groups": 2, "groups_C": 1}, False, True),
}


@kernels
@pytest.mark.parametrize("case", LONGER)
def test_longer_sequences_are_those_of_the_reference(case: str) -> None:
    shape, softplus, reverse = LONGER[case]
    compare(tokens(b=1, **shape, positive=not softplus), softplus=softplus, reverse=reverse)


@kernels
@pytest.mark.parametrize("constant", ["B", "C", "BC"])
def test_constant_B_and_C_are_those_of_the_reference(constant: str) -> None:
    inputs = tokens(b=1, l=5, d=6, n=3, groups=2)
    inputs = {name: tensor.mT if name in ("u", "delta") else tensor for name, tensor in inputs.items()}
    for name in ("B", "C"):
        inputs[name] = inputs["A"].exp() + 1 if name in constant else inputs[name].permute(0, 2, 3, 1)
    compare(inputs, scan=selective_scan, delta_softplus=True, return_last_state=True)


@kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
def test_half_precision_inputs_are_read_exactly_and_summed_in_float32(dtype: torch.dtype, reverse: bool) -> None:
    softplus = not reverse
    compare(tokens(b=1, l=9, d=5, n=3, dtype=dtype, positive=not softplus), softplus=softplus, reverse=reverse)


@kernels
def test_every_input_may_have_its_own_type() -> None:
    types = {"u": torch.bfloat16, "delta": torch.float32, "A": torch.float32, "B": torch.float16, "C": torch.bfloat16}
    inputs = {name: tensor.to(types[name]) for name, tensor in tokens(b=1, l=6, d=5, n=3).items()}
    compare(inputs, softplus=True)
    compare({**inputs, "u": inputs["u"].float(), "delta": inputs["delta"].half()}, softplus=True)


def test_half_precision_is_kept_at_the_output_of_the_whole_scan() -> None:
    inputs = {
        name: tensor.bfloat16().mT if name in ("u", "delta") else tensor
        for name, tensor in tokens(b=1, l=3, d=2, n=2).items()
    }
    inputs |= {name: inputs[name].permute(0, 2, 3, 1) for name in ("B", "C")}
    y, last = selective_scan(**inputs, return_last_state=True, backend="triton" if kernels_run() else "auto")
    assert y.dtype == torch.bfloat16 and last.dtype == torch.float32


def within_nan(x: Tensor, *margins: int) -> Tensor:
    """The same values as a slice of a larger tensor that holds NaN all around."""
    sizes = [size + 2 * margin for size, margin in zip(x.shape, margins, strict=True)]
    inside = torch.full(sizes, torch.nan, dtype=x.dtype, device=x.device)
    for dim, (size, margin) in enumerate(zip(x.shape, margins, strict=True)):
        inside = inside.narrow(dim, margin, size)
    return inside.copy_(x)


@kernels
@pytest.mark.parametrize("dtype, reverse", [(torch.float32, False), (torch.bfloat16, True)])
def test_slices_of_larger_tensors_give_the_same_bits(dtype: torch.dtype, reverse: bool) -> None:
    inputs = tokens(b=2, l=6, d=10, n=3, groups=2, dtype=dtype, positive=True)
    options = {"softplus": SOFTPLUS_IS_EXACT, "reverse": reverse}
    sliced = {
        "u": within_nan(inputs["u"], 0, 0, 10),
        "delta": within_nan(inputs["delta"], 1, 3, 1),
        "A": within_nan(inputs["A"], 1, 1),
        "B": within_nan(inputs["B"], 0, 1, 0, 2),
        "C": within_nan(inputs["C"], 1, 0, 1, 0),
    }
    assert not any(tensor.is_contiguous() for tensor in sliced.values())
    y = torch.empty(inputs["u"].shape, device=DEVICE)
    dy = within_nan(slope(y), 1, 1, 2)
    assert_same_bits(run(sliced, dy=dy, **options), run(inputs, **options))


@kernels
def test_halves_of_a_projection_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = torch.randn(1, 3, 12, device=DEVICE)
    seen = []
    prepared = scan_triton._prepared
    monkeypatch.setattr(scan_triton, "_prepared", lambda *args: seen.append(prepared(*args)) or prepared(*args))
    inputs = tokens(b=1, l=3, d=6, n=2)
    inputs["u"], inputs["delta"] = wide.chunk(2, dim=-1)
    run(inputs)
    assert len(seen) == 2  # forward and backward
    for u, delta, *_ in seen:
        assert u.data_ptr() == wide.data_ptr() and delta.data_ptr() == wide[..., 6:].data_ptr()


@kernels
def test_transposed_and_expanded_inputs_give_the_same_answer() -> None:
    """The same bits in the interpreter; for other strides a compiler may contract other products and sums."""

    def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        if DEVICE == "cpu":
            assert_same_bits(actual, expected)
        for name, tensor in expected.items():
            assert_close(actual[name], tensor, what=name)

    softplus = SOFTPLUS_IS_EXACT
    inputs = tokens(b=2, l=5, d=6, n=3, groups=2, positive=True)
    inputs["B"] = inputs["B"][:1, :1].expand(2, 5, 2, 3)
    inputs["C"] = inputs["C"][:, :, :1].expand(2, 5, 2, 3)
    strided = dict(inputs)
    strided["u"], strided["A"] = inputs["u"].mT.contiguous().mT, inputs["A"].T.contiguous().T
    strided["delta"] = inputs["delta"].transpose(0, 1).contiguous().transpose(0, 1)
    assert not any(tensor.is_contiguous() for tensor in strided.values())
    plain = {name: tensor.contiguous() for name, tensor in inputs.items()}
    assert_same(run(strided, softplus=softplus), run(plain, softplus=softplus))
    strided["delta"] = inputs["delta"].mT.contiguous().mT
    strided["B"] = inputs["B"].mT.contiguous().mT
    strided["C"] = plain["C"].permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
    assert_same(run(strided, softplus=softplus), run(plain, softplus=softplus))


@kernels
def test_expanded_gradients_give_the_same_bits() -> None:
    inputs = tokens(b=2, l=5, d=5, n=3)
    dy, dlast = (torch.tensor(0.7, device=DEVICE).expand(shape) for shape in ((2, 5, 5), (2, 5, 3)))
    expected = run(inputs, dy=dy.contiguous(), dlast=dlast.contiguous())
    assert_same_bits(run(inputs, dy=dy, dlast=dlast), expected)
    assert_same_bits(run(inputs, dy=dy.mT.contiguous().mT, dlast=dlast.mT.contiguous().mT), expected)


def assert_same_kinds(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """NaN and the infinities at the same places; close elsewhere."""
    for name in wanted:
        finite = wanted[name].isfinite()
        assert torch.equal(found[name].isfinite(), finite), name
        assert torch.equal(found[name].isnan(), wanted[name].isnan()), name
        if finite.any():
            assert_close(found[name][finite], wanted[name][finite], what=name)


def of_channels(results: dict[str, Tensor], keep: list[int]) -> dict[str, Tensor]:
    """What belongs to some channels alone."""
    places = {"y": 2, "u": 2, "delta": 2, "last": 1, "A": 0}
    index = torch.tensor(keep, device=DEVICE)
    return {name: results[name].index_select(dim, index) for name, dim in places.items()}


@kernels
@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
@pytest.mark.parametrize("token", [2, 5])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["u", "delta", "B", "C", "dy", "dlast"])
def test_values_that_are_not_finite_go_where_they_go_in_the_reference(name: str, value: float, token: int) -> None:
    reverse = token == 5 and value == torch.inf
    inputs = tokens(b=1, l=6, d=5, n=3, positive=True)
    gradients = {"dy": slope(inputs["u"]), "dlast": slope(inputs["A"])[None].contiguous()}
    if value == torch.inf:  # of one sign, so that infinite sums are no NaN
        inputs = {name: tensor if name == "A" else tensor.abs() for name, tensor in inputs.items()}
        gradients = {name: tensor.abs() for name, tensor in gradients.items()}
    clean = run(inputs, **gradients, reverse=reverse) if name in ("u", "delta", "dy") and value != value else None
    bad = {**inputs, **gradients}[name]
    (bad[0, 1] if name == "dlast" else bad[0, token].view(-1))[1] = value
    found, wanted = run(inputs, **gradients, reverse=reverse), reference(inputs, **gradients, reverse=reverse)
    assert not all(tensor.isfinite().all() for tensor in wanted.values())
    assert_same_kinds(found, wanted)
    if clean is not None:
        assert_same_bits(of_channels(found, [0, 2, 3, 4]), of_channels(clean, [0, 2, 3, 4]))


@kernels
@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
@pytest.mark.parametrize("length", [4, 5])
def test_a_state_that_decays_at_once_is_only_its_own_input(length: int) -> None:
    inputs = tokens(b=1, l=length, d=5, n=3, positive=True)
    inputs["A"][1, 1] = -torch.inf
    found, wanted = run(inputs), reference(inputs)
    assert wanted["y"].isfinite().all() and wanted["last"].isfinite().all() and wanted["u"].isfinite().all()
    assert_same_kinds(found, wanted)


@kernels
@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
@pytest.mark.parametrize("raw", [torch.nan, torch.inf, -torch.inf])
def test_softplus_of_a_value_that_is_not_finite(raw: float) -> None:
    inputs = tokens(b=1, l=6, d=5, n=3)
    inputs["delta"][0, 2, 1] = raw
    found, wanted = run(inputs, softplus=True), reference(inputs, softplus=True)
    assert_same_kinds(found, wanted)


@kernels
@pytest.mark.parametrize("shape, reverse", [((5, 5, 3), False), ((5, 5, 3), True), ((9, 34, 1), True)])
def test_nothing_is_written_around_the_outputs(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], reverse: bool
) -> None:
    margin, mark, empty, buffers = 4096, 7.0, torch.empty, []

    def guarded(size, *args, **options):  # type: ignore[no-untyped-def]
        if not isinstance(size, tuple):
            return empty(size, *args, **options)
        inner = empty(size, *args, **options)
        outer = torch.full((inner.numel() + 2 * margin,), mark, dtype=inner.dtype, device=inner.device)
        buffers.append(outer)
        return outer[margin : margin + inner.numel()].view(size)

    inputs = tokens(1, *shape)
    monkeypatch.setattr(torch, "empty", guarded)
    found = run(inputs, softplus=True, reverse=reverse)
    monkeypatch.undo()
    assert len(buffers) == 11  # y, last, kept; du, ddelta, dA, dB and dC; twice the ends and sums of segments
    for buffer in buffers:
        assert (buffer[:margin] == mark).all() and (buffer[-margin:] == mark).all()
    assert_same_bits(found, run(inputs, softplus=True, reverse=reverse))


@kernels
@pytest.mark.parametrize("trained", [("u",), ("B",), ("u", "delta", "B", "C"), ("A",)], ids="".join)
def test_frozen_inputs_change_nothing_for_the_others(trained: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = tokens(b=1, l=5, d=5, n=3)
    expected = run(inputs, softplus=True)
    summed = []
    backward = scan_triton.backward
    monkeypatch.setattr(scan_triton, "backward", lambda *a, **o: summed.append(o["need_A"]) or backward(*a, **o))
    found = run(inputs, softplus=True, trained=trained)
    assert_same_bits(found, {name: expected[name] for name in ("y", "last", *trained)})
    assert summed == ["A" in trained]  # a frozen A has no sums taken for it


@kernels
def test_a_frozen_A_has_no_gradient() -> None:
    leaves = {name: tensor.requires_grad_(name != "A") for name, tensor in tokens(b=1, l=3, d=5, n=3).items()}
    scan_tokens(**leaves, backend="triton")[0].sum().backward()
    assert leaves["A"].grad is None
    assert all(leaves[name].grad.any() for name in INPUTS if name != "A")


@kernels
@pytest.mark.parametrize("n", [1, 3, 16])
def test_A_may_be_given_by_its_logarithm(n: int) -> None:
    inputs = tokens(b=2, l=6, d=5, n=n, positive=True)
    logarithm = (-inputs["A"].double()).log()
    leaves = {name: tensor.float().requires_grad_() for name, tensor in {**inputs, "A": logarithm}.items()}
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in leaves.items()}
    for given, backend in ((exact, "reference"), (leaves, "triton")):
        y, last = scan_tokens(**given, backend=backend, log_A=True)
        (slope(y) * y).sum().add(last.sum()).backward()
    for name, leaf in leaves.items():
        assert_close(leaf.grad, exact[name].grad, what=name)


@kernels
def test_without_gradients_nothing_is_recorded() -> None:
    y, last = scan_tokens(**tokens(b=1, l=3, d=5, n=3), backend="triton")
    assert not y.requires_grad and not last.requires_grad


@kernels
@pytest.mark.parametrize("reached", ["y", "last"])
def test_gradients_flow_from_either_output_alone(reached: str) -> None:
    inputs = tokens(b=1, l=6, d=5, n=3)
    found, wanted = [], []
    for results, backend, dtype in ((found, "triton", torch.float32), (wanted, "reference", torch.float64)):
        leaves = {name: tensor.to(dtype).requires_grad_() for name, tensor in inputs.items()}
        y, last = scan_tokens(**leaves, backend=backend, softplus=True)
        output = y if reached == "y" else last
        results += torch.autograd.grad(output, list(leaves.values()), slope(output), allow_unused=True)
    for name, ours, theirs in zip(inputs, found, wanted, strict=True):
        assert_close(ours, torch.zeros_like(ours) if theirs is None else theirs, what=name)


@kernels
def test_the_gradient_through_softplus_is_accurate_for_steps_of_any_size() -> None:
    inputs = tokens(b=1, l=3, d=61, n=2, positive=True)
    inputs = {name: tensor.abs() + 0.1 for name, tensor in inputs.items()}  # nothing cancels
    inputs["delta"] = torch.linspace(-30, 30, 61, device=DEVICE).expand(1, 3, 61) + torch.rand(1, 3, 61, device=DEVICE)
    inputs["A"] = -1e-3 * inputs["A"]
    dy = torch.rand(1, 3, 61, device=DEVICE) + 0.5
    dlast = torch.rand(1, 61, 2, device=DEVICE)
    found = run(inputs, dy=dy, dlast=dlast, softplus=True)
    wanted = reference(inputs, dy=dy, dlast=dlast, softplus=True)
    for name in ("y", "u", "delta"):
        relative = (found[name] / wanted[name] - 1).abs().max().item()
        assert relative < 1e-5, f"{name}: relative error {relative:.3g}"


@kernels
def test_the_same_bits_each_time() -> None:
    inputs = tokens(b=2, l=9, d=12, n=3, groups=2)
    assert_same_bits(run(inputs, softplus=True), run(inputs, softplus=True))


@kernels
def test_an_image_does_not_depend_on_the_rest_of_the_batch() -> None:
    dy, dlast = torch.ones(3, 6, 5, device=DEVICE), torch.ones(3, 5, 3, device=DEVICE)
    options = {"softplus": SOFTPLUS_IS_EXACT, "dy": dy, "dlast": dlast}
    inputs = tokens(b=3, l=6, d=5, n=3, positive=True)
    others = {**tokens(b=3, l=6, d=5, n=3, positive=True, seed=1), "A": inputs["A"]}
    for name in ("u", "delta", "B", "C"):
        others[name][1] = inputs[name][1]
    alone = {name: tensor if name == "A" else tensor[1:2] for name, tensor in inputs.items()}
    found, among_others = run(inputs, **options), run(others, **options)
    by_itself = run(alone, **{**options, "dy": dy[:1], "dlast": dlast[:1]})
    for name in found:
        if name != "A":
            assert torch.equal(found[name][1], among_others[name][1]), name
            assert torch.equal(found[name][1], by_itself[name][0]), name


@kernels
def test_an_empty_batch() -> None:
    inputs = {name: tensor if name == "A" else tensor[:0] for name, tensor in tokens(b=1, l=3, d=6, n=2).items()}
    found = run(inputs, softplus=True)
    assert found["y"].shape == (0, 3, 6) and found["last"].shape == (0, 6, 2)
    assert all(found[name].shape == inputs[name].shape and not found[name].any() for name in inputs)
