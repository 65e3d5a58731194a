"""The kernel that projects a low-rank dt to all channels, and the scan that uses it."""

import pytest
import torch
import torch.nn.functional as F
from kernels_help import DEVICE, gpu, kernels, poisoned
from scan_help import TOLERANCE, assert_close, slope, tokens
from torch import Tensor, nn

from mambacl.backbones import create_model
from mambacl.errors import UserError
from mambacl.ops import scan_low_rank
from mambacl.ops.precision import float32_products


def layer(rank: int, width: int, bias: bool = True, seed: int = 3) -> nn.Linear:
    torch.manual_seed(seed)
    linear = nn.Linear(rank, width, bias=bias)
    with torch.no_grad():
        linear.weight.normal_()
    return linear.to(DEVICE)


def wanted_steps(dt: Tensor, linear: nn.Linear) -> Tensor:
    bias = None if linear.bias is None else linear.bias.double()
    return F.softplus(F.linear(dt.double(), linear.weight.double(), bias))


@kernels
@pytest.mark.parametrize("rows, rank, width", [((2, 5), 3, 6), ((1, 70), 16, 20), ((3, 1), 65, 130), ((1, 1), 1, 1)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_those_of_the_linear_layer(rows, rank, width, bias, dtype) -> None:
    from mambacl.ops.kernels.delta import delta_projection

    linear = layer(rank, width, bias)
    wide = torch.randn(*rows, rank + 7, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    dt = wide[..., :rank]  # rows of a wider matrix, as x_proj gives them
    with poisoned():
        steps = delta_projection(dt, linear.weight.detach(), None if linear.bias is None else linear.bias.detach())
    assert steps.dtype == torch.float32 and steps.is_contiguous()
    assert_close(steps, wanted_steps(dt, linear))


@kernels
def test_small_and_large_steps_keep_their_digits() -> None:
    from mambacl.ops.kernels.delta import delta_projection

    raw = torch.linspace(-80, 80, 4001, device=DEVICE)
    nothing, weight = torch.zeros(1, 1, 1, device=DEVICE), torch.ones(len(raw), 1, device=DEVICE)
    steps = delta_projection(nothing, weight, raw).flatten()  # by the bias: a product would have an error of its own
    expected = F.softplus(raw.double())
    assert ((steps - expected).abs() / expected).max() < 1e-6  # sixteen roundings


@kernels
def test_numbers_that_are_none_go_where_softplus_sends_them() -> None:
    from mambacl.ops.kernels.delta import delta_projection

    raw = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30, -1e30], device=DEVICE)
    steps = delta_projection(torch.ones(1, 1, 1, device=DEVICE), raw[:, None].contiguous(), None).flatten()
    zero = torch.zeros(5, device=DEVICE)
    from_bias = delta_projection(zero[None, :1, None], torch.ones(5, 1, device=DEVICE), raw).flatten()
    assert torch.equal(from_bias.nan_to_num(nan=-1.0), F.softplus(raw).nan_to_num(nan=-1.0))
    assert steps[0].isnan() and steps[3] == 1e30 and steps[4] == 0


def outcome(inputs: dict[str, Tensor], dt: Tensor, linear: nn.Linear, backend: str, dtype: torch.dtype) -> dict:
    """Output, last state and all gradients."""
    leaves = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in inputs.items() if name != "delta"}
    dt = dt.detach().to(dtype).requires_grad_()
    own = nn.Linear(*linear.weight.shape[::-1], bias=linear.bias is not None).to(DEVICE, dtype)
    own.load_state_dict(linear.state_dict())
    u, A, B, C = leaves.values()
    y, last = scan_low_rank(u, dt, own, (-A.detach()).log().requires_grad_(), B, C, backend)
    trained = {"u": u, "dt": dt, "B": B, "C": C, **dict(own.named_parameters())}
    gradients = torch.autograd.grad([y, last], list(trained.values()), [slope(y), slope(last, 1, -1)])
    return {"y": y.detach(), "last": last.detach(), **dict(zip(trained, gradients, strict=True))}


