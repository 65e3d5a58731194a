"""What holds for every fused kernel: tiles, values that are not finite, frozen parameters, operators, the switch."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from kernels_help import DEVICE, captured, gpu, kernels
from ops_help import TOLERANCES, compare, differentiated, half, normal
from torch import Tensor

from mambacl import ops
from mambacl.errors import UserError
from mambacl.ops import conv, gate, norm, switch


@kernels
def test_programs_that_walk_through_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("mambacl.ops.kernels.launch"), "MOST_PARTIALS", 2)
    norms = partial(ops.rms_norm, eps=1e-5), partial(norm.rms_norm_plain, eps=1e-5)
    compare(*norms, [normal(37, 192), normal(192)], 1e-11)  # 10 tiles, up to 8 a program
    for group in (0, 64):
        gates = (partial(f, group=group, eps=1e-6) for f in (ops.gated_group_norm, gate.gated_group_norm_plain))
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
        same_places(partial(ops.causal_conv_silu, **options), partial(conv.causal_conv_silu_plain, **options), inputs)
    last = normal(1, 34, 3)
    last[:, -1] = value
    same_places(ops.causal_conv_silu, conv.causal_conv_silu_plain, [last, normal(3, 4)])
    for group in (0, 4):
        inputs = [normal(2, 3, 8), normal(2, 3, 8), normal(8), normal(2, 3, 8)]
        options = {"group": group, "eps": 1e-6}
        same_places(partial(ops.gated_group_norm, **options), partial(gate.gated_group_norm_plain, **options), inputs)
    norms = partial(ops.rms_norm, eps=1e-5), partial(norm.rms_norm_plain, eps=1e-5)
    same_places(*norms, [normal(3, 5), normal(5)])


@kernels
@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
def test_tokens_that_do_not_exist_have_no_gradient() -> None:
    x, weight = normal(1, 9, 3), normal(3, 4)
    x[:, -1], weight[:, 2] = 1e300, 1e10  # the convolution overflows, but only after the end
    function = partial(ops.causal_conv_silu, backend="triton")
    found, wanted = differentiated(function, [x, weight]), differentiated(conv.causal_conv_silu_plain, [x, weight])
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
    ops.causal_conv_silu(x, weight, bias, backend="triton").sum().backward()
    assert allocated == [288, 288, 0, 0]  # output, dx, nothing for weight and bias
    allocated.clear()
    ops.gated_group_norm(y, x, bias, z, 4, 1e-6, backend="triton").sum().backward()
    assert allocated == [288, 288, 288, 288, 0]
    allocated.clear()
    ops.rms_norm(x, bias, 1e-5, backend="triton").sum().backward()
    assert allocated == [288, 288, 0]
    assert weight.grad is None and bias.grad is None


@kernels
def test_a_frozen_weight_beside_a_trained_bias() -> None:
    x, weight = half(2, 9, 16), normal(16, 4)
    compare(
        lambda x, b, **o: ops.causal_conv_silu(x, weight, b, **o),
        lambda x, b: conv.causal_conv_silu_plain(x, weight, b),
        [x, normal(16)],
        1e-12,
    )


@kernels
def test_the_same_bits_each_time() -> None:
    inputs = [normal(2, 40, 40, dtype=torch.float32), normal(40, 4), normal(40)]
    first, second = (differentiated(partial(ops.causal_conv_silu, backend="triton"), inputs) for _ in range(2))
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
        (ops.causal_conv_silu, [x, normal(16, 4, dtype=dtype), vector.to(dtype)]),
        (partial(ops.gated_group_norm, group=4, eps=1e-6), [y, x, vector.to(dtype), z]),
        (ops.skip_gate, [y, x, vector.to(dtype), z]),
        (partial(ops.rms_norm, eps=1e-5), [x, vector.to(dtype)]),
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


def test_on_gpus_of_another_kind_the_plain_twins_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(switch, "_imports", None)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(switch.logger, "info", lambda message, *_: said.append(message))
    assert not switch.available() and not switch.available()
    assert len(said) == 1 and "AMD" in said[0]


def test_importing_the_package_does_not_import_triton() -> None:
    code = """
import sys
sys.modules["triton"] = None  # from here on, importing it fails
import mambacl.ops
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_mistakes_get_a_sentence() -> None:
    x, vector = normal(2, 3, 8), normal(8)
    mistakes = [
        lambda: ops.causal_conv_silu(x, normal(7, 4)),
        lambda: ops.causal_conv_silu(x, normal(8, 4), normal(7)),
        lambda: ops.gated_group_norm(x, x, vector, x[:, :2], 4, 1e-6),
        lambda: ops.gated_group_norm(x, x, vector, x, 3, 1e-6),
        lambda: ops.rms_norm(x, normal(7), 1e-5),
        lambda: ops.rms_norm(x, vector, 1e-5, backend="cuda"),
    ]
    for mistake in mistakes:
        with pytest.raises(UserError):
            mistake()


@pytest.mark.skipif(DEVICE == "cuda", reason="for machines without a GPU")
def test_the_kernels_want_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match="CUDA"):
        ops.rms_norm(normal(2, 8), normal(8), 1e-5, backend="triton")


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

        graph, made = captured(step)
        with torch.no_grad():
            for leaf in leaves:
                leaf.copy_(torch.randn_like(leaf))
        graph.replay()
        for ours, theirs in zip(made, step(), strict=True):
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
        x, bias = half(*shape, dtype=dtype), normal(width, dtype=torch.float32)
        taps = normal(width, 4, dtype=torch.float32)
        compare(ops.causal_conv_silu, conv.causal_conv_silu_plain, [x, taps, bias], 2 * tolerance)
        gated = [normal(*shape, dtype=torch.float32), x, bias, half(*shape, dtype=dtype)]
        options = {"group": 64, "eps": 1e-6}
        compare(
            partial(ops.gated_group_norm, **options), partial(gate.gated_group_norm_plain, **options), gated, tolerance
        )
        norms = partial(ops.rms_norm, eps=1e-5), partial(norm.rms_norm_plain, eps=1e-5)
        compare(*norms, [x, bias], 2 * tolerance)

    def test_more_than_two_to_the_31_elements(self) -> None:
        if torch.cuda.get_device_properties(0).total_memory < 70 * 2**30:
            pytest.skip("this takes a GPU with 80 GB")
        x = torch.zeros(3, 2**20, 1024, dtype=torch.bfloat16, device=DEVICE)  # 6 GiB
        tail = x[-1:, -100:]
        tail.copy_(torch.randn_like(tail))
        weight, D = normal(1024, 4, dtype=torch.float32), normal(1024, dtype=torch.float32)
        for function, args in (
            (ops.causal_conv_silu, (weight,)),
            (lambda x, D: ops.gated_group_norm(x, x, D, x, 64, 1e-6), (D,)),
            (partial(ops.rms_norm, eps=1e-5, dtype=torch.bfloat16), (D,)),
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
