"""The fused kernels against their plain twins, gradients included; the plain twins against the formulas.

Without a CUDA device the kernels run in Triton's interpreter, on the CPU.
"""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from mambacl import fused
from mambacl.backbones.layers import RMSNorm
from mambacl.errors import UserError
from mambacl.fused import plain, switch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def kernels_run() -> bool:
    """Whether Triton is there and, without a GPU, its interpreter is active."""
    try:
        triton = importlib.import_module("triton")
    except ImportError:
        return False
    return DEVICE == "cuda" or not isinstance(triton.language.zeros, triton.runtime.JITFunction)


kernels = pytest.mark.skipif(not kernels_run(), reason="there is neither a CUDA device nor Triton's interpreter")
gpu = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="there is no CUDA device")]


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(DEVICE, dtype)


def half(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The second half of the channels of a tensor twice as wide, as in_proj's output is cut."""
    return normal(*shape[:-1], 2 * shape[-1], dtype=dtype).chunk(2, dim=-1)[1]


def normalized(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@contextmanager
def poisoned() -> Iterator[None]:
    """Within it, new memory is full of NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3, device=DEVICE).isnan().all()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def differentiated(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The output and the gradient of every input, for an output gradient that depends only on the shape."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    y = function(*leaves)
    slope = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).reshape(y.shape).to(y)
    return [y.detach(), *torch.autograd.grad(y, leaves, slope)]


def compare(
    function: Callable[..., Tensor], twin: Callable[..., Tensor], inputs: list[Tensor], tolerance: float
) -> None:
    """The kernel in the inputs' types, its memory poisoned, against the twin in float64."""
    with poisoned():
        found = differentiated(partial(function, backend="triton"), inputs)
    wanted = differentiated(twin, [tensor.double() for tensor in inputs])
    for tensor, like in zip(found[1:], inputs, strict=True):
        assert tensor.dtype == like.dtype and tensor.shape == like.shape
    for ours, theirs in zip(found, wanted, strict=True):
        scale = max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(ours.double(), theirs, atol=tolerance * scale, rtol=0)


TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("taps", [1, 2, 3, 4, 7, 8])
def test_the_plain_convolution_is_torchs(taps: int, reverse: bool, same: bool) -> None:
    x, weight, bias = normal(2, 9, 5), normal(5, taps), normal(5)
    channels = (x.flip(1) if reverse else x).mT
    padded = channels if same else F.pad(channels, (taps - 1, 0))
    wanted = F.conv1d(padded, weight[:, None], bias, groups=5, padding="same" if same else 0).mT
    wanted = F.silu(wanted.flip(1) if reverse else wanted)
    found = plain.causal_conv_silu(x, weight, bias, reverse=reverse, same=same)
    torch.testing.assert_close(found, wanted)


@kernels
@pytest.mark.parametrize("length", [1, 2, 37])
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("taps", [2, 4, 7, 8])
def test_convolution(taps: int, reverse: bool, same: bool, length: int) -> None:
    options = {"reverse": reverse, "same": same}
    inputs = [half(2, length, 70), normal(70, taps), normal(70)]
    compare(
        partial(fused.causal_conv_silu, **options), partial(plain.causal_conv_silu, **options), inputs, tolerance=1e-12
    )


@kernels
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("options", [{}, {"silu": False}, {"reverse": True, "same": True}])
def test_convolution_in_every_type(dtype: torch.dtype, options: dict[str, bool]) -> None:
    inputs = [half(2, 21, 40, dtype=dtype), normal(40, 3, dtype=torch.float32), normal(40, dtype=dtype)]
    function, twin = partial(fused.causal_conv_silu, **options), partial(plain.causal_conv_silu, **options)
    compare(function, twin, inputs, max(1e-6, TOLERANCES[dtype]))  # the weight's gradient is float32


@kernels
def test_convolution_without_bias() -> None:
    compare(fused.causal_conv_silu, plain.causal_conv_silu, [half(1, 90, 200), normal(200, 4)], 1e-12)


@kernels
@pytest.mark.parametrize(
    "cut", [lambda x: x[::2, 1::3, 4:44], lambda x: x.transpose(0, 1)[:3, :, 40:], lambda x: x.mT[:2]]
)
def test_any_strides(cut: Callable[[Tensor], Tensor]) -> None:
    x = cut(normal(6, 41, 80))
    weight, D = normal(x.shape[2], 4), normal(x.shape[2])
    compare(fused.causal_conv_silu, plain.causal_conv_silu, [x, weight], 1e-12)
    compare(fused.skip_gate, plain.skip_gate, [normal(*x.shape), x, D, cut(normal(6, 41, 80))], 1e-12)
    compare(partial(fused.rms_norm, eps=1e-5), partial(plain.rms_norm, eps=1e-5), [x, D], 1e-12)


@kernels
def test_halves_of_a_projection_are_not_copied() -> None:
    launch = importlib.import_module("mambacl.fused.launch")
    z = half(2, 5, 16)
    assert launch.unit_stride(z).data_ptr() == z.data_ptr() == launch.as_rows(z).data_ptr()


@pytest.mark.parametrize("group", [0, 4])
def test_the_plain_gate_is_the_mixers(group: int) -> None:
    y, x, D, z = normal(2, 3, 8), normal(2, 3, 8), normal(8), half(2, 3, 8)
    n = normalized(y.unflatten(-1, (-1, group))).flatten(-2) if group else y
    wanted = torch.addcmul(n, D, x) * F.silu(z)
    torch.testing.assert_close(plain.gated_group_norm(y, x, D, z, group, 1e-6), wanted, rtol=0, atol=0)
    if not group:
        torch.testing.assert_close(plain.skip_gate(y, x, D, z), wanted, rtol=0, atol=0)


@kernels
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_halves_of_a_linear_layer(bias: bool, frozen: bool) -> None:
    linear, tokens = torch.nn.Linear(6, 10, bias=bias).to(DEVICE, torch.float64), normal(2, 3, 6).requires_grad_()
    linear.requires_grad_(not frozen)
    weights = normal(2, 3, 5), normal(2, 3, 5)
    found = []
    for first, second in (fused.halves(linear, tokens, "triton"), linear(tokens).chunk(2, dim=-1)):
        inputs = [tokens, *([] if frozen else linear.parameters())]
        gradients = torch.autograd.grad((first * weights[0]).sum() + (second * weights[1]).sum(), inputs)
        found.append([first, second, *gradients])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_layer_with_a_hook_is_called() -> None:
    linear, seen = torch.nn.Linear(4, 4).to(DEVICE), []
    linear.register_forward_hook(lambda *_: seen.append(1))
    fused.halves(linear, torch.randn(1, 2, 4, device=DEVICE))
    assert seen == [1]


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_the_plain_rotation_is_that_of_its_formula(scale: float) -> None:
    M, freq = normal(2, 5, 2, 6), normal(6)
    found = plain.rotate(M, freq, scale)
    for t in range(5):
        for k in range(6):
            angle, twin = t * freq[k] / scale, M[:, t, :, k ^ 1]
            wanted = M[:, t, :, k] * angle.cos() + (-1 if k % 2 == 0 else 1) * twin * angle.sin()
            torch.testing.assert_close(found[:, t, :, k], wanted)


@kernels
@pytest.mark.parametrize("states", [2, 6, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation(states: int, dtype: torch.dtype) -> None:
    wide = normal(3, 7, 2 * states + 5, dtype=dtype)
    M, freq = wide[..., 5:].unflatten(-1, (2, states)), normal(states, dtype=torch.float32)
    leaf, exact = M.clone().requires_grad_(), M.double().requires_grad_()
    with poisoned():
        found = fused.rotate(leaf, freq, 2.0, backend="triton")
        assert torch.equal(found, fused.rotate(M, freq, 2.0, backend="triton"))  # whatever its strides
        found.backward(torch.linspace(-1, 1, found.numel(), device=DEVICE).view_as(found))
    wanted = plain.rotate(exact, freq.double(), 2.0)
    wanted.backward(torch.linspace(-1, 1, found.numel(), dtype=torch.float64, device=DEVICE).view_as(found))
    assert found.dtype == torch.float32 and leaf.grad is not None and leaf.grad.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=tolerance, atol=tolerance)


@kernels
def test_frequencies_that_train_get_their_gradient() -> None:
    M, freq = normal(1, 3, 1, 4, dtype=torch.float32), normal(4, dtype=torch.float32).requires_grad_()
    fused.rotate(M, freq, backend="triton").sum().backward()
    assert freq.grad is not None and freq.grad.abs().max() > 0


@kernels
@pytest.mark.parametrize(("width", "group"), [(96, 0), (300, 0), (96, 16), (96, 12), (128, 64), (130, 130), (5, 1)])
@pytest.mark.parametrize("rows", [(1, 1), (3, 37)])
def test_gate(width: int, group: int, rows: tuple[int, int]) -> None:
    inputs = [normal(*rows, width), normal(*rows, width), normal(width), half(*rows, width)]
    function, twin = (partial(f, group=group, eps=1e-6) for f in (fused.gated_group_norm, plain.gated_group_norm))
    compare(function, twin, inputs, 1e-11)


@kernels
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("group", [0, 16])
def test_gate_in_every_type(dtype: torch.dtype, group: int) -> None:
    y = normal(2, 9, 48, dtype=torch.promote_types(dtype, torch.float32))
    inputs = [y, normal(2, 9, 48, dtype=dtype), normal(48, dtype=torch.float32), half(2, 9, 48, dtype=dtype)]
    options = {"group": group, "eps": 1e-6}
    twin = partial(plain.gated_group_norm, **options)
    tolerance = max(2e-6, TOLERANCES[dtype])  # D is float32
    compare(partial(fused.gated_group_norm, **options, dtype=dtype), twin, inputs, tolerance)
    assert fused.gated_group_norm(*inputs, **options, backend="triton").dtype == y.dtype


@kernels
@pytest.mark.parametrize("shape", [(1,), (33,), (3, 5, 192), (70, 7), (2, 1030), (2, 4096)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    function, twin = partial(fused.rms_norm, eps=1e-5), partial(plain.rms_norm, eps=1e-5)
    compare(function, twin, [normal(*shape), normal(shape[-1])], 1e-11)


@kernels
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_has_the_layers_arithmetic(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x, layer = normal(4, 9, 100, dtype=dtype), RMSNorm(100, 1e-5).to(DEVICE)
    layer.weight = torch.nn.Parameter(normal(100, dtype=weight_dtype))
    wanted = layer.weight * normalized(x if dtype == torch.float64 else x.float(), 1e-5).to(dtype)
    torch.testing.assert_close(layer(x), fused.rms_norm(x, layer.weight, 1e-5), rtol=0, atol=0)
    torch.testing.assert_close(plain.rms_norm(x, layer.weight, 1e-5), wanted, rtol=0, atol=0)
    found = fused.rms_norm(x, layer.weight, 1e-5, backend="triton")
    assert found.dtype == wanted.dtype
    if dtype == torch.float16 or (dtype == torch.bfloat16 and DEVICE == "cuda"):  # the interpreter truncates to it
        assert (found == wanted).double().mean() > 0.9  # else the last bit, where sums are taken in another order
    assert fused.rms_norm(x, layer.weight, 1e-5, torch.float16, backend="triton").dtype == torch.float16
    inputs = [x, layer.weight.detach()]
    tolerance = max(TOLERANCES[dtype], TOLERANCES[weight_dtype])
    compare(partial(fused.rms_norm, eps=1e-5), partial(plain.rms_norm, eps=1e-5), inputs, tolerance)


@kernels
def test_programs_that_walk_through_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("mambacl.fused.launch"), "MOST_PARTIALS", 2)
    norms = partial(fused.rms_norm, eps=1e-5), partial(plain.rms_norm, eps=1e-5)
    compare(*norms, [normal(37, 192), normal(192)], 1e-11)  # 10 tiles, up to 8 a program
    for group in (0, 64):
        gates = (partial(f, group=group, eps=1e-6) for f in (fused.gated_group_norm, plain.gated_group_norm))
        compare(*gates, [normal(2, 39, 64), normal(2, 39, 64), normal(64), half(2, 39, 64)], 1e-11)


@kernels
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_stay_where_they_are(value: float) -> None:
    def same_places(function: Callable[..., Tensor], twin: Callable[..., Tensor], inputs: list[Tensor]) -> None:
        for i in range(len(inputs)):
            bad = [tensor.clone() for tensor in inputs]
            bad[i].view(-1)[bad[i].numel() // 2] = value
            if (
                i == 1 and inputs[1].dim() == 2
            ):  # an infinite tap: torch's convolutions differ in what the padding gives
                continue
            found, wanted = differentiated(partial(function, backend="triton"), bad), differentiated(twin, bad)
            for ours, theirs in zip(found, wanted, strict=True):
                torch.testing.assert_close(ours, theirs, equal_nan=True)

    for options in ({}, {"reverse": True}, {"same": True}):
        inputs = [normal(1, 41, 3), normal(3, 4), normal(3)]
        same_places(partial(fused.causal_conv_silu, **options), partial(plain.causal_conv_silu, **options), inputs)
    last = normal(1, 34, 3)
    last[:, -1] = value
    same_places(fused.causal_conv_silu, plain.causal_conv_silu, [last, normal(3, 4)])
    for group in (0, 4):
        inputs = [normal(2, 3, 8), normal(2, 3, 8), normal(8), normal(2, 3, 8)]
        options = {"group": group, "eps": 1e-6}
        same_places(partial(fused.gated_group_norm, **options), partial(plain.gated_group_norm, **options), inputs)
    norms = partial(fused.rms_norm, eps=1e-5), partial(plain.rms_norm, eps=1e-5)
    same_places(*norms, [normal(3, 5), normal(5)])


@kernels
@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
def test_tokens_that_do_not_exist_have_no_gradient() -> None:
    x, weight = normal(1, 9, 3), normal(3, 4)
    x[:, -1], weight[:, 2] = 1e300, 1e10  # the convolution overflows, but only after the end
    function = partial(fused.causal_conv_silu, backend="triton")
    found, wanted = differentiated(function, [x, weight]), differentiated(plain.causal_conv_silu, [x, weight])
    for ours, theirs in zip(found, wanted, strict=True):
        assert theirs.isfinite().all()
        torch.testing.assert_close(ours, theirs)


@kernels
def test_frozen_parameters_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[int] = []
    empty = torch.empty
    x, weight, bias, y, z = half(2, 9, 16), normal(16, 4), normal(16), normal(2, 9, 16), half(2, 9, 16)
    for tensor in (x, y, z):
        tensor.requires_grad_()

    def spy(*args: object, **kwargs: object) -> Tensor:
        allocated.append(empty(*args, **kwargs).numel())
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", spy)
    fused.causal_conv_silu(x, weight, bias, backend="triton").sum().backward()
    assert allocated == [288, 288, 0, 0]  # output, dx, nothing for weight and bias
    allocated.clear()
    fused.gated_group_norm(y, x, bias, z, 4, 1e-6, backend="triton").sum().backward()
    assert allocated == [288, 288, 288, 288, 0]
    allocated.clear()
    fused.rms_norm(x, bias, 1e-5, backend="triton").sum().backward()
    assert allocated == [288, 288, 0]
    assert weight.grad is None and bias.grad is None


@kernels
def test_a_frozen_weight_beside_a_trained_bias() -> None:
    x, weight = half(2, 9, 16), normal(16, 4)
    compare(
        lambda x, b, **o: fused.causal_conv_silu(x, weight, b, **o),
        lambda x, b: plain.causal_conv_silu(x, weight, b),
        [x, normal(16)],
        1e-12,
    )


@kernels
def test_the_same_bits_each_time() -> None:
    inputs = [normal(2, 40, 40, dtype=torch.float32), normal(40, 4), normal(40)]
    first, second = (differentiated(partial(fused.causal_conv_silu, backend="triton"), inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def calls(dtype: torch.dtype = torch.float32) -> list[tuple[Callable[..., Tensor], list[Tensor]]]:
    """One call of each function, and its inputs."""
    x, y, z, vector = (
        half(2, 9, 16, dtype=dtype),
        normal(2, 9, 16, dtype=dtype),
        half(2, 9, 16, dtype=dtype),
        normal(16),
    )
    return [
        (fused.causal_conv_silu, [x, normal(16, 4, dtype=dtype), vector.to(dtype)]),
        (partial(fused.gated_group_norm, group=4, eps=1e-6), [y, x, vector.to(dtype), z]),
        (fused.skip_gate, [y, x, vector.to(dtype), z]),
        (partial(fused.rms_norm, eps=1e-5), [x, vector.to(dtype)]),
    ]


@kernels
@pytest.mark.parametrize("frozen", [False, True])
def test_operators_are_registered_rightly(frozen: bool) -> None:
    x, y, z, vector = half(2, 9, 16), normal(2, 9, 16), half(2, 9, 16), normal(16)
    weight = normal(16, 4).requires_grad_(not frozen)
    vector.requires_grad_(not frozen)
    for tensor in (x, y, z):
        tensor.requires_grad_()
    ops = torch.ops.mambacl
    torch.library.opcheck(ops.causal_conv.default, (x, weight, vector, False, True, False))
    torch.library.opcheck(ops.causal_conv.default, (x, weight, None, True, True, True))
    torch.library.opcheck(ops.gated_group_norm.default, (y, x, vector, z, 4, 1e-6, torch.float32))
    torch.library.opcheck(ops.rms_norm.default, (x, vector, 1e-6, torch.float32))


@kernels
@pytest.mark.parametrize("index", range(4))
def test_torch_compile_takes_it_whole(index: int) -> None:
    function, inputs = calls(torch.float64)[index]
    function = partial(function, backend="triton")
    compiled = torch.compile(lambda *args: function(*args) * 2, fullgraph=True, backend="aot_eager")
    found = differentiated(compiled, inputs)
    for ours, theirs in zip(found, differentiated(lambda *a: function(*a) * 2, inputs), strict=True):
        torch.testing.assert_close(ours, theirs)


@kernels
def test_an_empty_batch() -> None:
    for function, inputs in calls():
        empty = [tensor[:0] if tensor.dim() == 3 else tensor for tensor in inputs]
        y, *gradients = differentiated(partial(function, backend="triton"), empty)
        assert y.shape == (0, 9, 16)
        assert all(
            not gradient.any() and gradient.shape == t.shape for gradient, t in zip(gradients, empty, strict=True)
        )


@pytest.mark.parametrize("backend", ["plain", pytest.param("triton", marks=kernels)])
def test_autocast_changes_nothing(backend: str) -> None:
    for function, inputs in calls():
        wanted = function(*inputs, backend=backend)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            assert torch.equal(function(*inputs, backend=backend), wanted)


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(switch.ENVIRONMENT_VARIABLE, raising=False)
    assert switch.enabled()
    with switch.plain():
        assert not switch.enabled()
        with switch.plain():
            pass
        assert not switch.enabled()
        assert not switch.takes_kernel(normal(1), "auto")
    assert switch.enabled()
    monkeypatch.setenv(switch.ENVIRONMENT_VARIABLE, "1")
    assert not switch.enabled()


def test_without_triton_the_plain_twins_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    said: list[str] = []
    monkeypatch.setattr(switch, "_imports", None)
    monkeypatch.setattr(switch, "import_module", missing)
    monkeypatch.setattr(switch.logger, "info", lambda message, *_: said.append(message))
    assert not switch.available() and not switch.available()
    assert len(said) == 1
    for function, inputs in calls():
        assert torch.equal(function(*inputs), function(*inputs, backend="plain"))
        with pytest.raises(UserError, match="triton"):
            function(*inputs, backend="triton")


def test_importing_the_package_does_not_import_triton() -> None:
    code = """
import sys
sys.modules["triton"] = None  # from here on, importing it fails
import mambacl.fused, mambacl.fused.ops
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_mistakes_get_a_sentence() -> None:
    x, vector = normal(2, 3, 8), normal(8)
    mistakes = [
        lambda: fused.causal_conv_silu(x, normal(7, 4)),
        lambda: fused.causal_conv_silu(x, normal(8, 4), normal(7)),
        lambda: fused.gated_group_norm(x, x, vector, x[:, :2], 4, 1e-6),
        lambda: fused.gated_group_norm(x, x, vector, x, 3, 1e-6),
        lambda: fused.rms_norm(x, normal(7), 1e-5),
        lambda: fused.rms_norm(x, vector, 1e-5, backend="cuda"),
    ]
    for mistake in mistakes:
        with pytest.raises(UserError):
            mistake()


@pytest.mark.skipif(DEVICE == "cuda", reason="for machines without a GPU")
def test_the_kernels_want_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match="CUDA"):
        fused.rms_norm(normal(2, 8), normal(8), 1e-5, backend="triton")


class TestOnTheGpu:
    pytestmark = gpu

    def test_kernels_are_chosen(self) -> None:
        assert switch.takes_kernel(normal(1), "auto")
        with switch.plain():
            assert not switch.takes_kernel(normal(1), "auto")

    @pytest.mark.parametrize("index", range(4))
    def test_a_graph_captures_forward_and_backward(self, index: int) -> None:
        function, inputs = calls()[index]
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]

        def step() -> list[Tensor]:
            y = function(*leaves)
            return [y, *torch.autograd.grad(y.square().sum(), leaves)]

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        with torch.no_grad():
            for leaf in leaves:
                leaf.copy_(torch.randn_like(leaf))
        graph.replay()
        for ours, theirs in zip(captured, step(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)

    @pytest.mark.parametrize("index", range(4))
    def test_inductor_takes_it_whole(self, index: int) -> None:
        function, inputs = calls()[index]
        found = differentiated(torch.compile(lambda *args: function(*args) * 2, fullgraph=True), inputs)
        for ours, theirs in zip(found, differentiated(lambda *a: function(*a) * 2, inputs), strict=True):
            torch.testing.assert_close(ours, theirs)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(("batch", "length", "width"), [(4, 577, 2048), (8, 197, 768), (16, 65, 384)])
    def test_real_sizes(self, batch: int, length: int, width: int, dtype: torch.dtype) -> None:
        shape, tolerance = (batch, length, width), TOLERANCES[dtype]
        conv = [half(*shape, dtype=dtype), normal(width, 4, dtype=torch.float32), normal(width, dtype=torch.float32)]
        compare(fused.causal_conv_silu, plain.causal_conv_silu, conv, 2 * tolerance)
        gate = [normal(*shape, dtype=torch.float32), conv[0], conv[2], half(*shape, dtype=dtype)]
        options = {"group": 64, "eps": 1e-6}
        compare(partial(fused.gated_group_norm, **options), partial(plain.gated_group_norm, **options), gate, tolerance)
        norms = partial(fused.rms_norm, eps=1e-5), partial(plain.rms_norm, eps=1e-5)
        compare(*norms, [conv[0], conv[2]], 2 * tolerance)

    def test_more_than_two_to_the_31_elements(self) -> None:
        if torch.cuda.get_device_properties(0).total_memory < 70 * 2**30:
            pytest.skip("this takes a GPU with 80 GB")
        x = torch.zeros(3, 2**20, 1024, dtype=torch.bfloat16, device=DEVICE)  # 6 GiB
        tail = x[-1:, -100:]
        tail.copy_(torch.randn_like(tail))
        weight, D = normal(1024, 4, dtype=torch.float32), normal(1024, dtype=torch.float32)
        for function, args in (
            (fused.causal_conv_silu, (weight,)),
            (lambda x, D: fused.gated_group_norm(x, x, D, x, 64, 1e-6), (D,)),
            (partial(fused.rms_norm, eps=1e-5, dtype=torch.bfloat16), (D,)),
        ):
            with switch.plain():
                wanted = function(tail, *args)
            torch.testing.assert_close(function(x, *args)[-1:, -100:], wanted, rtol=0.02, atol=0.02)
            leaf = x.detach().requires_grad_()
            (found,) = torch.autograd.grad(function(leaf, *args)[-1:, -90:].float().sum(), leaf)
            leaf = tail.detach().requires_grad_()
            with switch.plain():
                (wanted,) = torch.autograd.grad(function(leaf, *args)[:, -90:].float().sum(), leaf)
            torch.testing.assert_close(found[-1:, -100:], wanted, rtol=0.02, atol=0.05)
