"""The null space's view of a model: blocks, the parts of their parameters, and hooks that record their features.

A block reader takes a module and returns a `Block`, or None if it does not recognise the module. `block_readers.py` has
those for selective SSMs and plain layers. Other packages can add readers through the entry point group
`mambacl.block_readers`.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mambacl.nullspace.statistics import Record, Source
from mambacl.registry import Registry

Side = Literal["right", "left"]
Index = int | tuple[int, int]  # an index, or (start, end)


@dataclass(frozen=True)
class Part:
    """A parameter, or some of its rows, with one role in the block."""

    kind: str  # W_delta, W_B, W_C, W_dt, A, out, linear, conv
    parameter: str  # full name in the model
    index: tuple[Index, ...] = ()  # along the leading axes
    side: Side = "right"  # side of the projector: update P, or P update
    groups: int = 1  # of a convolution
    inputs: Mapping[str, str] = field(default_factory=dict)
    """the block's names for x, delta, ... if it has several of each"""
    mark: str = ""
    """ends the name, where the same rows are protected twice"""
    whole: str = ""
    """of what one rank holds of a part: that part's name"""

    @property
    def name(self) -> str:
        if self.whole:
            return self.whole
        rows = ",".join(f"{i}" if isinstance(i, int) else f"{i[0]}:{i[1]}" for i in self.index)
        return f"{self.parameter}[{rows}]{self.mark}" if self.index else f"{self.parameter}{self.mark}"

    def of(self, parameter: Tensor) -> Tensor:
        """A view of the part in its parameter, or in any tensor of the same shape."""
        return parameter[tuple(i if isinstance(i, int) else slice(*i) for i in self.index)]

    def matrix(self, parameter: Tensor) -> Tensor:
        """The part as (groups, n, D), so that every projection multiplies from the right."""
        part = self.of(parameter)
        if self.side == "left":
            return (part.T if part.dim() == 2 else part[None])[None]
        return part.reshape(self.groups, part.shape[0] // self.groups, -1)

    def restored(self, matrix: Tensor, shape: torch.Size) -> Tensor:
        """The inverse of `matrix`: (groups, n, D) in the part's shape."""
        if self.side == "left":
            return (matrix[0].T if len(shape) == 2 else matrix[0, 0]).reshape(shape)
        return matrix.reshape(shape)


@dataclass(frozen=True, eq=False)
class Block(Source):
    """A module with its parts. `hooks` registers hooks that record features, and returns their handles."""

    name: str
    module: nn.Module
    parts: tuple[Part, ...]
    hooks: Callable[[Record], list[Any]]
    selective: bool = True  # a selective SSM, as opposed to a plain layer
    may_rest: bool = False

    def register_hooks(self, record: Record) -> list[Any]:
        return self.hooks(record)

    def if_not_run(self) -> str:
        if self.selective:
            return ""
        return f", or uses its weight without calling it; exclude it with leave=('{self.name}',)"


BlockReader = Callable[[nn.Module, str], Block | None]
BLOCK_READERS: Registry[BlockReader] = Registry("block reader", "mambacl.block_readers", old_group="mambacl.adapters")
ADAPTERS = BLOCK_READERS  # the old name, used by packages that register in the old group


WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")  # what `torch.compile` and checkpoint wrappers call a module


def plain_name(name: str) -> str:
    """A name without what `torch.compile` and PyTorch's checkpoint wrappers add for the modules they wrap."""
    return ".".join(word for word in name.split(".") if word not in WRAPPED)


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by the names they have without wrappers. Those that FSDP2 has gathered for a forward pass are cut
    again first: an optimizer has the cut ones."""
    cut_again(model)
    return {plain_name(name): parameter for name, parameter in model.named_parameters()}


def cut_again(model: nn.Module) -> None:
    """Frees the parameters that FSDP2 keeps gathered after a forward pass, for the backward pass."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by the names they have without wrappers, without the wrappers themselves."""
    modules = model.named_modules()
    return {plain_name(name): m for name, m in modules if not any(hasattr(m, word) for word in WRAPPED)}


def batched(rows: Tensor, batch: int | None) -> Tensor:
    """Features as (images, tokens, channels); some modules get (images x tokens, channels)."""
    if rows.dim() == 2:
        return rows.unflatten(0, (batch or 1, -1))
    return rows.flatten(1, -2)


def first_tensor(arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor:
    return next(value for value in (*arguments, *named.values()) if isinstance(value, torch.Tensor))
