"""Directions that gradients must not have: a basis of what earlier tasks' features need, grown task by task (GPM).

Features are rows x of X. A change dp of a parameter's rows leaves x . dp alone if dp is orthogonal to all x. So a basis
F keeps the leading directions of the rows, and a gradient g becomes g - g F F^T. Works with any backbone.
"""

from collections.abc import Iterable, Mapping

from torch import Tensor

from mambacl.nullspace.subspaces import Subspace, grown


def gram(rows: Iterable[Tensor]) -> Tensor:
    """X^T X in float64, from parts (..., c) of X."""
    total: Tensor | None = None
    for part in rows:
        flat = part.flatten(0, -2).double()
        total = flat.T @ flat if total is None else total.addmm_(flat.T, flat)
    assert total is not None
    return total


class GradientBases:
    """Bases by name; empty before the first task has ended."""

    def __init__(self, width: int, like: Tensor) -> None:
        self.width, self.like = width, like
        self.bases: dict[str, Tensor] = {}

    def grow(self, name: str, products: Tensor, threshold: float) -> None:
        basis = self.bases.get(name, self.like.new_zeros(self.width, 0))
        self.bases[name] = grown(Subspace(basis), products, threshold).basis

    def project(self, gradient: Tensor, name: str) -> None:
        """Changes a gradient (..., c) in place; its last axis may be split, as in (..., heads, d)."""
        if (basis := self.bases.get(name)) is not None:
            rows = gradient.reshape(-1, self.width)
            gradient.copy_((rows - rows @ basis @ basis.T).view_as(gradient))

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.bases)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.bases = {name: tensor.to(self.like) for name, tensor in state.items()}
