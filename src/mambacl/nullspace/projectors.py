"""From a covariance to the projection of an update, eta H + (1 - eta) I with H = U U^T.

U spans the null directions. H is kept by the smaller of the two spaces: with V spanning the others, U U^T = I - V
V^T. Either way the projection is `identity` I + `factor` V V^T for one orthonormal basis V.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mambacl.nullspace.ranks import as_spectrum, null_rank

Side = Literal["right", "left"]


@dataclass(frozen=True)
class Projector:
    basis: Tensor  # (D, r), orthonormal columns
    identity: float
    factor: float

    def apply(self, update: Tensor, side: Side) -> Tensor:
        """P update (left, update (D, n)) or update P (right, update (n, D))."""
        V = self.basis
        update = update.to(V.dtype)
        low_rank = V @ (V.T @ update) if side == "left" else (update @ V) @ V.T
        return self.identity * update + self.factor * low_rank

    def dense(self) -> Tensor:
        eye = torch.eye(len(self.basis), dtype=self.basis.dtype, device=self.basis.device)
        return self.identity * eye + self.factor * self.basis @ self.basis.T


@dataclass(frozen=True)
class Decomposition:
    """The spectrum of a covariance, descending, the number of null directions, and the basis of the smaller space."""

    spectrum: Tensor
    rank: int
    basis: Tensor

    def projector(self, eta: float, scaling: str) -> Projector:
        strength = eta
        if scaling == "frobenius" and self.rank > 0:
            strength /= self.rank**0.5  # the norm of U U^T is sqrt(R)
        if holds_null_space(self.rank, len(self.spectrum)):
            return Projector(self.basis, 1 - eta, strength)
        return Projector(self.basis, 1 - eta + strength, -strength)


def holds_null_space(rank: int, size: int) -> bool:
    """Whether the kept basis spans the null directions rather than the others: the fewer of them."""
    return rank < size - rank


def decompose(covariance: Tensor, rule: str, precision: torch.dtype) -> Decomposition:
    """`eigh` in float64, and the rank by the rule, which sees the spectrum in the precision given."""
    eigenvalues, vectors = torch.linalg.eigh(covariance.double())  # ascending: the null directions come first
    spectrum = as_spectrum(eigenvalues)
    rank = null_rank(spectrum.to(precision), rule)
    basis = vectors[:, :rank] if holds_null_space(rank, len(spectrum)) else vectors[:, rank:]
    return Decomposition(spectrum, rank, basis.contiguous())


def dense_projector(covariance: Tensor, rank: int, eta: float, scaling: str) -> Tensor:
    """The textbook twin: the whole matrix by SVD, as the paper writes it."""
    U, _, _ = torch.linalg.svd(covariance.double())
    null = U[:, U.shape[1] - rank :]
    H = null @ null.T
    if scaling == "frobenius" and rank > 0:
        H = H / torch.linalg.norm(H)
    return eta * H + (1 - eta) * torch.eye(len(H), dtype=H.dtype, device=H.device)
