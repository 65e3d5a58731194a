"""Lets a layer use another weight than its own while it runs: one product, whatever the change is made of.

The layer's parameter stays what it is, under its name; other hooks see the same inputs.
"""

from collections.abc import Callable

from torch import Tensor, nn


def use_weight(layer: nn.Linear, weight: Callable[[], Tensor | None]) -> None:
    """From now on, each call of `layer` uses what `weight` returns; None stands for the layer's own."""

    def before(layer: nn.Module, _: tuple[Tensor, ...]) -> None:
        if (found := weight()) is not None:
            vars(layer)["weight"] = found  # found before the parameter, which modules look up last

    def after(layer: nn.Module, _: tuple[Tensor, ...], __: Tensor) -> None:
        vars(layer).pop("weight", None)

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after, always_call=True)
