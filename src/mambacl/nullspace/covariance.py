"""What is gathered of a block's features, one batch at a time: Q += J^T J of Algorithm 1 without ever holding J.

A block shows its features as (images, tokens, channels): x, delta, dt, B, C, out; plain layers show `in`. A feature
is either a tensor or a function that makes it when it is wanted. `GRAMS` has, by name, each batch's share of a
covariance and the number of rows behind it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Features = Mapping[str, Any]  # Tensor, or a function without arguments that gives it
Gram = Callable[..., tuple[Tensor, int]]


def value(features: Features, name: str) -> Any:
    """A feature by name, made now if it was not made before."""
    found = features[name]
    return found() if callable(found) and not isinstance(found, Tensor) else found


def gram(rows: Tensor) -> Tensor:
    """J^T J of the last axis, (..., c) to (c, c)."""
    rows = rows.flatten(0, -2)
    return rows.T @ rows


def tokens(values: Tensor) -> tuple[Tensor, int]:
    if values.dim() == 4:  # a convolution's windows (b, places, groups, values): a matrix a group
        rows = values.flatten(0, 1).transpose(0, 1)
        return (rows.mT @ rows if len(rows) > 1 else gram(rows)), rows.shape[1]
    return gram(values), values.shape[0] * values.shape[1]


def delta_x(x: Tensor, delta: Tensor) -> tuple[Tensor, int]:
    """delta X of the paper: its rows are delta_{t,c} x_t for each token t and channel c, so the Gram is sum_t
    |delta_t|^2 x_t x_t^T."""
    return gram(x * delta.norm(dim=-1, keepdim=True)), x.shape[0] * x.shape[1] * delta.shape[-1]


def delta_x_per_image(x: Tensor, delta: Tensor) -> tuple[Tensor, int]:
    """M^T M of M = delta^T X for each image, summed; as X^T (delta delta^T) X, which is cheaper when tokens are few."""
    between_tokens = delta @ delta.mT  # (b, l, l)
    return torch.einsum("bld,ble->de", x, between_tokens @ x), x.shape[0] * delta.shape[-1]


@dataclass(frozen=True)
class Recipe:
    """A feature of the settings: the features of a block that it is made of, and how."""

    inputs: tuple[str, ...]
    gram: Gram


GRAMS: dict[str, Recipe] = {
    "x": Recipe(("x",), tokens),
    "delta": Recipe(("delta",), tokens),
    "dt": Recipe(("dt",), tokens),
    "out": Recipe(("out",), tokens),
    "in": Recipe(("in",), tokens),
    "delta-x": Recipe(("x", "delta"), delta_x),
    "delta-x-per-image": Recipe(("x", "delta"), delta_x_per_image),
}
