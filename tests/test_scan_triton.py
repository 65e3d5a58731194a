"""The backend `triton` of the selective scan against the recorded public one, against the reference, and by itself.

Without a CUDA device the kernels run in Triton's interpreter, on the CPU: every size is small.
"""

import importlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from mambacl.errors import UserError
from mambacl.fused import switch
from mambacl.scan import available_backends, dispatch, native, scan_tokens, selective_scan, triton_scan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GOLDEN = Path(__file__).parent / "goldens" / "selective_scan_ref"
CASES = json.loads(GOLDEN.with_suffix(".json").read_text())["cases"]
TOLERANCE = 2e-6  # of float32, relative to the largest value
ROUNDING = {torch.float32: 0.0, torch.float16: 2**-11, torch.bfloat16: 2**-8}
if DEVICE == "cpu":
    ROUNDING[torch.bfloat16] = 2**-7  # the interpreter truncates
INPUTS = ("u", "delta", "A", "B", "C")
SOFTPLUS_IS_EXACT = DEVICE == "cuda"  # on the CPU torch's softplus differs in the last bit between vectors and the rest


def kernels_run() -> bool:
    """Whether Triton is there and, without a GPU, its interpreter is active."""
    try:
        triton = importlib.import_module("triton")
    except ImportError:
        return False
    return DEVICE == "cuda" or not isinstance(triton.language.zeros, triton.runtime.JITFunction)


kernels = pytest.mark.skipif(not kernels_run(), reason="there is neither a CUDA device nor Triton's interpreter")


@pytest.fixture(scope="module")
def recorded() -> dict[str, Tensor]:
    return load_file(GOLDEN.with_suffix(".safetensors"), device=DEVICE)


@pytest.fixture(autouse=True)
def open_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """No backend forced from outside."""
    monkeypatch.delenv(dispatch.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.delenv(switch.ENVIRONMENT_VARIABLE, raising=False)


@contextmanager
def poisoned() -> Iterator[None]:
    """Within it, new memory is full of NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3, device=DEVICE).isnan().all()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def tokens(b, l, d, n, groups=1, groups_C=None, positive=False, dtype=torch.float32, seed=0):  # noqa: E741
    """u, delta (b, l, d), A (d, n), B, C (b, l, g, n) of usual size; the steps above zero on request."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    delta = normal(b, l, d)
    found = {
        "u": normal(b, l, d),
        "delta": delta.abs() if positive else delta,
        "A": -normal(d, n).exp(),
        "B": normal(b, l, groups, n),
        "C": normal(b, l, groups_C or groups, n),
    }
    return {name: tensor.to(dtype) for name, tensor in found.items()}


def slope(x: Tensor, start: float = -1, end: float = 2) -> Tensor:
    """A gradient for x that depends only on its shape."""
    values = torch.linspace(start, end, x.numel(), dtype=torch.float32, device=x.device)
    return values.reshape(x.shape).to(x.dtype)


def run(inputs, backend="triton", dy=None, dlast=None, trained=INPUTS, scan=scan_tokens, **options):
    """Output, last state and the gradient of every trained input; both outputs have a gradient."""
    leaves = {name: tensor.detach().requires_grad_(name in trained) for name, tensor in inputs.items()}
    y, last = scan(**leaves, backend=backend, **options)
    dy = slope(y) if dy is None else dy.to(y.dtype)
    dlast = slope(last, 1, -1) if dlast is None else dlast.to(y.dtype)
    gradients = torch.autograd.grad([y, last], [leaves[name] for name in trained], [dy, dlast])
    return {"y": y.detach(), "last": last.detach(), **dict(zip(trained, gradients, strict=True))}


def reference(inputs, **options):
    return run({name: tensor.double() for name, tensor in inputs.items()}, "reference", **options)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE, what: str = "", each: float = 0.0):
    """Largest difference, relative to the largest value where that is above one; `each` entry may be off by as much of
    itself on top."""
    assert actual.shape == expected.shape, what
    excess = ((actual.double() - expected.double()).abs() - each * expected.abs().double()).max().item()
    allowed = tolerance * max(1.0, expected.abs().max().item())
    assert excess <= allowed, f"{what}: off by {excess:.3g} of {allowed:.3g}"


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


