"""Trains the trailing singular directions of linear layers and keeps the leading ones (OSF).

W = U_k S_k V_k + U S V by a singular value decomposition. The first term stays; U, S and V train, with gradients
without their share in U_k and V_k. The layer's weight holds the first term, and a hook on the layer adds the second, so
names and modules of the model stay as they are.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mambacl.ops.precision import at_least_float32

PREFIX = "factors."
NAMES = ("U", "S", "V", "kept_U", "kept_S", "kept_V")


class Factors(nn.Module):
    """Of one layer. The kept ones are buffers; the others are parameters with projected gradients."""

    def __init__(self, U: Tensor, S: Tensor, V: Tensor, kept_U: Tensor, kept_S: Tensor, kept_V: Tensor) -> None:
        super().__init__()
        # contiguous, as they are when they come from a checkpoint: products round differently in other layouts
        contiguous = (t.clone(memory_format=torch.contiguous_format) for t in (U, S, V, kept_U, kept_S, kept_V))
        U, S, V, kept_U, kept_S, kept_V = contiguous
        self.U, self.S, self.V = (nn.Parameter(t) for t in (U, S, V))
        for name, tensor in zip(NAMES[3:], (kept_U, kept_S, kept_V), strict=True):
            self.register_buffer(name, tensor)
        self.U.register_hook(lambda gradient: gradient - kept_U @ (kept_U.T @ gradient))
        self.V.register_hook(lambda gradient: gradient - (gradient @ kept_V.T) @ kept_V)

    @classmethod
    def of(cls, weight: Tensor, kept: int) -> "Factors":
        U, S, V = (t.to(weight.dtype) for t in torch.linalg.svd(at_least_float32(weight), full_matrices=False))
        return cls(U[:, kept:], S[kept:], V[kept:], U[:, :kept], S[:kept], V[:kept])

    def forward(self, u: Tensor) -> Tensor:
        return (u @ self.V.T * self.S) @ self.U.T

    def kept(self) -> Tensor:
        found: dict[str, Tensor] = dict(self.named_buffers())
        return (found["kept_U"] * found["kept_S"]) @ found["kept_V"]

    def whole(self) -> Tensor:
        return self.kept() + (self.U * self.S) @ self.V


class WeightFactors:
    """A `Tuning` for linear layers by name. Before the first `split`, nothing trains."""

    def __init__(self, layers: Mapping[str, nn.Linear]) -> None:
        self.layers = dict(layers)
        self.factors: dict[str, Factors] = {}
        self._handles = [layer.register_forward_hook(self._hook(name)) for name, layer in self.layers.items()]

    def _hook(self, name: str) -> Any:
        def add(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return output + self.factors[name](arguments[0]).to(output.dtype) if name in self.factors else output

        return add

    @torch.no_grad()
    def split(self, kept: Callable[[int], int]) -> None:
        """Decomposes the weights as they are after training so far. `kept`: how many of so many directions stay."""
        for name, layer in self.layers.items():
            weight = self.factors[name].whole() if name in self.factors else layer.weight
            self._use(name, Factors.of(weight, kept(min(weight.shape))))

    def _use(self, name: str, factors: Factors) -> None:
        self.factors[name] = factors
        self.layers[name].weight.copy_(factors.kept())

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        return [
            (f"{PREFIX}{name}.{word}", parameter)
            for name, factors in self.factors.items()
            for word, parameter in factors.named_parameters()
        ]

    def state_dict(self) -> dict[str, Tensor]:
        return {
            f"{PREFIX}{name}.{word}": tensor.detach()
            for name, factors in self.factors.items()
            for word, tensor in factors.state_dict().items()
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        expected = {f"{PREFIX}{name}.{word}" for name in self.layers for word in NAMES}
        if state and (differing := expected ^ set(state)):
            raise KeyError(*sorted(differing)[:1])
        for name, layer in self.layers.items() if state else ():
            self._use(name, Factors(*(state[f"{PREFIX}{name}.{word}"].to(layer.weight) for word in NAMES)))
