"""Bottleneck adapters beside the mixers of a fixed backbone, for the methods that train them.

An adapter makes y = mixer(u) into y + scale * W_up relu(W_down u), on each token u by itself. W_up starts at zero, so
that the model starts as it is. Adapters are no part of the model: hooks on its mixers call them, and its names stay.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.backbones.mambavision import Attention
from mambacl.errors import UserError
from mambacl.nullspace.blocks import find_blocks, first_tensor, named_modules


@dataclass(frozen=True)
class AdapterOptions:
    """Options of every method with adapters."""

    bottleneck: int = 16
    """channels between W_down and W_up; 16 in the paper and in EASE's"""
    scale: float = 0.1
    """of what an adapter adds; fixed, as in EASE's public code"""

    def __post_init__(self) -> None:
        if self.bottleneck < 1:
            raise UserError(f"options.bottleneck must be at least 1, got {self.bottleneck}.")
        if not 0 < self.scale < float("inf"):
            raise UserError(f"options.scale must be positive, or the adapters do nothing, got {self.scale}.")


class Adapter(nn.Module):
    def __init__(self, width: int, bottleneck: int, scale: float) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, bottleneck), nn.Linear(bottleneck, width)
        self.scale = scale

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        bound = self.down.in_features**-0.5
        self.down.weight.uniform_(-bound, bound, generator=generator)
        for tensor in (self.down.bias, self.up.weight, self.up.bias):
            tensor.zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.scale * self.up(F.relu(self.down(tokens)))


def mixers(model: nn.Module) -> dict[str, tuple[nn.Module, int]]:
    """What mixes the tokens of each block, by name, with the channels that it takes and gives.

    These are the selective SSMs and MambaVision's attention; its blocks of convolutions have none.
    """
    selective = {block.name: block.module for block in find_blocks(model)}
    found = {}
    for name, module in named_modules(model).items():
        first = "qkv" if isinstance(module, Attention) else "in_proj" if name in selective else None
        if first is None:
            continue
        layer = getattr(module, first, None)
        if not isinstance(layer, nn.Linear):
            raise UserError(
                f"An adapter has no place at {name} ({type(module).__name__}), which has no linear in_proj to tell its "
                "channels from: use a method without adapters."
            )
        found[name] = (module, layer.in_features)
    if not found:
        raise UserError(
            f"An adapter has no place in {type(model).__name__}, which has no selective SSM: register a block "
            "reader for it (docs/extending.md)."
        )
    return found


class AdapterSets(nn.Module):
    """Sets of one adapter a mixer, of which one at a time, or none, is part of the model's forward."""

    def __init__(self, model: nn.Module, options: AdapterOptions) -> None:
        super().__init__()
        found = mixers(model)
        self.options, self.widths = options, [width for _, width in found.values()]
        like = next(model.parameters())
        self.device, self.dtype = like.device, like.dtype
        self.sets = nn.ModuleList()
        self.current: int | None = None
        self._handles = [
            module.register_forward_hook(self._beside(place), with_kwargs=True)
            for place, (module, _) in enumerate(found.values())
        ]

    def _beside(self, place: int) -> Any:
        def add(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Tensor) -> Tensor:
            if self.current is None:
                return output
            adapters: Any = self.sets[self.current]
            return output + adapters[place](first_tensor(arguments, keywords)).to(output.dtype)

        return add

    def __len__(self) -> int:
        return len(self.sets)

    def add(self, seed: int) -> None:
        """A new last set, drawn from the seed; the others are fixed from now on."""
        generator = torch.Generator().manual_seed(seed ^ 1)  # other numbers than a classifier's of the same seed
        adapters = nn.ModuleList(Adapter(width, self.options.bottleneck, self.options.scale) for width in self.widths)
        for adapter in adapters:
            assert isinstance(adapter, Adapter)
            adapter.reset(generator)
        self.sets.requires_grad_(False)
        self.sets.append(adapters.to(self.device, self.dtype))

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters of the last set."""
        last = len(self.sets) - 1
        return [(f"adapters.{last}.{name}", p) for name, p in self.sets[last].named_parameters()]

    @contextmanager
    def using(self, index: int | None) -> Iterator[None]:
        """The model with that set, or with none; then as it was."""
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before

    def remove(self) -> None:
        """The model as it was before."""
        for handle in self._handles:
            handle.remove()

    def state(self, sets: range | None = None) -> dict[str, Tensor]:
        """Of these sets, or of all."""
        chosen = range(len(self.sets)) if sets is None else sets
        named = {f"{i}.{name}": tensor for i in chosen for name, tensor in self.sets[i].state_dict().items()}
        return {f"adapters.{name}": tensor for name, tensor in named.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Takes up a saved state, with as many sets as it holds; other names in it are left alone."""
        own = {name.removeprefix("adapters."): t for name, t in state.items() if name.startswith("adapters.")}
        self.sets = nn.ModuleList()
        while f"{len(self.sets)}.0.up.bias" in own:
            self.add(seed=0)
        self.sets.load_state_dict(own)
