"""The null space's view of a model: blocks, the parts of their parameters, and hooks that record their features.

A block reader takes a module and returns a `Block`, or None if it does not recognise the module. `block_readers.py` has
those for selective SSMs and plain layers. Other packages can add readers through the entry point group
`mambacl.block_readers`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mambacl.errors import UserError
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

    @property
    def name(self) -> str:
        if not self.index:
            return self.parameter
        return f"{self.parameter}[{','.join(f'{i}' if isinstance(i, int) else f'{i[0]}:{i[1]}' for i in self.index)}]"

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

    def register_hooks(self, record: Record) -> list[Any]:
        return self.hooks(record)

    def if_not_run(self) -> str:
        if self.selective:
            return ""
        return f", or uses its weight without calling it; exclude it with leave=('{self.name}',)"


BlockReader = Callable[[nn.Module, str], Block | None]
BLOCK_READERS: Registry[BlockReader] = Registry("block reader", "mambacl.block_readers", old_group="mambacl.adapters")
ADAPTERS = BLOCK_READERS  # the old name, used by packages that register in the old group


def plain_name(name: str) -> str:
    """A name without the prefix that `torch.compile` adds to the modules it wraps."""
    return ".".join(word for word in name.split(".") if word != "_orig_mod")


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by the names they have without `torch.compile`."""
    return {plain_name(name): parameter for name, parameter in model.named_parameters()}


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by the names they have without `torch.compile`, without the wrappers themselves."""
    return {plain_name(name): module for name, module in model.named_modules() if not hasattr(module, "_orig_mod")}


def shared_names(model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter that several modules share."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if plain_name(name) not in names.setdefault(id(parameter), []):
            names[id(parameter)].append(plain_name(name))
    return {name: together for together in names.values() if len(together) > 1 for name in together}


def find_blocks(model: nn.Module, layers: bool = False) -> list[Block]:
    """The selective SSMs of a model, in its order; with `layers` also the linear and convolution layers around them.

    Other packages' readers are tried first. A block whose parameters belong to a block found earlier is skipped. A
    plain layer that shares its weight, e.g. with an embedding, is skipped: its input is not all that the weight
    multiplies.
    """
    from mambacl.nullspace.block_readers import BUILT_IN, plain_layer

    known = BLOCK_READERS.names()
    names = [*(name for name in known if name not in BUILT_IN), *(name for name in BUILT_IN if name in known)]
    readers = [BLOCK_READERS.get(name) for name in names]
    modules, shared = named_modules(model), shared_names(model)
    blocks: list[Block] = []
    claimed: set[str] = set()
    for name, module in modules.items():
        found = next((block for reader in readers if (block := reader(module, name)) is not None), None)
        if found is not None and not claimed & {part.parameter for part in found.parts}:
            blocks.append(found)
            claimed |= {part.parameter for part in found.parts}
    if tied := sorted(name for name in claimed if name in shared):
        users = ", ".join(name for name in shared[tied[0]] if name != tied[0])
        raise UserError(
            f"The parameter {tied[0]} of a selective SSM is shared with {users}: give each its own (a copy), or "
            "register a block reader for both."
        )
    if layers:
        for name, module in modules.items():
            layer = plain_layer(module, name)
            if layer is not None and layer.parts[0].parameter not in claimed | set(shared):
                blocks.append(layer)
        order = {name: place for place, name in enumerate(modules)}
        blocks.sort(key=lambda block: order[block.name])
    return blocks


def batched(rows: Tensor, batch: int | None) -> Tensor:
    """Features as (images, tokens, channels); some modules get (images x tokens, channels)."""
    if rows.dim() == 2:
        return rows.unflatten(0, (batch or 1, -1))
    return rows.flatten(1, -2)


def first_tensor(arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor:
    return next(value for value in (*arguments, *named.values()) if isinstance(value, torch.Tensor))
