"""Directions that gradients must not have: a basis of what earlier tasks' features need, grown task by task (GPM).

Features are rows x of X. A change dp of a parameter's rows leaves x . dp alone if dp is orthogonal to all x. So a basis
F keeps the leading directions of the rows, and a gradient g becomes g - g F F^T. Works with any backbone.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def gram(rows: Iterable[Tensor]) -> Tensor:
    """X^T X in float64, from parts (..., c) of X."""
    total: Tensor | None = None
    for part in rows:
        flat = part.flatten(0, -2).double()
        total = flat.T @ flat if total is None else total.addmm_(flat.T, flat)
    assert total is not None
    return total


def grown(basis: Tensor, products: Tensor, threshold: float) -> Tensor:
    """The basis (c, k) with as many further directions as it needs to hold this share of the squared length of the rows
    X, from X^T X (c, c): the leading ones of what is left of X outside of the basis."""
    own = basis.double()
    outside = torch.eye(len(products), dtype=torch.float64, device=products.device) - own @ own.T
    left = outside @ products @ outside
    total = products.trace()
    values, vectors = torch.linalg.eigh((left + left.T) / 2)
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    held = total - left.trace() + torch.cat((values.new_zeros(1), values.cumsum(0)))  # with 0, 1, ... further ones
    missing = held < threshold * total * (1 - 1e-12)
    count = min(int(missing.sum()), len(products) - basis.shape[1])
    return torch.cat((basis, vectors[:, :count].to(basis)), dim=1)


class GradientBases:
    """Bases by name; empty before the first task has ended."""

    def __init__(self, width: int, like: Tensor) -> None:
        self.width, self.like = width, like
        self.bases: dict[str, Tensor] = {}

    def grow(self, name: str, products: Tensor, threshold: float) -> None:
        basis = self.bases.get(name, self.like.new_zeros(self.width, 0))
        self.bases[name] = grown(basis, products, threshold)

    def project(self, gradient: Tensor, name: str) -> None:
        """Changes a gradient (..., c) in place; its last axis may be split, as in (..., heads, d)."""
        if (basis := self.bases.get(name)) is not None:
            rows = gradient.reshape(-1, self.width)
            gradient.copy_((rows - rows @ basis @ basis.T).view_as(gradient))

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.bases)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.bases = {name: tensor.to(self.like) for name, tensor in state.items()}
