"""Covariances of a block's features, one batch at a time: Q += J^T J of Algorithm 1 without storing J.

The features of a block are (images, tokens, channels): x, delta, dt, B, C, out; a plain layer's is `in`. `GRAMS` maps
the feature names of settings to the functions that compute a batch's contribution.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mambacl.nullspace.statistics import Accumulator


def gram(rows: Tensor) -> Tensor:
    """J^T J of the last axis, (..., c) to (c, c)."""
    rows = rows.flatten(0, -2)
    return rows.T @ rows


def tokens(values: Tensor) -> tuple[Tensor, int]:
    if values.dim() == 4:  # a convolution's windows (b, positions, groups, values): one matrix per group
        rows = values.flatten(0, 1).transpose(0, 1)
        return (rows.mT @ rows if len(rows) > 1 else gram(rows)), rows.shape[1]
    return gram(values), values.shape[0] * values.shape[1]


def delta_x(x: Tensor, delta: Tensor) -> tuple[Tensor, int]:
    """delta X of the paper: its rows are delta_{t,c} x_t for each token t and channel c, so the Gram is sum_t
    |delta_t|^2 x_t x_t^T."""
    return gram(x * delta.norm(dim=-1, keepdim=True)), x.shape[0] * x.shape[1] * delta.shape[-1]


def delta_x_per_image(x: Tensor, delta: Tensor) -> tuple[Tensor, int]:
    """The sum over images of M^T M with M = delta^T X, as X^T (delta delta^T) X, which is cheaper for few tokens."""
    between_tokens = delta @ delta.mT  # (b, l, l)
    return torch.einsum("bld,ble->de", x, between_tokens @ x), x.shape[0] * delta.shape[-1]


class Gram(NamedTuple):
    """A feature name of the settings: the block's features it needs, and a function that returns J^T J and the number
    of rows of J."""

    inputs: tuple[str, ...]
    product: Callable[..., tuple[Tensor, int]]


GRAMS: dict[str, Gram] = {
    "x": Gram(("x",), tokens),
    "delta": Gram(("delta",), tokens),
    "dt": Gram(("dt",), tokens),
    "out": Gram(("out",), tokens),
    "in": Gram(("in",), tokens),
    "delta-x": Gram(("x", "delta"), delta_x),
    "delta-x-per-image": Gram(("x", "delta"), delta_x_per_image),
}


class Covariance(Accumulator):
    """The uncentred covariance of a feature: the sum over all rows, the sum of each batch's mean, or of the Gram of
    each batch's mean image."""

    def __init__(self, feature: str, inputs: Sequence[str], accumulate: str = "sum") -> None:
        super().__init__(inputs)
        self.product, self.accumulate = GRAMS[feature].product, accumulate

    def contribution(self, *features: Tensor) -> dict[str, Tensor]:
        if self.accumulate == "mean-input":
            features = tuple(feature.mean(0, keepdim=True) for feature in features)
        total, rows = self.product(*features)
        return {"covariance": total.double() / (max(rows, 1) if self.accumulate == "batch-mean" else 1)}
