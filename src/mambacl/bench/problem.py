"""A call of the selective scan as a user makes it: all inputs of a shape, and the gradient of its output."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mambacl.bench.shapes import Shape


@dataclass(frozen=True)
class Problem:
    """u, delta, z (b, d, l); A (d, n); B, C (b, n, l), or (b, g, n, l) where there are groups, which have no z as in
    VMamba; D, delta_bias (d,). A, D and delta_bias are float32 whatever the type of the others, as models keep them."""

    shape: Shape
    inputs: dict[str, Tensor]
    dy: Tensor

    @property
    def device(self) -> torch.device:
        return self.dy.device

    @property
    def dtype(self) -> torch.dtype:
        return self.dy.dtype

    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.inputs.values(), self.dy))


def make_problem(shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32) -> Problem:
    """Random inputs with steps as in a trained model, softplus(delta + delta_bias) of about 0.05."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device)

    tokens = (shape.batch, shape.channels, shape.length)
    matrices = (shape.batch, *([shape.groups] if shape.groups > 1 else []), shape.states, shape.length)
    inputs = {
        "u": normal(*tokens).to(dtype),
        "delta": (0.5 * normal(*tokens)).to(dtype),
        "A": -torch.arange(1.0, shape.states + 1, device=device).repeat(shape.channels, 1),
        "B": normal(*matrices).to(dtype),
        "C": normal(*matrices).to(dtype),
        "D": normal(shape.channels),
        "delta_bias": normal(shape.channels) - 3.0,
    }
    if shape.groups == 1:
        inputs["z"] = normal(*tokens).to(dtype)
    dy = normal(*tokens).to(dtype)
    return Problem(shape, {name: tensor.requires_grad_() for name, tensor in inputs.items()}, dy)