@kernels
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("length, n, groups", [(5, 3, 1), (19, 4, 2)])
def test_the_scan_and_all_gradients(length, n, groups, bias) -> None:
    inputs = tokens(b=2, l=length, d=6, n=n, groups=groups)
    linear = layer(4, 6, bias)
    dt = torch.randn(2, length, 4, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    with poisoned():
        ours = outcome(inputs, dt, linear, "triton", torch.float32)
    expected = outcome(inputs, dt, linear, "reference", torch.float64)
    assert set(ours) == set(expected)
    for name, tensor in expected.items():
        assert_close(ours[name], tensor, 2 * TOLERANCE, name)


@kernels
def test_frozen_weights_get_no_gradient() -> None:
    inputs, linear = tokens(b=1, l=4, d=6, n=3), layer(4, 6).requires_grad_(False)
    dt = torch.randn(1, 4, 4, device=DEVICE, requires_grad=True)
    A_log = (-inputs["A"]).log()
    y, _ = scan_low_rank(inputs["u"], dt, linear, A_log, inputs["B"], inputs["C"], "triton")
    y.sum().backward()
    assert dt.grad is not None and linear.weight.grad is None and linear.bias.grad is None


@kernels
def test_a_layer_with_a_hook_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, linear, seen = tokens(b=1, l=4, d=6, n=3), layer(4, 6), []
    dt = torch.randn(1, 4, 4, device=DEVICE)
    A_log = (-inputs["A"]).log()
    plain = scan_low_rank(inputs["u"], dt, linear, A_log, inputs["B"], inputs["C"], "triton")[0]
    linear.register_forward_hook(lambda module, given, output: seen.append(output.shape))
    hooked = scan_low_rank(inputs["u"], dt, linear, A_log, inputs["B"], inputs["C"], "triton")[0]
    assert seen == [(1, 4, 6)]
    assert_close(hooked, plain)


@kernels
@pytest.mark.parametrize("apart", [(12, slice(None, None, 2)), (1, None)])
def test_bias_of_any_layout(apart) -> None:
    size, taken = apart
    inputs, linear = tokens(b=1, l=4, d=6, n=3), layer(4, 6)
    bias = torch.randn(size, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    linear.bias = nn.Parameter(bias.expand(6) if taken is None else bias[taken])
    dt = torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    given = (inputs["u"], dt, linear, (-inputs["A"]).log(), inputs["B"], inputs["C"])
    assert_close(scan_low_rank(*given, "triton")[0], scan_low_rank(*given, "torch")[0], 1e-5)


@kernels
@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_precision_set_where_newer_pytorch_has_it(precision: str) -> None:
    inputs, linear, settings = tokens(b=1, l=4, d=6, n=3), layer(4, 6), torch.backends.cuda.matmul
    dt = torch.randn(1, 4, 4, device=DEVICE)
    before, settings.fp32_precision = settings.fp32_precision, precision
    try:
        y, _ = scan_low_rank(inputs["u"], dt, linear, (-inputs["A"]).log(), inputs["B"], inputs["C"], "triton")
    finally:
        settings.fp32_precision = before
    assert y.isfinite().all()


@kernels
@pytest.mark.parametrize("wide", ["A", "B", "C"])
def test_float64_is_for_the_other_backends(wide: str) -> None:
    inputs, linear = tokens(b=1, l=4, d=6, n=3), layer(4, 6)
    inputs[wide] = inputs[wide].double()
    given = (inputs["u"], torch.randn(1, 4, 4, device=DEVICE), linear, (-inputs["A"]).log(), inputs["B"], inputs["C"])
    assert scan_low_rank(*given)[0].dtype == torch.float64
    with pytest.raises(UserError, match="below float64"):
        scan_low_rank(*given, "triton")


@kernels
def test_a_weight_of_another_rank_is_refused() -> None:
    inputs, linear = tokens(b=1, l=4, d=6, n=3), layer(4, 6)
    dt = torch.randn(1, 4, 8, device=DEVICE)[..., :3]
    with pytest.raises(RuntimeError, match="shapes"):
        scan_low_rank(inputs["u"], dt, linear, (-inputs["A"]).log(), inputs["B"], inputs["C"], "triton")


class Quantised(Tensor):
    """A weight that knows one operation, the product of a linear layer."""

    @staticmethod
    def __new__(cls, values: Tensor) -> "Quantised":
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=values.device)

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        if function is F.linear:
            return function(arguments[0], arguments[1].values, *arguments[2:])
        return super().__torch_function__(function, types, arguments, keywords or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        if function is torch.ops.aten.detach.default:
            return cls(arguments[0].values)
        raise NotImplementedError(function)


class Scaled(nn.Module):
    """A layer in the place of a linear one: no bias."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@kernels
def test_what_takes_the_place_of_a_layer_or_its_weight_is_called() -> None:
    inputs, linear = tokens(b=1, l=4, d=6, n=3), layer(4, 6, bias=False)
    dt, A_log = torch.randn(1, 4, 4, device=DEVICE), (-inputs["A"]).log()
    plain = scan_low_rank(inputs["u"], dt, linear, A_log, inputs["B"], inputs["C"], "triton")[0]
    quantised = layer(4, 6, bias=False)
    quantised.weight = nn.Parameter(Quantised(linear.weight.detach()), requires_grad=False)
    for other in (quantised, Scaled(linear)):
        y = scan_low_rank(inputs["u"], dt, other, A_log, inputs["B"], inputs["C"], "triton")[0]
        assert_close(y, plain)


@kernels
@pytest.mark.parametrize("trained", ["dt", "weight", "bias"])
def test_each_gradient_without_the_others(trained: str) -> None:
    inputs, linear = tokens(b=2, l=5, d=6, n=3), layer(4, 6)
    dt = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    leaf = {"dt": dt, **dict(linear.requires_grad_(False).named_parameters())}[trained].requires_grad_()
    found = []
    for backend in ("triton", "torch"):
        y, _ = scan_low_rank(inputs["u"], dt, linear, (-inputs["A"]).log(), inputs["B"], inputs["C"], backend)
        found += torch.autograd.grad(y, leaf, slope(y))
    assert_close(*found, 1e-5)


@kernels
def test_operator_is_registered_as_pytorch_wants_it() -> None:
    inputs, linear = tokens(b=1, l=3, d=4, n=2), layer(3, 4)
    leaves = [tensor.requires_grad_() for name, tensor in inputs.items() if name != "delta"]
    u, A, B, C = leaves
    dt = torch.randn(1, 3, 3, device=DEVICE, requires_grad=True)
    around = (None, None, linear.bias, linear.weight)
    options = (False, True, "forward", 1, torch.float32, "triton", True)
    result = torch.library.opcheck(torch.ops.mambacl.scan.default, (u, dt, A, B, C, *around, *options))
    assert set(result.values()) == {"SUCCESS"}


class TestForReal:
    pytestmark = gpu

    @pytest.mark.parametrize("tf32, tolerance", [(False, 1e-6), (True, 2e-3)])
    def test_at_the_size_of_the_largest_model(self, tf32: bool, tolerance: float) -> None:
        from mambacl.ops.kernels.delta import delta_projection

        linear = layer(48, 2048)
        dt = torch.randn(50, 145, 80, device=DEVICE)[..., :48]
        with float32_products(tf32=tf32):
            steps = delta_projection(dt, linear.weight.detach(), linear.bias.detach())
        assert_close(steps, wanted_steps(dt, linear), tolerance)

    def test_a_model_takes_it(self) -> None:
        torch.manual_seed(0)
        model = create_model("defocus_mamba_nano", num_classes=0, depth=2).to(DEVICE).eval()
        images = torch.randn(4, 3, 32, 32, device=DEVICE)
        fast = model(images)
        for module in model.modules():
            if type(module) is nn.Linear:
                module.register_forward_hook(lambda *_: None)
        assert_close(fast, model(images), 1e-5)
