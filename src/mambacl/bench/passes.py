"""Counts the passes that a call makes through a backbone, by what the linear layers of its blocks are given.

A pass costs more with prompt tokens, less if it ends early, and its backward pass less if no weights train. So work is
counted: the rows that each layer gets, times its size, by what the backward pass has to do there.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mambacl.tuning.recomputing import blocks_of


@dataclass(frozen=True)
class Passes:
    """What a call does in a backbone, as multiples of one forward pass of the same images."""

    passes: float
    """the passes, whatever their number of tokens"""
    forward: float
    """work of those without a backward pass"""
    through: float
    """work of those whose backward pass only carries gradients on to earlier layers or added ones"""
    training: float
    """work of those whose backward pass also gives the gradients of weights"""

    @property
    def work(self) -> float:
        return self.forward + self.through + self.training

    def __truediv__(self, one: float) -> "Passes":
        return Passes(*(getattr(self, field.name) / one for field in fields(self)))


class PassCounter:
    """Counts in models of one architecture, whose layers it knows by name."""

    def __init__(self, backbone: nn.Module, images: Tensor) -> None:
        blocks = set(blocks_of(backbone))
        inside = {layer for block in blocks for layer in block.modules() if isinstance(layer, nn.Linear)}
        self.names = [name for name, module in backbone.named_modules() if module in inside]
        with torch.no_grad():
            single = self._count(backbone, partial(backbone, images))
        self.pass_size, self.work = single.passes, single.forward

    def count(self, backbone: nn.Module, call: Callable[[], object]) -> Passes:
        """The passes of a call through a backbone, which can have more layers than the one that was given first."""
        found = self._count(backbone, call)
        work = found / self.work
        return Passes(found.passes / self.pass_size, work.forward, work.through, work.training)

    def _count(self, backbone: nn.Module, call: Callable[[], object]) -> Passes:
        size, work = 0, [0, 0, 0]

        def seen(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, *_: Any) -> None:
            nonlocal size
            weight: Tensor = layer.weight  # type: ignore[assignment]  # the one in use, because this hook comes first
            kind = 0 if not output.requires_grad else 1 if not weight.requires_grad else 2
            size += weight.numel()
            work[kind] += inputs[0].numel() // weight.shape[1] * weight.numel()

        handles = [backbone.get_submodule(name).register_forward_hook(seen, prepend=True) for name in self.names]
        try:
            call()
        finally:
            for handle in handles:
                handle.remove()
        return Passes(size, *work)
