"""Trains the trailing singular directions of linear layers and keeps the leading ones (OSF).

W = U_k S_k V_k + U S V by a singular value decomposition. The first term stays; U, S and V train, with gradients
without their share in U_k and V_k. The layer's weight holds the first term, so names and modules of the model stay as
they are; while the layer runs, it uses the sum.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from mambacl.ops.precision import at_least_float32
from mambacl.tuning.effective_weights import use_weight

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

    def kept(self) -> Tensor:
        found: dict[str, Tensor] = dict(self.named_buffers())
        return (found["kept_U"] * found["kept_S"]) @ found["kept_V"]

    def whole(self, kept: Tensor) -> Tensor:
        return torch.addmm(kept, self.U * self.S, self.V)


class WeightFactors:
    """A `Tuning` for linear layers by name. Before the first `split`, nothing trains."""

    def __init__(self, layers: Mapping[str, nn.Linear]) -> None:
        self.layers = dict(layers)
        self.factors: dict[str, Factors] = {}
        for name, layer in self.layers.items():
            use_weight(layer, partial(self._whole, name))

    def _whole(self, name: str) -> Tensor | None:
        return self.factors[name].whole(self.layers[name].weight) if name in self.factors else None

    @torch.no_grad()
    def split(self, kept: Callable[[int], int]) -> None:
        """Decomposes the weights as they are after training so far. `kept`: how many of so many directions stay."""
        for name, layer in self.layers.items():
            weight = whole if (whole := self._whole(name)) is not None else layer.weight
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
