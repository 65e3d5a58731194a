"""The fused kernels against their plain twins, gradients included; the plain twins against the formulas.

Without a CUDA device the kernels run in Triton's interpreter, on the CPU.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels_help import DEVICE, kernels, poisoned
from ops_help import TOLERANCES, compare, differentiated, half, normal, normalized
from tolerance import assert_near
from torch import Tensor

from mambacl import ops
from mambacl.backbones.layers import RMSNorm
from mambacl.ops import conv, gate, norm, rotary
from mambacl.ops.conv import causal_conv_silu_plain as plain_convolution


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
    found = conv.causal_conv_silu_plain(x, weight, bias, reverse=reverse, same=same)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("taps", [1, 2, 3, 4, 8])
def test_small_convolutions_are_the_plain_one(
    taps: int, reverse: bool, same: bool, silu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU they are sums over taps; gradients included."""
    options: dict[str, Any] = {"reverse": reverse, "same": same, "silu": silu}
    monkeypatch.setattr(conv, "causal_conv_silu_plain", None)  # must not be called
    for tensors in ([normal(2, 9, 5), normal(5, taps), normal(5)], [normal(2, 9, 5).mT, normal(9, taps)]):
        inputs = [tensor.cpu() for tensor in tensors]
        found = differentiated(partial(ops.causal_conv_silu, **options), inputs)
        wanted = differentiated(partial(plain_convolution, **options), inputs)
        assert found[0].is_contiguous()
        for ours, theirs in zip(found, wanted, strict=True):
            assert_near(ours, theirs, 2 * 9 * taps, size=max(1.0, theirs.abs().max().item()))


