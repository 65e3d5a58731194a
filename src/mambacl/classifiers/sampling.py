"""Samples of Gaussians."""

import torch
from torch import Tensor


def root(matrices: Tensor) -> Tensor:
    """R with R R^T = S, for symmetric matrices (c, d, d); negative eigenvalues count as zero."""
    factors, failed = torch.linalg.cholesky_ex(matrices)
    for row in failed.nonzero()[:, 0].tolist():
        values, vectors = torch.linalg.eigh(matrices[row])
        factors[row] = vectors * values.clamp(min=0).sqrt()
    return factors


def draw(means: Tensor, roots: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """(classes, count, d): samples of the Gaussians with these means (classes, d) and roots of covariances. The noise
    comes from a generator on the CPU, so that every device draws the same."""
    noise = torch.randn(len(means), count, means.shape[1], generator=generator, dtype=means.dtype).to(means.device)
    return means[:, None] + noise @ roots.mT
