"""Low-rank changes of linear layers: y becomes y + scale * B A u for a layer's input u.

Works on any linear layer that a model calls as a module: qkv, proj, fc1 and fc2 of a ViT; in_proj, x_proj, dt_proj and
out_proj of a Mamba block. Hooks on the layers add the change, so names and weights of the model stay as they are. B
starts at zero, and with it the change.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mambacl.errors import UserError


class LowRank(nn.Module):
    """scale * B A u. `scale` is learned if `learned_scale`, else 1. With `fixed`, A does not train."""

    A: Tensor

    def __init__(
        self, width: int, outputs: int, rank: int, generator: torch.Generator, learned_scale: bool = False,
        fixed: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        bound = width**-0.5
        start = torch.empty(rank, width).uniform_(-bound, bound, generator=generator)
        if fixed:
            self.register_buffer("A", start)
        else:
            self.A = nn.Parameter(start)
        self.B = nn.Parameter(torch.zeros(outputs, rank))
        self.scale = nn.Parameter(torch.ones(())) if learned_scale else None

    def forward(self, u: Tensor) -> Tensor:
        change = u @ self.A.T @ self.B.T
        return change if self.scale is None else self.scale * change

    @staticmethod
    def matrices(changes: Sequence["LowRank"], factors: Tensor | None = None) -> list[Tensor]:
        """The sum of several, each times its factor, as the two matrices that multiply u in turn."""
        up = [change.B if change.scale is None else change.scale * change.B for change in changes]
        if factors is not None:
            up = [factor * B for factor, B in zip(factors.unbind(), up, strict=True)]
        return [torch.cat([change.A for change in changes]), torch.cat(up, dim=1)]


def linear_layers(model: nn.Module, names: Sequence[str], blocks: Iterable[int] | None = None) -> dict[str, nn.Linear]:
    """The linear layers whose last name is one of `names`, in all blocks or some."""
    chosen = None if blocks is None else {str(block) for block in blocks}
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in names
        if chosen is None or any(part in chosen for part in name.split("."))
    }
    if not found:
        raise UserError(
            f"{type(model).__name__} has no linear layers named {', '.join(names)}: name some of its own, such as qkv "
            "and proj of a ViT, or in_proj, x_proj, dt_proj and out_proj of a Mamba block."
        )
    return found


class LoRA(nn.Module):
    """One low-rank change per linear layer, in effect while `on`."""

    def __init__(self, layers: Mapping[str, nn.Linear], rank: int, seed: int, learned_scale: bool = False) -> None:
        super().__init__()
        generator, self.on = torch.Generator().manual_seed(seed), True
        like = next(iter(layers.values())).weight
        self.changes = nn.ModuleList(
            LowRank(layer.in_features, layer.out_features, rank, generator, learned_scale) for layer in layers.values()
        ).to(like.device, like.dtype)
        self._handles = [layer.register_forward_hook(self._hook(i)) for i, layer in enumerate(layers.values())]

    def _hook(self, index: int) -> Any:
        def add(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return output + self.changes[index](arguments[0]).to(output.dtype) if self.on else output

        return add

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