def test_large_and_mixed_convolutions_are_not_summed_by_taps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv, "_by_taps", None)
    large = torch.zeros(2, conv.SMALL // 8 + 1, 4)
    for x, weight in ((large, torch.ones(4, 3)), (torch.zeros(1, 2, 4), torch.ones(4, 3, dtype=torch.float64))):
        assert ops.causal_conv_silu(x, weight).shape == x.shape
    assert ops.causal_conv_silu(torch.zeros(1, 2, 4, dtype=torch.bfloat16), torch.ones(4, 3)).dtype == torch.bfloat16


@kernels
@pytest.mark.parametrize("length", [1, 2, 37])
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("taps", [2, 4, 7, 8])
def test_convolution(taps: int, reverse: bool, same: bool, length: int) -> None:
    options = {"reverse": reverse, "same": same}
    inputs = [half(2, length, 70), normal(70, taps), normal(70)]
    compare(
        partial(ops.causal_conv_silu, **options),
        partial(conv.causal_conv_silu_plain, **options),
        inputs,
        tolerance=1e-12,
    )


@kernels
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("options", [{}, {"silu": False}, {"reverse": True, "same": True}])
def test_convolution_in_every_type(dtype: torch.dtype, options: dict[str, bool]) -> None:
    inputs = [half(2, 21, 40, dtype=dtype), normal(40, 3, dtype=torch.float32), normal(40, dtype=dtype)]
    function, twin = partial(ops.causal_conv_silu, **options), partial(conv.causal_conv_silu_plain, **options)
    compare(function, twin, inputs, max(1e-6, TOLERANCES[dtype]))  # the weight's gradient is float32


@kernels
def test_convolution_without_bias() -> None:
    compare(ops.causal_conv_silu, conv.causal_conv_silu_plain, [half(1, 90, 200), normal(200, 4)], 1e-12)


@kernels
@pytest.mark.parametrize(
    "cut", [lambda x: x[::2, 1::3, 4:44], lambda x: x.transpose(0, 1)[:3, :, 40:], lambda x: x.mT[:2]]
)
def test_any_strides(cut: Callable[[Tensor], Tensor]) -> None:
    x = cut(normal(6, 41, 80))
    weight, D = normal(x.shape[2], 4), normal(x.shape[2])
    compare(ops.causal_conv_silu, conv.causal_conv_silu_plain, [x, weight], 1e-12)
    compare(
        ops.skip_gate,
        partial(gate.gated_group_norm_plain, group=0, eps=0.0),
        [normal(*x.shape), x, D, cut(normal(6, 41, 80))],
        1e-12,
    )
    compare(partial(ops.rms_norm, eps=1e-5), partial(norm.rms_norm_plain, eps=1e-5), [x, D], 1e-12)


@kernels
def test_halves_of_a_projection_are_not_copied() -> None:
    launch = importlib.import_module("mambacl.ops.kernels.launch")
    z = half(2, 5, 16)
    assert launch.unit_stride(z).data_ptr() == z.data_ptr() == launch.as_rows(z).data_ptr()


@pytest.mark.parametrize("group", [0, 4])
def test_the_plain_gate_is_the_mixers(group: int) -> None:
    y, x, D, z = normal(2, 3, 8), normal(2, 3, 8), normal(8), half(2, 3, 8)
    n = normalized(y.unflatten(-1, (-1, group))).flatten(-2) if group else y
    wanted = torch.addcmul(n, D, x) * F.silu(z)
    torch.testing.assert_close(gate.gated_group_norm_plain(y, x, D, z, group, 1e-6), wanted, rtol=0, atol=0)
    if not group:
        torch.testing.assert_close(
            partial(gate.gated_group_norm_plain, group=0, eps=0.0)(y, x, D, z), wanted, rtol=0, atol=0
        )


@kernels
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_halves_of_a_linear_layer(bias: bool, frozen: bool) -> None:
    linear, tokens = torch.nn.Linear(6, 10, bias=bias).to(DEVICE, torch.float64), normal(2, 3, 6).requires_grad_()
    linear.requires_grad_(not frozen)
    weights = normal(2, 3, 5), normal(2, 3, 5)
    found = []
    for first, second in (ops.split_linear(linear, tokens, "triton"), linear(tokens).chunk(2, dim=-1)):
        inputs = [tokens, *([] if frozen else linear.parameters())]
        gradients = torch.autograd.grad((first * weights[0]).sum() + (second * weights[1]).sum(), inputs)
        found.append([first, second, *gradients])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@kernels
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_a_layer_with_a_hook_is_called(kind: str) -> None:
    linear, seen = torch.nn.Linear(4, 4).to(DEVICE), []
    getattr(linear, f"register_{kind}_hook")(lambda *_: seen.append(1))
    first, second = ops.split_linear(linear, torch.randn(1, 2, 4, device=DEVICE, requires_grad=True), "triton")
    (first + second).sum().backward()
    assert seen == [1]


@kernels
def test_a_layer_is_called_that_somebody_changed_from_outside() -> None:
    linear, seen, tokens = torch.nn.Linear(4, 4).to(DEVICE), [], torch.randn(1, 2, 4, device=DEVICE)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))  # of every module
    try:
        ops.split_linear(linear, tokens, "triton")
    finally:
        handle.remove()
    linear.forward = lambda given: seen.append(2) or given
    first, second = ops.split_linear(linear, tokens, "triton")
    assert seen == [1, 2] and torch.equal(torch.cat((first, second), -1), tokens)


@kernels
def test_a_second_derivative_is_refused() -> None:
    """It would have to go through a backward kernel, which has no derivative."""
    x, weight = normal(1, 3, 4).float().requires_grad_(), normal(4, 2).float()
    y = ops.causal_conv_silu(x, weight, backend="triton")
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.square().sum().backward()


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_the_plain_rotation_is_that_of_its_formula(scale: float) -> None:
    M, freq = normal(2, 5, 2, 6), normal(6)
    found = rotary.rotate_plain(M, freq, scale)
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
        found = ops.rotate(leaf, freq, 2.0, backend="triton")
        assert torch.equal(found, ops.rotate(M, freq, 2.0, backend="triton"))  # whatever its strides
        found.backward(torch.linspace(-1, 1, found.numel(), device=DEVICE).view_as(found))
    wanted = rotary.rotate_plain(exact, freq.double(), 2.0)
    wanted.backward(torch.linspace(-1, 1, found.numel(), dtype=torch.float64, device=DEVICE).view_as(found))
    assert found.dtype == torch.float32 and leaf.grad is not None and leaf.grad.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=tolerance, atol=tolerance)