def compare(inputs, tolerance: float = TOLERANCE, **options) -> None:
    """The kernels in the inputs' types, their memory poisoned, against the reference in float64."""
    with poisoned():
        found = run(inputs, **options)
    wanted = reference(inputs, **options)
    assert found["y"].dtype == found["last"].dtype == torch.float32
    for name, tensor in inputs.items():
        assert found[name].dtype == tensor.dtype, name
    for name in wanted:
        rounding = ROUNDING[inputs[name].dtype] if name in inputs else 0.0
        assert_close(found[name], wanted[name], tolerance, name, rounding)


@kernels
@pytest.mark.parametrize("case", CASES)
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
    "as many states as there may be": {"b": 1, "l": 2, "d": 3, "n": triton_scan.MOST_STATES},
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
    prepared = triton_scan._prepared
    monkeypatch.setattr(triton_scan, "_prepared", lambda *args: seen.append(prepared(*args)) or prepared(*args))
    inputs = tokens(b=1, l=3, d=6, n=2)
    inputs["u"], inputs["delta"] = wide.chunk(2, dim=-1)
    run(inputs)
    assert len(seen) == 2  # forward and backward
    for u, delta, *_ in seen:
        assert u.data_ptr() == wide.data_ptr() and delta.data_ptr() == wide[..., 6:].data_ptr()


@kernels
def test_transposed_and_expanded_inputs_give_the_same_bits() -> None:
    softplus = SOFTPLUS_IS_EXACT
    inputs = tokens(b=2, l=5, d=6, n=3, groups=2, positive=True)
    inputs["B"] = inputs["B"][:1, :1].expand(2, 5, 2, 3)
    inputs["C"] = inputs["C"][:, :, :1].expand(2, 5, 2, 3)
    strided = dict(inputs)
    strided["u"], strided["A"] = inputs["u"].mT.contiguous().mT, inputs["A"].T.contiguous().T
    strided["delta"] = inputs["delta"].transpose(0, 1).contiguous().transpose(0, 1)
    assert not any(tensor.is_contiguous() for tensor in strided.values())
    plain = {name: tensor.contiguous() for name, tensor in inputs.items()}
    assert_same_bits(run(strided, softplus=softplus), run(plain, softplus=softplus))
    strided["delta"] = inputs["delta"].mT.contiguous().mT
    strided["B"] = inputs["B"].mT.contiguous().mT
    strided["C"] = plain["C"].permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
    assert_same_bits(run(strided, softplus=softplus), run(plain, softplus=softplus))


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
    backward = triton_scan.backward
    monkeypatch.setattr(triton_scan, "backward", lambda *a, **o: summed.append(o["need_A"]) or backward(*a, **o))
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
        assert_close(leaf.grad, exact[name].grad, 2e-6, name)


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


RECURRENCES = (1, 5, 2**12, 2**15, 2**17, 2**19, 2**22)


def chosen_layouts(states: int) -> set[triton_scan.Layout]:
    return {
        triton_scan.layout(n, recurrences, backward)
        for n in range(1, states + 1)
        for recurrences in RECURRENCES
        for backward in (False, True)
    }


def test_every_layout_fills_a_warp_and_holds_all_states() -> None:
    for n in range(1, triton_scan.MOST_STATES + 1):
        for recurrences in RECURRENCES:
            for backward in (False, True):
                plan = triton_scan.layout(n, recurrences, backward)
                assert plan.lanes_n * plan.lanes_d == 32
                assert n <= plan.states * plan.lanes_n < 2 * n
                assert triton_scan.KEPT % plan.steps == 0
                assert all(size & (size - 1) == 0 and size > 0 for size in (plan.states, plan.channels, plan.steps))


