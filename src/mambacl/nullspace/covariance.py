"""Uncentred covariances of a block's features, one batch at a time: Q += J^T J of Algorithm 1 without ever holding J.

A block shows its features as (images, tokens, channels): x, delta and out. Each function here returns the batch's
share of the covariance and the number of rows behind it.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Features = Mapping[str, Tensor]


def gram(rows: Tensor) -> Tensor:
    """J^T J of the last axis, (..., c) to (c, c)."""
    rows = rows.flatten(0, -2)
    return rows.T @ rows


def tokens(name: str) -> Callable[[Features, torch.dtype], tuple[Tensor, int]]:
    def share(features: Features, dtype: torch.dtype) -> tuple[Tensor, int]:
        values = features[name].to(dtype)
        return gram(values), values.shape[0] * values.shape[1]

    return share


def delta_x(features: Features, dtype: torch.dtype) -> tuple[Tensor, int]:
    """delta X of the paper: its rows are delta_{t,c} x_t for each token t and channel c, so the Gram is sum_t
    |delta_t|^2 x_t x_t^T."""
    x, delta = features["x"].to(dtype), features["delta"].to(dtype)
    return gram(x * delta.norm(dim=-1, keepdim=True)), x.shape[0] * x.shape[1] * delta.shape[-1]


def delta_x_per_image(features: Features, dtype: torch.dtype) -> tuple[Tensor, int]:
    """M^T M of M = delta^T X for each image, summed; as X^T (delta delta^T) X, which is cheaper when tokens are few."""
    x, delta = features["x"].to(dtype), features["delta"].to(dtype)  # (b, l, d)
    between_tokens = delta @ delta.mT  # (b, l, l)
    return torch.einsum("bld,ble->de", x, between_tokens @ x), x.shape[0] * delta.shape[-1]


SHARES: dict[str, Callable[[Features, torch.dtype], tuple[Tensor, int]]] = {
    "x": tokens("x"),
    "delta": tokens("delta"),
    "out": tokens("out"),
    "delta-x": delta_x,
    "delta-x-per-image": delta_x_per_image,
}
