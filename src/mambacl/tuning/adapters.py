"""Bottleneck adapters in parallel to the mixers or the MLPs of a fixed backbone.

An adapter adds scale * W_up relu(W_down u), for each token u separately. Beside a mixer, u is the mixer's input, after
the norm. Beside an MLP, u is the input of the norm before it, as in AdaptFormer. W_up starts at zero, so the model's
output does not change at first. Hooks call the adapters. Adapters are not part of the model, and the names of its
parameters do not change.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.errors import UserError
from mambacl.nullspace.block_readers import find_blocks
from mambacl.nullspace.blocks import first_tensor, named_modules
from mambacl.options import Must, Options, at_least

Place = Literal["mixer", "mlp"]
POSITIVE = Must("be positive and finite", lambda value: 0 < value < float("inf"))


@dataclass(frozen=True)
class AdapterOptions(Options):
    """Options of every method with adapters."""

    bottleneck: Annotated[int, at_least(1)] = 16
    """channels between W_down and W_up; 16 in the paper and in EASE's"""
    scale: Annotated[float, POSITIVE] = 0.1
    """factor of an adapter's output; fixed, as in EASE's public code"""


@dataclass(frozen=True)
class PlacedOptions(AdapterOptions):
    """Options of methods whose adapters go beside MLPs or mixers."""

    place: Literal["auto", "mixer", "mlp"] = "auto"
    """what an adapter is parallel to; auto: the MLP in a ViT, as published, and the mixer in a Mamba model"""


class Adapter(nn.Module):
    """scale * W_up activation(W_down u). In a ViT it also goes beside attention or the MLP: `Change.attention` and
    `Change.mlp` of `passes` add its output, for the tokens before or after the norm."""

    scale: Tensor | float

    def __init__(
        self, width: int, bottleneck: int, scale: float, activation: Literal["relu", "gelu"] = "relu",
        learned_scale: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.down, self.up = nn.Linear(width, bottleneck), nn.Linear(bottleneck, width)
        self.scale = nn.Parameter(torch.tensor(float(scale))) if learned_scale else scale
        self.activation = F.relu if activation == "relu" else F.gelu

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        bound = self.down.in_features**-0.5
        self.down.weight.uniform_(-bound, bound, generator=generator)
        for tensor in (self.down.bias, self.up.weight, self.up.bias):
            tensor.zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.scale * self.up(self.activation(self.down(tokens)))


def mixers(model: nn.Module) -> dict[str, tuple[nn.Module, int]]:
    """The modules that mix tokens, by name, with the number of their input and output channels.

    These are the selective SSMs and, as in MambaVision, attention modules with a linear `qkv`. Convolution blocks have
    none.
    """
    selective = {block.name for block in find_blocks(model)}
    found = {}
    for name, module in named_modules(model).items():
        attends = isinstance(getattr(module, "qkv", None), nn.Linear)
        if not attends and name not in selective:
            continue
        layer = module.qkv if attends else getattr(module, "in_proj", None)
        if not isinstance(layer, nn.Linear):
            raise UserError(
                f"An adapter cannot be added to {name} ({type(module).__name__}): it has no linear in_proj to read the "
                "number of channels from; use a method without adapters."
            )
        found[name] = (module, layer.in_features)
    if not found:
        raise UserError(
            f"An adapter cannot be added to {type(model).__name__}: it has no selective SSM that a block reader knows; "
            "register a block reader for it (docs/extending.md)."
        )
    return found


def mlps(model: nn.Module) -> dict[str, tuple[nn.Module, int]]:
    """The blocks with a LayerNorm `norm2` before an `mlp`, by name, with the number of their channels."""
    found = {
        name: (module, int(norm.normalized_shape[0]))
        for name, module in named_modules(model).items()
        if isinstance(norm := getattr(module, "norm2", None), nn.LayerNorm) and hasattr(module, "mlp")
    }
    if not found:
        raise UserError(
            f"{type(model).__name__} has no block with norm2 and mlp for an adapter: set options.place to mixer."
        )
    return found


def usual_place(model: nn.Module) -> Place:
    """Beside the MLP in a ViT, where AdaptFormer has it; beside the mixer if the model has selective SSMs."""
    return "mixer" if find_blocks(model) else "mlp"


def chosen_place(model: nn.Module, options: PlacedOptions) -> Place:
    return usual_place(model) if options.place == "auto" else options.place


class AdapterSets(nn.Module):
    """Sets of one adapter per mixer or MLP. The model's forward uses one set or none; the last set trains."""

    def __init__(self, model: nn.Module, options: AdapterOptions, place: Place = "mixer") -> None:
        super().__init__()
        found = mixers(model) if place == "mixer" else mlps(model)
        self.options, self.widths = options, [width for _, width in found.values()]
        like = next(model.parameters())
        self.device, self.dtype = like.device, like.dtype
        self.adapters = nn.ModuleList()  # one list per set
        self.current: int | None = None
        self._inputs: dict[int, Tensor] = {}  # of the norms before MLPs, until their block ends
        self._handles = [
            module.register_forward_hook(self._hook(index), with_kwargs=True)
            for index, (module, _) in enumerate(found.values())
        ]
        if place == "mlp":
            norms: list[Any] = [module.norm2 for module, _ in found.values()]
            self._handles += [norm.register_forward_pre_hook(self._keep(index)) for index, norm in enumerate(norms)]

    def _keep(self, index: int) -> Any:
        def keep(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            if self.current is not None:
                self._inputs[index] = arguments[0]

        return keep

    def _hook(self, index: int) -> Any:
        def add(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Tensor) -> Tensor:
            if self.current is None:
                return output
            adapters: Any = self.adapters[self.current]
            kept = self._inputs.pop(index, None)
            tokens = first_tensor(arguments, keywords) if kept is None else kept
            return output + adapters[index](tokens).to(output.dtype)

        return add

    def __len__(self) -> int:
        return len(self.adapters)

    def new(self, width: int) -> nn.Module:
        return Adapter(width, self.options.bottleneck, self.options.scale)

    def add(self, seed: int) -> None:
        """Adds a set, initialised from the seed; the earlier ones are fixed from now on."""
        generator = torch.Generator().manual_seed(seed ^ 1)  # a classifier with the same seed draws other numbers
        adapters = nn.ModuleList(self.new(width) for width in self.widths)
        for adapter in adapters:
            adapter.reset(generator)  # type: ignore[operator]
        self.adapters.requires_grad_(False)
        self.adapters.append(adapters.to(self.device, self.dtype))

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        last = len(self.adapters) - 1
        return [(f"adapters.{last}.{name}", p) for name, p in self.adapters[last].named_parameters()]

    @contextmanager
    def using(self, index: int | None) -> Iterator[None]:
        """Within it, the model uses this set, or none."""
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before

    def remove(self) -> None:
        """Removes the adapters from the model."""
        for handle in self._handles:
            handle.remove()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Replaces the sets by those of the state."""
        self.adapters = nn.ModuleList()
        while any(name.startswith(f"adapters.{len(self.adapters)}.") for name in state):
            self.add(seed=0)
        return super().load_state_dict(state, strict, assign)
