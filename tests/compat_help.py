"""Plain twins of mamba-ssm's functions, in as few lines as each takes, and how the fast ones are compared with them."""

import pytest
import torch
import torch.nn.functional as F
from kernels_help import gpu
from torch import Tensor

from mambacl.ops import selective_scan_reference

WHERE = [
    pytest.param("cpu", torch.float64, id="cpu-float64"),
    pytest.param("cpu", torch.float32, id="cpu-float32"),
    pytest.param("cuda", torch.float32, id="cuda-float32", marks=gpu),
]
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def outputs_and_gradients(function, inputs: dict[str, object], device="cpu", dtype=torch.float64) -> dict[str, Tensor]:
    """What a function returns, and the gradient of every tensor it is given, for a fixed gradient of each output."""
    leaves = {
        name: value.to(device, dtype, copy=True).requires_grad_() if is_real(value) else moved(value, device)
        for name, value in inputs.items()
    }
    made = function(**leaves)
    made = list(made) if isinstance(made, tuple) else [made]
    towards = [torch.linspace(-1, 2, y.numel(), dtype=torch.float64).reshape(y.shape).to(y) for y in made]
    names = [name for name, value in inputs.items() if is_real(value)]
    gradients = torch.autograd.grad(made, [leaves[name] for name in names], towards)
    found = {f"output {i}": y.detach() for i, y in enumerate(made)}
    return {**found, **{f"gradient of {name}": g for name, g in zip(names, gradients, strict=True)}}


def is_real(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def moved(value: object, device: str) -> object:
    return value.to(device) if isinstance(value, Tensor) else value


def compare(fast, plain, inputs: dict[str, object], device: str, dtype: torch.dtype, terms: int) -> None:
    """The fast function in `dtype` against the plain one in float64: `terms` roundings in a row, in the worst case."""
    found = outputs_and_gradients(fast, inputs, device, dtype)
    wanted = outputs_and_gradients(plain, inputs)
    for name, value in wanted.items():
        assert_close(found[name], value, terms, name)


def assert_close(found: Tensor, wanted: Tensor, terms: int, what: str = "") -> None:
    assert found.shape == wanted.shape, what
    allowed = terms * torch.finfo(found.dtype).eps * wanted.abs().max().item()
    error = (found.double().cpu() - wanted.double().cpu()).abs().max().item()
    assert error <= allowed, f"{what}: off by {error:.3g} of {allowed:.3g}"


def plain_scan(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False):
    y, last = selective_scan_reference(u, delta, A, B, C, D, z, delta_bias, delta_softplus)
    return (y, last) if return_last_state else y


def plain_conv(x, weight, bias=None, activation=None):
    y = F.conv1d(x, weight[:, None], bias, padding=weight.shape[1] - 1, groups=len(weight))[..., : x.shape[-1]]
    return F.silu(y) if activation else y


def plain_norm(M: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The RMS norm of (b, n, l) over n."""
    return M if weight is None else M / (M.square().mean(1, keepdim=True) + eps).sqrt() * weight[:, None]


def plain_inner(
    xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, B=None, C=None,
    D=None, delta_bias=None, B_proj_bias=None, C_proj_bias=None, delta_softplus=True, b_rms_weight=None,
    c_rms_weight=None, dt_rms_weight=None, b_c_dt_rms_eps=1e-6, A_b=None,
):  # fmt: skip
    x, z = xz.chunk(2, dim=1)
    x = plain_conv(x, conv1d_weight[:, 0], conv1d_bias, "silu")
    projected = torch.einsum("rd,bdl->brl", x_proj_weight, x)
    rank, n = delta_proj_weight.shape[1], A.shape[1]
    delta = torch.einsum("dr,brl->bdl", delta_proj_weight, projected[:, :rank])
    if B is None:
        B = projected[:, rank : rank + n] + (0 if B_proj_bias is None else B_proj_bias[:, None])
    if C is None:
        C = projected[:, -n:] + (0 if C_proj_bias is None else C_proj_bias[:, None])
    B, C = plain_norm(B, b_rms_weight, b_c_dt_rms_eps), plain_norm(C, c_rms_weight, b_c_dt_rms_eps)
    delta = plain_norm(delta, dt_rms_weight, b_c_dt_rms_eps)
    y = plain_scan(x, delta, A, B, C, D, z, delta_bias, delta_softplus)
    if A_b is not None:
        back = (tensor.flip(-1) for tensor in (x, delta))
        y = y + plain_scan(*back, A_b, B.flip(-1), C.flip(-1), D, z.flip(-1), delta_bias, delta_softplus).flip(-1)
    y = torch.einsum("ed,bdl->ble", out_proj_weight, y)
    return y if out_proj_bias is None else y + out_proj_bias
