"""Inputs for the tests of the Triton scan, and how it is compared with the reference."""

import json
from pathlib import Path

import torch
from kernels_help import DEVICE, poisoned
from tolerance import rounding
from torch import Tensor

from mambacl.ops import scan_tokens

GOLDEN = Path(__file__).parent / "goldens" / "selective_scan_ref"
CASES = json.loads(GOLDEN.with_suffix(".json").read_text())["cases"]
TOLERANCE = rounding(2**7)  # of float32, relative to the largest value: a sum over some 64 states and dozens of times
ROUNDING = {torch.float32: 0.0, torch.float16: 2**-11, torch.bfloat16: 2**-8}
if DEVICE == "cpu":
    ROUNDING[torch.bfloat16] = 2**-7  # the interpreter truncates
INPUTS = ("u", "delta", "A", "B", "C")
SOFTPLUS_IS_EXACT = DEVICE == "cuda"  # on the CPU torch's softplus differs in the last bit between vectors and the rest


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
