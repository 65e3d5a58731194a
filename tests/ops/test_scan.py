"""Every backend of the selective scan against the recorded public one, against the reference, and by itself."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mambacl.errors import UserError
from mambacl.ops import available_backends, cpu, scan, scan_tokens, scan_torch, selective_scan

GOLDEN = Path(__file__).parents[1] / "goldens" / "selective_scan_ref"
CASES = json.loads(GOLDEN.with_suffix(".json").read_text())["cases"]
built = pytest.mark.skipif(cpu.library() is None, reason="the C++ kernel was not built at installation")
FAST = ["torch", pytest.param("native", marks=built)]
ALL = ["reference", *FAST]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 6e-6}  # that of float32 is tolerance.rounding(2**7)


@pytest.fixture(scope="module")
def recorded() -> dict[str, Tensor]:
    return load_file(GOLDEN.with_suffix(".safetensors"))


@pytest.fixture(autouse=True)
def open_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """No backend forced from outside."""
    monkeypatch.delenv(scan.ENVIRONMENT_VARIABLE, raising=False)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float, what: str = "") -> None:
    """Largest difference, relative to the largest value where that is above one."""
    assert actual.shape == expected.shape, what
    difference = (actual - expected).abs().max().item()
    assert difference <= tolerance * max(1.0, expected.abs().max().item()), f"{what}: off by {difference:.3g}"


def random_inputs(b, d, l, n, groups=None, dtype=torch.float64, seed=0):  # noqa: E741
    """u, delta, A, B, C, D, z, delta_bias of usual size; `groups` None for (b, n, l), "const" for (d, n)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, generator=generator)

    shape = {None: (b, n, l), "const": (d, n)}.get(groups) or (b, groups, n, l)
    return {
        "u": normal(b, d, l),
        "delta": normal(b, d, l) * 0.5,
        "A": -normal(d, n).exp(),
        "B": normal(*shape),
        "C": normal(*shape),
        "D": normal(d),
        "z": normal(b, d, l),
        "delta_bias": normal(d) * 0.5,
    }