@kernels
def test_frequencies_that_train_get_their_gradient() -> None:
    M, freq = normal(1, 3, 1, 4, dtype=torch.float32), normal(4, dtype=torch.float32).requires_grad_()
    ops.rotate(M, freq, backend="triton").sum().backward()
    assert freq.grad is not None and freq.grad.abs().max() > 0


@kernels
@pytest.mark.parametrize(("width", "group"), [(96, 0), (300, 0), (96, 16), (96, 12), (128, 64), (130, 130), (5, 1)])
@pytest.mark.parametrize("rows", [(1, 1), (3, 37)])
def test_gate(width: int, group: int, rows: tuple[int, int]) -> None:
    inputs = [normal(*rows, width), normal(*rows, width), normal(width), half(*rows, width)]
    function, twin = (partial(f, group=group, eps=1e-6) for f in (ops.gated_group_norm, gate.gated_group_norm_plain))
    compare(function, twin, inputs, 1e-11)


@kernels
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("group", [0, 16])
def test_gate_in_every_type(dtype: torch.dtype, group: int) -> None:
    y = normal(2, 9, 48, dtype=torch.promote_types(dtype, torch.float32))
    inputs = [y, normal(2, 9, 48, dtype=dtype), normal(48, dtype=torch.float32), half(2, 9, 48, dtype=dtype)]
    options = {"group": group, "eps": 1e-6}
    twin = partial(gate.gated_group_norm_plain, **options)
    tolerance = max(2e-6, TOLERANCES[dtype])  # D is float32
    compare(partial(ops.gated_group_norm, **options, dtype=dtype), twin, inputs, tolerance)
    assert ops.gated_group_norm(*inputs, **options, backend="triton").dtype == y.dtype


@kernels
@pytest.mark.parametrize("shape", [(1,), (33,), (3, 5, 192), (70, 7), (2, 1030), (2, 4096)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    function, twin = partial(ops.rms_norm, eps=1e-5), partial(norm.rms_norm_plain, eps=1e-5)
    compare(function, twin, [normal(*shape), normal(shape[-1])], 1e-11)


@kernels
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_has_the_layers_arithmetic(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x, layer = normal(4, 9, 100, dtype=dtype), RMSNorm(100, 1e-5).to(DEVICE)
    layer.weight = torch.nn.Parameter(normal(100, dtype=weight_dtype))
    wanted = layer.weight * normalized(x if dtype == torch.float64 else x.float(), 1e-5).to(dtype)
    torch.testing.assert_close(layer(x), ops.rms_norm(x, layer.weight, 1e-5), rtol=0, atol=0)
    torch.testing.assert_close(norm.rms_norm_plain(x, layer.weight, 1e-5), wanted, rtol=0, atol=0)
    found = ops.rms_norm(x, layer.weight, 1e-5, backend="triton")
    assert found.dtype == wanted.dtype
    if dtype == torch.float16 or (dtype == torch.bfloat16 and DEVICE == "cuda"):  # the interpreter truncates to it
        assert (found == wanted).double().mean() > 0.9  # else the last bit, where sums are taken in another order
    assert ops.rms_norm(x, layer.weight, 1e-5, torch.float16, backend="triton").dtype == torch.float16
    inputs = [x, layer.weight.detach()]
    tolerance = max(TOLERANCES[dtype], TOLERANCES[weight_dtype])
    compare(partial(ops.rms_norm, eps=1e-5), partial(norm.rms_norm_plain, eps=1e-5), inputs, tolerance)
