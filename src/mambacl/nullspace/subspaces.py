"""A subspace of inputs that later updates leave alone, grown task by task: GPM, DualGPM and the memory of InfLoRA.

Inputs of a layer are the columns of R (d, n); all functions take their second moment R R^T (d, d), whose eigenvalues
are the squared singular values of R. A task adds the leading directions of what its inputs have outside of the
subspace, until the subspace holds a share of their energy |R|^2.

GPM stores the subspace itself. DualGPM stores the smaller of the subspace ("remove") and its complement ("retain"), so
at most d / 2 columns. It adds the same directions either way: "covered energy below eps" and "energy left above
1 - eps" are one condition.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDING = 1e-12  # relative: a share that is missed by less is reached


@dataclass(frozen=True)
class Subspace:
    """Protected directions: those of `basis`, or all others if `retain`, in which case `basis` spans the free ones."""

    basis: Tensor  # (d, k), orthonormal columns
    retain: bool = False

    @property
    def protected(self) -> int:
        """Number of protected directions."""
        size, columns = self.basis.shape
        return size - columns if self.retain else columns

    def inside(self, rows: Tensor) -> Tensor:
        """The protected component of each row, (n, d)."""
        spanned = rows @ self.basis @ self.basis.mT
        return rows - spanned if self.retain else spanned

    def outside(self, rows: Tensor) -> Tensor:
        """The free component of each row, (n, d)."""
        return rows - self.inside(rows)

    def smaller(self) -> "Subspace":
        """The same with the basis of the smaller space; at exactly d / 2 directions, of the protected ones."""
        size, columns = self.basis.shape
        keep = 2 * columns <= size if not self.retain else 2 * columns < size
        return self if keep else Subspace(complement(self.basis), not self.retain)

    def plain(self) -> "Subspace":
        """The same with a basis of the protected directions."""
        return Subspace(complement(self.basis)) if self.retain else self


def nothing(size: int, like: Tensor) -> Subspace:
    """No protected direction, in float64 on the device of `like`."""
    return Subspace(torch.zeros(size, 0, dtype=torch.float64, device=like.device))


def complement(basis: Tensor) -> Tensor:
    """An orthonormal basis of the directions orthogonal to the columns of a basis (d, k): (d, d - k)."""
    return torch.linalg.qr(basis, mode="complete")[0][:, basis.shape[1] :]


def squared(covariance: Tensor) -> Tensor:
    """The moment to pass where code takes a covariance for R itself, as InfLoRA's does: its energies are then squared
    eigenvalues of the covariance."""
    return covariance @ covariance.mT


def grown(
    space: Subspace, moment: Tensor, share: float, *, below_at_first: bool = False, at_least: int = 0
) -> Subspace:
    """The subspace with the fewest further directions with which it holds this share of the energy of `moment`, the
    second moment of a task's inputs.

    `below_at_first`: the first basis has all directions *before* the share is reached, as in the released code of GPM,
    DualGPM and InfLoRA. `at_least`: smallest number of directions of the first basis.
    """
    moment, basis = moment.double(), space.basis.double()
    if space.retain:
        values, vectors = descending(basis.mT @ moment @ basis)
        vectors = basis @ vectors
    else:
        left = moment - basis @ (basis.mT @ moment)
        values, vectors = descending(left - (left @ basis) @ basis.mT)
    total, free = moment.trace(), len(moment) - space.protected
    values, vectors = values[:free].clamp(min=0), vectors[:, :free]
    further = torch.cat((values.new_zeros(1), values.cumsum(0)))  # energy of 0, 1, ... further directions
    covered = (total - values.sum()).clamp(min=0) + further
    missing = int((covered < share * total * (1 - ROUNDING)).sum())
    if space.protected == 0:
        missing = max(missing - 1 if below_at_first else missing, at_least)
    count = min(missing, free)
    if space.retain:
        return Subspace(vectors[:, count:].to(space.basis.dtype), retain=True)
    return Subspace(torch.cat((space.basis, vectors[:, :count].to(space.basis.dtype)), dim=1))


def dual_grown(
    space: Subspace, moment: Tensor, share: float, *, below_at_first: bool = False, at_least: int = 0
) -> Subspace:
    """DualGPM: the same, stored by the smaller space. Once that is the complement, it remains so, since the complement
    only shrinks."""
    return grown(space, moment, share, below_at_first=below_at_first, at_least=at_least).smaller()


GROWTH: dict[str, Callable[..., Subspace]] = {"gpm": grown, "dual-gpm": dual_grown}


def descending(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a symmetric matrix, the largest first."""
    values, vectors = torch.linalg.eigh((moment + moment.mT) / 2)
    return values.flip(0), vectors.flip(1)