def run(inputs, backend, **options):
    """Output, last state and the gradient of every input, of a loss that both outputs enter."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in inputs.items()}
    y, last = selective_scan(**leaves, delta_softplus=True, return_last_state=True, backend=backend, **options)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    loss = (y * weights).sum() + (last * torch.linspace(-1, 2, last.numel(), dtype=last.dtype).view_as(last)).sum()
    loss.backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    return {"out": y.detach(), "last": last.detach(), **gradients}


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("case", CASES)
def test_output_last_state_and_gradients_are_the_recorded_ones(recorded, case, dtype, backend):
    prefix, kind = f"case{case}/", {torch.float64: "f64", torch.float32: "f32"}[dtype]
    inputs = {
        key.removeprefix(prefix + "in/"): tensor.to(dtype, copy=True).requires_grad_()
        for key, tensor in recorded.items()
        if key.startswith(prefix + "in/")
    }
    y, last = selective_scan(**inputs, delta_softplus=CASES[case]["sp"], return_last_state=True, backend=backend)
    (y * recorded[prefix + "grad_out"].to(dtype)).sum().backward()

    assert_close(y, recorded[f"{prefix}out_{kind}"], TOLERANCE[dtype], "output")
    if CASES[case]["last"]:
        assert_close(last, recorded[f"{prefix}last_state_{kind}"], TOLERANCE[dtype], "last state")
    for name, tensor in inputs.items():
        assert_close(tensor.grad, recorded[f"{prefix}grad_{kind}/{name}"], TOLERANCE[dtype], f"gradient of {name}")


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("groups", [None, 2, "const"])
def test_gradients_are_those_of_finite_differences(backend, groups):
    inputs = random_inputs(b=2, d=4, l=5, n=3, groups=groups)

    def scan(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return selective_scan(*tensors, delta_softplus=True, return_last_state=True, backend=backend)

    assert torch.autograd.gradcheck(scan, [tensor.requires_grad_() for tensor in inputs.values()], atol=1e-6)


SHAPES = {
    "one token": {"b": 2, "d": 3, "l": 1, "n": 4},
    "one of each": {"b": 1, "d": 1, "l": 1, "n": 1},
    "odd sizes": {"b": 3, "d": 7, "l": 11, "n": 5},
    "below a tile": {"b": 1, "d": 5, "l": cpu.TILE - 1, "n": 3},
    "a tile": {"b": 1, "d": 5, "l": cpu.TILE, "n": 3},
    "above a tile": {"b": 1, "d": 5, "l": cpu.TILE + 1, "n": 3},
    "several tiles": {"b": 2, "d": 33, "l": 3 * cpu.TILE + 2, "n": 16},
    "groups": {"b": 2, "d": 12, "l": 19, "n": 4, "groups": 3},
    "a group a channel": {"b": 2, "d": 6, "l": 9, "n": 2, "groups": 6},
    "constant B and C": {"b": 2, "d": 6, "l": 20, "n": 2, "groups": "const"},
    "odd group width": {"b": 1, "d": 39, "l": 18, "n": 6, "groups": 3},
    "channels in several chunks": {"b": 1, "d": 150, "l": 5, "n": 2},
    "many images": {"b": 17, "d": 9, "l": 4, "n": 3},
}


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_fast_backends_agree_with_the_reference(shape, dtype, backend):
    inputs = random_inputs(**SHAPES[shape], dtype=dtype)
    expected, actual = run(inputs, "reference"), run(inputs, backend)
    for name in expected:
        assert_close(actual[name], expected[name], 1e-12 if dtype == torch.float64 else 6e-6, name)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("of_B, of_C", [("const", None), (None, "const"), (2, None), (2, 4), ("const", 4)])
def test_B_and_C_may_have_different_groups(of_B, of_C, backend):
    inputs = random_inputs(b=2, d=8, l=5, n=3, groups=of_B)
    inputs["C"] = random_inputs(b=2, d=8, l=5, n=3, groups=of_C, seed=1)["C"]
    expected, actual = run(inputs, "reference"), run(inputs, backend)
    for name in expected:
        assert_close(actual[name], expected[name], 1e-12, name)


@pytest.mark.parametrize("step, tile", [(1, 1), (6, 30), (1 << 20, 64)])
def test_torch_backend_is_the_same_however_it_is_cut_into_tiles(monkeypatch, step, tile):
    inputs = random_inputs(b=3, d=10, l=13, n=3, groups=2)
    expected = run(inputs, "reference")
    monkeypatch.setitem(scan_torch.STEP_ELEMENTS, "cpu", step)
    monkeypatch.setitem(scan_torch.TILE_ELEMENTS, "cpu", tile)
    for name, value in run(inputs, "torch").items():
        assert_close(value, expected[name], 1e-12, name)


@pytest.mark.parametrize("backend", FAST)
def test_inputs_need_not_be_contiguous(backend):
    plain = random_inputs(b=2, d=6, l=18, n=4)
    strided = dict(plain)
    for name in ("u", "delta", "z"):
        strided[name] = plain[name].transpose(1, 2).contiguous().transpose(1, 2)
    strided["A"] = plain["A"].T.contiguous().T
    strided["B"] = plain["B"].repeat_interleave(2, dim=2)[:, :, ::2]
    strided["D"] = plain["D"].repeat_interleave(3)[::3]
    assert not any(strided[name].is_contiguous() for name in ("u", "delta", "z", "A", "B", "D"))
    options = {"delta_softplus": True, "backend": backend}
    assert_close(selective_scan(**strided, **options), selective_scan(**plain, **options), 1e-13)


@pytest.mark.parametrize("backend", FAST)
def test_tokens_may_be_slices_and_broadcasts_of_larger_tensors(backend):
    torch.manual_seed(0)
    wide = torch.randn(2, 20, 24, dtype=torch.float64)
    u, delta = wide[:, 1:18, :8], wide[:, 2:19, 16:].exp()
    A = -torch.rand(8, 3, dtype=torch.float64)
    B = torch.randn(1, 1, 2, 3, dtype=torch.float64).expand(2, 17, 2, 3)
    C = torch.randn(2, 17, 2, 6, dtype=torch.float64)[..., ::2]
    expected = scan_tokens(u, delta, A, B, C, backend="reference")
    for actual, wanted in zip(scan_tokens(u, delta, A, B, C, backend=backend), expected, strict=True):
        assert_close(actual, wanted, 1e-12)


@pytest.mark.parametrize("backend", ALL)
def test_gradients_flow_from_the_last_state_alone(backend):
    inputs = random_inputs(b=2, d=4, l=18, n=3)
    u = inputs["u"].requires_grad_()
    _, last = selective_scan(**inputs, delta_softplus=True, return_last_state=True, backend=backend)
    last.sum().backward()
    first_step, last_step = u.grad[..., 0], u.grad[..., -1]
    assert first_step.abs().max() > 0 and last_step.abs().max() > 0


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_computed_in_float32(backend, dtype):
    exact = {name: tensor.to(dtype).float() for name, tensor in random_inputs(b=2, d=5, l=17, n=3).items()}
    expected = run(exact, backend)
    actual = run({name: tensor.to(dtype) for name, tensor in exact.items()}, backend)
    assert actual["out"].dtype == dtype and actual["last"].dtype == torch.float32
    assert torch.equal(actual["last"], expected["last"])
    assert torch.equal(actual["out"], expected["out"].to(dtype))
    assert all(actual[name].dtype == dtype for name in exact)
    for name in exact:
        assert_close(actual[name].float(), expected[name], 0.02, name)


@pytest.mark.parametrize("backend", ALL)
def test_one_float64_input_makes_the_computation_float64(backend):
    inputs = {name: tensor.float() for name, tensor in random_inputs(b=1, d=3, l=4, n=2).items()}
    y, last = selective_scan(**{**inputs, "A": inputs["A"].double()}, return_last_state=True, backend=backend)
    assert y.dtype == torch.float32 and last.dtype == torch.float64


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_inputs_give_the_same_bits(backend, threads):
    inputs = random_inputs(b=2, d=96, l=40, n=8, dtype=torch.float32)
    torch.set_num_threads(threads)
    try:
        first, second = run(inputs, backend), run(inputs, backend)
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("shape", [{"b": 1, "d": 96, "groups": None}, {"b": 2, "d": 96, "groups": 4}])
def test_bits_do_not_depend_on_the_number_of_threads(backend, shape):
    inputs = random_inputs(**shape, l=40, n=8, dtype=torch.float32)
    one = run(inputs, backend)
    torch.set_num_threads(2)
    try:
        two = run(inputs, backend)
    finally:
        torch.set_num_threads(1)
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def test_all_backends_but_native_work_everywhere():
    assert available_backends()[:3] == ["auto", "reference", "torch"]
    assert ("native" in available_backends()) == (cpu.library() is not None)


@built
def test_auto_takes_the_native_kernel_where_it_can():
    u, A = torch.zeros(1, 2, 3), torch.zeros(3, 4)
    assert scan.chosen_backend(u, A) == "native"
    assert scan.chosen_backend(u, torch.zeros(3, cpu.MOST_STATES + 1)) == "torch"
    assert scan.chosen_backend(u.to("meta"), A) == "torch"


@built
def test_native_kernel_refuses_more_states_than_it_can_hold():
    inputs = random_inputs(b=1, d=2, l=3, n=cpu.MOST_STATES + 1)
    with pytest.raises(UserError, match="use backend='torch'"):
        selective_scan(**inputs, backend="native")
    assert_close(selective_scan(**inputs), selective_scan(**inputs, backend="reference"), 1e-12)


def test_missing_kernel_leaves_the_torch_backend(monkeypatch):
    monkeypatch.setattr(cpu, "library", lambda: None)
    inputs = random_inputs(b=1, d=2, l=3, n=2)
    assert [name for name in available_backends() if name != "triton"] == ["auto", "reference", "torch"]
    assert_close(selective_scan(**inputs), selective_scan(**inputs, backend="reference"), 1e-12)
    with pytest.raises(UserError, match="reinstall mambacl with a C\\+\\+ compiler on the PATH"):
        selective_scan(**inputs, backend="native")


def test_environment_variable_decides_where_the_caller_does_not(monkeypatch):
    u, A = torch.zeros(1, 2, 3), torch.zeros(3, 4)
    monkeypatch.setenv("MAMBACL_SCAN", "reference")
    assert scan.chosen_backend(u, A) == "reference"
    assert scan.chosen_backend(u, A, "torch") == "torch"
    monkeypatch.setenv("MAMBACL_SCAN", "cuda-magic")
    with pytest.raises(UserError, match="no scan backend 'cuda-magic'"):
        selective_scan(**random_inputs(b=1, d=2, l=3, n=2))


def test_unknown_backend_is_named_with_the_known_ones():
    with pytest.raises(UserError, match="no scan backend 'nativ'; choose one of auto, reference, torch"):
        selective_scan(**random_inputs(b=1, d=2, l=3, n=2), backend="nativ")


@pytest.mark.parametrize(
    "change, named",
    [
        ({"u": (4, 5)}, "u"),
        ({"u": (2, 4, 0)}, "at least one"),
        ({"u": (0, 4, 5)}, "at least one"),
        ({"delta": (2, 4, 6)}, "delta"),
        ({"A": (4,)}, "A"),
        ({"A": (3, 3)}, "A"),
        ({"B": (2, 3, 6)}, "B"),
        ({"B": (2, 3, 3, 5)}, "g a divisor of d"),
        ({"B": (3,)}, "B"),
        ({"C": (3, 4)}, "C"),
        ({"C": (2, 1, 2, 3, 5)}, "C"),
        ({"D": (5,)}, "D"),
        ({"z": (2, 4, 4)}, "z"),
        ({"delta_bias": (3,)}, "delta_bias"),
    ],
    ids=str,
)
def test_wrong_shapes_are_named(change, named):
    inputs = random_inputs(b=2, d=4, l=5, n=3)
    inputs |= {name: torch.zeros(shape) for name, shape in change.items()}
    with pytest.raises(UserError, match=named):
        selective_scan(**inputs)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.slow
def test_operator_is_registered_as_pytorch_wants_it(backend):
    torch.manual_seed(0)
    u, delta = torch.randn(2, 5, 4, requires_grad=True), torch.rand(2, 5, 4, requires_grad=True)
    A = -torch.rand(4, 3)
    A.requires_grad_()
    B, C = (torch.randn(2, 5, 2, 3, requires_grad=True) for _ in range(2))
    options = (None, None, None, None, False, False, "forward", 1, torch.float32, backend, True)
    result = torch.library.opcheck(torch.ops.mambacl.scan.default, (u, delta, A, B, C, *options))
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("backend", FAST)
def test_compiles_as_one_graph(backend):
    inputs = random_inputs(b=1, d=4, l=6, n=3, dtype=torch.float32)

    def scan(**tensors: Tensor) -> Tensor:
        return selective_scan(**tensors, delta_softplus=True, backend=backend)

    compiled = torch.compile(scan, backend="aot_eager", fullgraph=True)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}
    y = compiled(**leaves)
    y.sum().backward()
    again = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}
    plain = scan(**again)
    plain.sum().backward()
    assert_close(y, plain, 6e-6)
    for name in inputs:
        assert_close(leaves[name].grad, again[name].grad, 1e-5, name)


def test_shapes_come_out_on_the_meta_device():
    inputs = {name: tensor.to("meta") for name, tensor in random_inputs(b=2, d=4, l=5, n=3).items()}
    y, last = selective_scan(**inputs, return_last_state=True)
    assert y.shape == (2, 4, 5) and last.shape == (2, 4, 3) and y.is_meta


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_backend_agrees_with_the_reference_on_cuda(shape):
    inputs = random_inputs(**SHAPES[shape])
    expected = run(inputs, "reference")
    on_device = {name: tensor.cuda() for name, tensor in inputs.items()}
    y, last = selective_scan(**on_device, delta_softplus=True, return_last_state=True)
    assert_close(y.cpu(), expected["out"], 1e-11)
    assert_close(last.cpu(), expected["last"], 1e-11)


@pytest.mark.parametrize("backend", [name for name in available_backends() if name not in ("auto", "triton")])
def test_autocast_does_not_lower_the_precision(backend):
    torch.manual_seed(0)
    inputs = [
        torch.randn(2, 6, 11),
        torch.rand(2, 6, 11),
        -torch.rand(6, 4),
        torch.randn(2, 4, 11),
        torch.randn(2, 4, 11),
    ]
    plain, under_autocast = ([tensor.clone().requires_grad_() for tensor in inputs] for _ in range(2))
    y = selective_scan(*plain, backend=backend)
    y.sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        z = selective_scan(*under_autocast, backend=backend)
        z.sum().backward()
    torch.testing.assert_close(z, y, rtol=0, atol=6e-6)
    for a, b in zip(plain, under_autocast, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-5)
