"""Checks that a system computes the selective scan: compares its output and gradients with float64, within bounds.

Every result is a sum of products. Its rounding error is at most the number of roundings that lead to it, times the unit
roundoff, times the sum of the magnitudes of its terms. The same recurrence over absolute values gives that sum. Errors
of either sign add up like a random walk, so the bound takes the square root of the number of roundings.

The output is allowed one more error. Inference engines have no log1p and compute softplus as log(1 + exp(x)), whose
error is a few unit roundoffs of 1, not of the step.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mambacl.bench.shapes import Problem

PER_STEP = 4  # roundings of a state per step: delta A, its exponential, the product with the state, the sum
DEVIATIONS = 4  # of the random walk
STORED = 2  # values rounded to the inputs' type: an intermediate and the result
UNIT = torch.finfo(torch.float32).eps / 2
LOGARITHM = 8  # units of error allowed in log(1 + exp(x)): of the sum, the exponential, the logarithm
OUTPUT = "output"
UNIT_STEPS = "output of unit steps"
SUMMED = ("A", "D", "delta_bias")  # their gradients are sums over images and tokens


@dataclass(frozen=True)
class Exact:
    """A result in float64, and the error that rounding can cause."""

    value: Tensor
    bound: Tensor


@dataclass(frozen=True)
class Verdict:
    worst: float
    """the largest error, divided by its bound"""
    where: str
    """the output, or the input whose gradient has this error"""

    @property
    def agrees(self) -> bool:
        return self.worst <= 1  # false for NaN

    def __str__(self) -> str:
        what = self.where if self.where == OUTPUT else f"gradient of {self.where}"
        return f"{what}: {self.worst:.2g} times its bound"


def exact(problem: Problem, memory: int = 1 << 29) -> dict[str, Exact]:
    """The output and all gradients by name. `memory`: bytes for the graph of a group of images."""
    shape = problem.shape
    images = max(1, memory // (48 * shape.channels * shape.states * shape.length))
    values, magnitudes = (_in_groups(problem, images, absolute) for absolute in (False, True))
    found = {name: Exact(value, _bound(name, magnitudes[name], problem)) for name, value in values.items()}
    softplus = LOGARITHM * UNIT * magnitudes[UNIT_STEPS]
    return {**found, OUTPUT: Exact(found[OUTPUT].value, found[OUTPUT].bound + softplus)}


def compare(found: dict[str, Tensor], wanted: dict[str, Exact]) -> Verdict:
    """The verdict on the worst result of a system."""
    verdicts = []
    for name, result in found.items():
        if result.shape != wanted[name].value.shape:
            return Verdict(math.inf, name)
        ratio = (result.double() - wanted[name].value).abs() / wanted[name].bound
        verdicts.append(Verdict(ratio.nan_to_num(nan=math.inf).max().item(), name))
    return max(verdicts, key=lambda verdict: verdict.worst)


def results(call: Callable[[], Tensor], problem: Problem, differentiable: bool) -> dict[str, Tensor]:
    """A system's output and gradients for a problem."""
    if not differentiable:
        with torch.no_grad():
            return {OUTPUT: call()}
    output = call()
    return {OUTPUT: output.detach(), **dict(zip(problem.inputs, problem.gradients(output), strict=True))}


def _bound(name: str, magnitude: Tensor, problem: Problem) -> Tensor:
    shape = problem.shape
    roundings = PER_STEP * shape.length + shape.states
    if name in SUMMED:
        roundings += shape.batch * shape.length
    if name in ("B", "C"):
        roundings += shape.channels // shape.groups
    unit = DEVIATIONS * math.sqrt(roundings) * UNIT
    if problem.dtype != torch.float32:
        unit += STORED * torch.finfo(problem.dtype).eps / 2
    return unit * magnitude + torch.finfo(torch.float32).tiny


def _in_groups(problem: Problem, images: int, absolute: bool) -> dict[str, Tensor]:
    """Computes the results one group of images at a time."""
    groups: list[dict[str, Tensor]] = []
    for first in range(0, problem.shape.batch, images):
        some = {
            name: tensor.detach() if tensor.dim() < 3 else tensor.detach()[first : first + images]
            for name, tensor in problem.inputs.items()
        }
        groups.append(_one_group(some, problem.dy[first : first + images], absolute))
    joined = {name: [group[name] for group in groups] for name in groups[0]}
    return {name: sum(parts[1:], parts[0]) if name in SUMMED else torch.cat(parts) for name, parts in joined.items()}


def _one_group(inputs: dict[str, Tensor], dy: Tensor, absolute: bool) -> dict[str, Tensor]:
    """Output and gradients in float64; with `absolute`, the sums of the magnitudes of their terms."""
    size = torch.abs if absolute else torch.clone
    u, B, C, D = (size(inputs[name].double()).requires_grad_() for name in ("u", "B", "C", "D"))
    A = inputs["A"].double().requires_grad_()
    dy = size(dy.double())
    raw = inputs["delta"].double() + inputs["delta_bias"].double()[:, None]
    # Separate variables for the steps in the decay and at the input, because their gradients can cancel.
    decaying, entering = (F.softplus(raw).requires_grad_() for _ in range(2))
    y = _recurrence(u, decaying, entering, A, B, C) + D[:, None] * u
    z = inputs["z"].double() if "z" in inputs else None
    gate = torch.ones_like(dy) if z is None else size(F.silu(z))
    leaves = (u, decaying, entering, A, B, C, D)
    du, d_decaying, d_entering, dA, dB, dC, dD = torch.autograd.grad(y, leaves, dy * gate)
    ddelta = (size(d_decaying) + size(d_entering)) * torch.sigmoid(raw)
    y = y.detach()
    found = {OUTPUT: y * gate, "u": du, "delta": ddelta, "A": size(dA), "B": dB, "C": dC, "D": dD}
    found["delta_bias"] = ddelta.sum((0, 2))
    if z is not None:
        sigmoid = torch.sigmoid(z)
        found["z"] = dy * y * sigmoid * (1 + size(z) * (1 - sigmoid))
    if absolute:
        with torch.no_grad():
            found[UNIT_STEPS] = _recurrence(u, decaying, torch.ones_like(entering), A, B, C) * gate
    return found


def _recurrence(u: Tensor, decaying: Tensor, entering: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """y (b, d, l). `unbind` takes all slices at once: the backward of a single slice costs as much as all of them."""
    if B.dim() == 3:
        B, C = B[:, None], C[:, None]
    groups = B.shape[1]
    u, decaying, entering = (x.unflatten(1, (groups, -1)) for x in (u, decaying, entering))  # (b, g, d / g, l)
    A = A.unflatten(0, (groups, -1))  # (g, d / g, n)
    h = u.new_zeros(*u.shape[:3], A.shape[-1])
    outputs = []
    slices = zip(*(x.unbind(-1) for x in (entering * u, decaying, B, C)), strict=True)
    for x_t, step, B_t, C_t in slices:
        h = torch.exp(step[..., None] * A) * h + x_t[..., None] * B_t[:, :, None]
        outputs.append((h @ C_t[..., None])[..., 0])
    return torch.stack(outputs, -1).flatten(1, 2)