@kernels
@pytest.mark.parametrize("plan", sorted(chosen_layouts(64), key=str), ids=str)
def test_every_layout_that_is_chosen_gives_the_same_answer(
    plan: triton_scan.Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_scan, "layout", lambda *args, **options: plan)
    compare(tokens(b=1, l=5, d=plan.block, n=plan.states * plan.lanes_n), softplus=True)  # a whole block


@kernels
@pytest.mark.parametrize("n", [1, 3, 16, 64])
@pytest.mark.parametrize("channels, steps", [(1, 2), (2, 8), (4, 4), (1, 8), (4, 2)])
def test_other_layouts_give_the_same_answer(n: int, channels: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = triton_scan.layout(n, 1, backward=True)
    plan = triton_scan.Layout(chosen.states, chosen.lanes_n, channels, chosen.lanes_d, steps, reload=channels != 2)
    inputs = tokens(b=1, l=11, d=3, n=n)
    wanted = reference(inputs, softplus=True)
    monkeypatch.setattr(triton_scan, "layout", lambda *args, **options: plan)
    for name, tensor in run(inputs, softplus=True).items():
        assert_close(tensor, wanted[name], 1e-6, name)


@kernels
def test_forward_and_backward_may_have_different_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = {False: triton_scan.Layout(4, 1, 4, 32, 2), True: triton_scan.Layout(2, 2, 1, 16, 4)}
    monkeypatch.setattr(triton_scan, "layout", lambda n, recurrences, backward: plans[backward])
    compare(tokens(b=1, l=11, d=6, n=3), softplus=True)


@kernels
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("segments, length, n, groups", [(2, 9, 3, 1), (3, 40, 16, 2), (5, 33, 1, 1), (4, 17, 5, 1)])
def test_time_in_segments_gives_the_same_answer(
    segments: int, length: int, n: int, groups: int, reverse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = {way: replace(triton_scan.layout(n, 1, way), segments=segments) for way in (False, True)}
    monkeypatch.setattr(triton_scan, "layout", lambda n, recurrences, backward: plans[backward])
    compare(tokens(b=2, l=length, d=6, n=n, groups=groups), softplus=True, reverse=reverse)


@kernels
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("length", [9, 16, 21, 39])
def test_fewer_kept_states_give_the_same_bits(length: int, reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = tokens(b=1, l=length, d=3, n=3)
    expected = run(inputs, softplus=True, reverse=reverse)
    kept = triton_scan.kept_shape(inputs["u"], inputs["A"])
    monkeypatch.setattr(triton_scan, "KEPT", 2 * triton_scan.KEPT)
    assert triton_scan.kept_shape(inputs["u"], inputs["A"])[1] < kept[1]
    with poisoned():
        assert_same_bits(run(inputs, softplus=True, reverse=reverse), expected)


@kernels
@pytest.mark.parametrize("softplus, reverse, frozen", [(False, False, True), (True, True, False)])
def test_operator_is_registered_as_pytorch_wants_it(softplus: bool, reverse: bool, frozen: bool) -> None:
    inputs = tokens(b=1, l=3, d=4, n=2, groups=2)
    inputs["B"] = inputs["B"].bfloat16()
    inputs["delta"] = inputs["delta"].mT.contiguous().mT  # the steps are laid out as promised all the same
    leaves = [tensor.requires_grad_(not (frozen and name == "A")) for name, tensor in inputs.items()]
    result = torch.library.opcheck(torch.ops.mambacl.scan_kernel.default, (*leaves, not softplus, softplus, reverse))
    assert set(result.values()) == {"SUCCESS"}


@kernels
@pytest.mark.parametrize("softplus, need_A", [(False, True), (True, False)])
def test_backward_operator_is_registered_as_pytorch_wants_it(softplus: bool, need_A: bool) -> None:
    inputs = tokens(b=1, l=3, d=4, n=2, groups=2, positive=True)
    inputs["u"] = inputs["u"].mT.contiguous().mT
    inputs |= {"B": inputs["B"].half(), "C": inputs["C"].bfloat16()}
    y, last, kept, _ = torch.ops.mambacl.scan_kernel(*inputs.values(), False, False, False)
    arguments = (slope(y), slope(last), *inputs.values(), kept, False, softplus, False, need_A)
    result = torch.library.opcheck(torch.ops.mambacl.scan_kernel_backward.default, arguments)
    assert set(result.values()) == {"SUCCESS"}


@kernels
@pytest.mark.parametrize("frozen", [False, True])
def test_compiles_as_one_graph(frozen: bool) -> None:
    inputs = tokens(b=1, l=3, d=4, n=2, groups_C=2)
    trained = tuple(name for name in INPUTS if not (frozen and name == "A"))

    def scan(**options):  # type: ignore[no-untyped-def]
        y, last = scan_tokens(**options, softplus=True, reverse=True)
        return 2 * y, last + 1

    compiled = torch.compile(scan, backend="aot_eager", fullgraph=True)
    found, wanted = run(inputs, scan=compiled, trained=trained), run(inputs, scan=scan, trained=trained)
    for name in wanted:
        assert_close(found[name], wanted[name], 1e-6, name)


@kernels
def test_autocast_does_not_lower_the_precision() -> None:
    inputs = tokens(b=1, l=5, d=5, n=3)
    expected = run(inputs, softplus=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert_same_bits(run(inputs, softplus=True), expected)


@kernels
def test_float64_is_for_the_other_backends() -> None:
    inputs = tokens(b=1, l=3, d=4, n=2)
    for name in INPUTS:
        with pytest.raises(UserError, match=r"below float64.*use backend='torch'"):
            scan_tokens(**{**inputs, name: inputs[name].double()}, backend="triton")


@kernels
def test_more_states_than_a_warp_can_hold_are_for_the_other_backends() -> None:
    inputs = tokens(b=1, l=2, d=2, n=triton_scan.MOST_STATES + 1, positive=True)
    with pytest.raises(UserError, match=f"at most {triton_scan.MOST_STATES} states; use backend='torch'"):
        scan_tokens(**inputs, backend="triton")
    assert_close(scan_tokens(**inputs)[0], reference(inputs)["y"])


def test_without_triton_the_other_backends_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "_imports", False)
    inputs = tokens(b=1, l=3, d=4, n=2)
    assert "triton" not in available_backends()
    assert dispatch.chosen_backend(inputs["u"], inputs["A"]) in ("native", "torch")
    with pytest.raises(UserError, match="needs the package triton"):
        scan_tokens(**inputs, backend="triton")


@pytest.mark.skipif(DEVICE == "cuda", reason="for machines without a GPU")
def test_the_kernels_want_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match="CUDA"):
        scan_tokens(**tokens(b=1, l=3, d=4, n=2), backend="triton")


@kernels
def test_environment_variable_chooses_the_kernels_where_the_caller_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = tokens(b=1, l=3, d=4, n=2)
    launched = []
    forward = triton_scan.forward
    monkeypatch.setattr(triton_scan, "forward", lambda *args: launched.append(True) or forward(*args))
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "triton")
    scan_tokens(**inputs)
    assert launched
    scan_tokens(**inputs, backend="torch")
    assert len(launched) == 1
    with pytest.raises(UserError, match="below float64"):
        scan_tokens(**{**inputs, "u": inputs["u"].double()})


@kernels
def test_on_the_cpu_the_kernels_are_never_chosen_by_themselves() -> None:
    assert "triton" in available_backends()
    u, A = torch.zeros(1, 2, 3), torch.zeros(3, 4)
    assert dispatch.chosen_backend(u, A) == ("torch" if native.library() is None else "native")
