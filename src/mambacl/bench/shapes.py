"""Selective scans to time: shapes by name, inputs of a shape, and mamba-ssm's recorded times on an H200.

PyTorch is imported only on use, so that the help can list the names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mambacl.errors import UserError
from mambacl.registry import did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def _normal(device: torch.device) -> Callable[..., Tensor]:
    import torch

    generator = torch.Generator(device).manual_seed(0)
    return lambda *sizes: torch.randn(sizes, generator=generator, device=device)


@dataclass(frozen=True)
class Shape:
    batch: int
    channels: int
    length: int
    states: int
    groups: int = 1

    def inputs(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """u, delta (b, l, d), A (d, n), always in float32, B, C (b, l, g, n); steps as in a trained model."""
        import torch

        normal = _normal(device)
        tokens, matrices = (self.batch, self.length, self.channels), (self.batch, self.length, self.groups, self.states)
        delta = torch.nn.functional.softplus(normal(*tokens) - 3.0)
        A = -torch.arange(1.0, self.states + 1, device=device).repeat(self.channels, 1)
        made = [normal(*tokens).to(dtype), delta.to(dtype), A, normal(*matrices).to(dtype), normal(*matrices).to(dtype)]
        return [tensor.requires_grad_() for tensor in made]

    def floor_bytes(self, itemsize: int) -> tuple[int, int]:
        """The least bytes of a forward (u, delta, A, B, C read, y written) and a backward (the same and dy read, a
        gradient of each input written), without the last state and what the forward keeps for the backward."""
        tokens = self.batch * self.length * self.channels * itemsize
        matrices = self.batch * self.length * self.groups * self.states * itemsize
        inputs = 2 * tokens + 2 * matrices + 4 * self.channels * self.states
        return inputs + tokens, 2 * inputs + tokens

    def graph_bytes(self) -> int:
        """What autograd keeps for the plain reference: about four states per step."""
        return 16 * self.batch * self.channels * self.states * self.length

    def __str__(self) -> str:
        channels = f"{self.groups}x{self.channels // self.groups}" if self.groups > 1 else str(self.channels)
        return f"B {self.batch} D {channels} L {self.length} N {self.states}"


@dataclass(frozen=True)
class Problem:
    """u, delta, z (b, d, l); A (d, n); B, C (b, n, l), or (b, g, n, l) with groups, which have no z, as in VMamba;
    D, delta_bias (d,). A, D and delta_bias are always float32, as in models."""

    shape: Shape
    inputs: dict[str, Tensor]
    dy: Tensor

    @property
    def device(self) -> torch.device:
        return self.dy.device

    @property
    def dtype(self) -> torch.dtype:
        return self.dy.dtype

    @property
    def inputs_dtype(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def gradients(self, y: Tensor) -> tuple[Tensor, ...]:
        """The gradients of all inputs."""
        import torch

        return torch.autograd.grad(y, list(self.inputs.values()), self.dy)

    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.inputs.values(), self.dy))


def make_problem(shape: Shape, device: torch.device, dtype: torch.dtype | None = None) -> Problem:
    """Random inputs with steps as in a trained model, softplus(delta + delta_bias) of about 0.05; float32 if no type is
    given."""
    import torch

    normal, dtype = _normal(device), dtype or torch.float32
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


SHAPES: dict[str, Shape] = {
    "defocus-l": Shape(200, 2048, 145, 16),
    "defocus-l-50": Shape(50, 2048, 145, 16),
    "vim-s": Shape(64, 768, 197, 16),
    "vmamba-1": Shape(64, 4 * 192, 3136, 1, groups=4),
    "vmamba-2": Shape(64, 4 * 384, 784, 1, groups=4),
    "vmamba-3": Shape(64, 4 * 768, 196, 1, groups=4),
    "vmamba-4": Shape(64, 4 * 1536, 49, 1, groups=4),
    "vmamba-v0": Shape(64, 4 * 192, 3136, 16, groups=4),
    "mambavision": Shape(64, 320, 196, 8),
    "language": Shape(8, 1536, 2048, 16),
    "nano": Shape(200, 384, 65, 16),
    "nano-1": Shape(1, 384, 65, 16),
    "nano-8": Shape(8, 384, 65, 16),
    "cpu": Shape(2, 768, 197, 16),
    "defocus-l-1": Shape(1, 2048, 145, 16),
}
CPU_SHAPES = ("nano-1", "nano-8", "cpu", "defocus-l-1")  # small enough for one core
GPU_SHAPES = tuple(name for name in SHAPES if name not in CPU_SHAPES)


def shape_named(name: str) -> Shape:
    if name not in SHAPES:
        raise UserError(f"There is no shape '{name}'.{did_you_mean(name, SHAPES)} Known: {', '.join(SHAPES)}.")
    return SHAPES[name]


MAMBA_SSM = "mamba-ssm's CUDA kernels, H200, torch 2.11"
MAMBA_SSM_GPU = "H200"
MAMBA_SSM_MS: dict[str, dict[str, tuple[float, float]]] = {  # forward and backward, ms
    "defocus-l-50": {"float32": (0.72, 2.14), "bfloat16": (0.74, 2.09)},
    "defocus-l": {"float32": (2.84, 8.46), "bfloat16": (2.94, 8.35)},
    "vim-s": {"float32": (0.387, 1.224), "bfloat16": (0.396, 1.204)},
    "vmamba-1": {"float32": (1.10, 2.54), "bfloat16": (1.05, 2.65)},
    "vmamba-2": {"float32": (0.56, 1.38), "bfloat16": (0.53, 1.36)},
    "vmamba-3": {"float32": (0.30, 0.89), "bfloat16": (0.29, 0.87)},
    "vmamba-4": {"float32": (0.32, 0.92), "bfloat16": (0.31, 0.90)},
    "vmamba-v0": {"float32": (6.20, 18.0), "bfloat16": (5.33, 19.4)},
    "mambavision": {"float32": (0.094, 0.287), "bfloat16": (0.095, 0.285)},
    "language": {"float32": (0.878, 2.030), "bfloat16": (0.447, 1.744)},
}
