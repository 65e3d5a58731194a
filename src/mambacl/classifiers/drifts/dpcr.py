"""DPCR (He et al., *Semantic Shift Estimation via Dual-Projection and Classifier Reconstruction for Exemplar-Free
Class-Incremental Learning*, ICML 2025): P = (X^T X + r I)^-1 X^T Y from sums over the new images. A mean m becomes m P,
the second moment of a class about zero P^T M P. Acts on means and covariances.

The paper also projects P to the space that each class's own features span. In the public code this is the identity: it
keeps every direction whose singular value is not exactly 0. It is left out here. The paper's classifier is `ridge` with
the options of `ridge_options.DPCR`.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from mambacl.classifiers.drifts.base import Drift, Move, TaskEnd
from mambacl.classifiers.drifts.linear import regularised
from mambacl.options import Options, finite_from

STEPS = 20  # tries with ten times the ridge each


@dataclass(frozen=True)
class DPCROptions(Options):
    """Options of the drift dpcr."""

    ridge: Annotated[float, finite_from(0)] = 1e-9
    """r; where rounding makes the sum indefinite, it is multiplied by 10 until it is not"""


def ridge_map(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    """(X^T X + r I)^-1 X^T Y, from X^T X and X^T Y (d, d)."""
    least = torch.finfo(gram.dtype).eps * float(gram.diagonal().mean())
    for _ in range(STEPS):
        lower = regularised(gram, ridge)
        if lower is not None:
            return torch.cholesky_solve(cross, lower)
        ridge = 10 * max(ridge, least)
    return torch.linalg.pinv(gram, hermitian=True) @ cross


class DPCR(Drift):
    name = "dpcr"
    options_class: ClassVar[type] = DPCROptions

    def __init__(self, options: Any = None, end: TaskEnd | None = None) -> None:
        super().__init__(options, end)
        self.sums: Tensor | None = None  # (2, d, d): X^T X and X^T Y

    def update(self, old: Tensor, new: Tensor, labels: Tensor) -> None:
        found = torch.stack([old.T @ old, old.T @ new])
        self.sums = found if self.sums is None else self.sums + found

    def move(self, means: Tensor, covariances: Tensor | None = None) -> Move:
        assert self.sums is not None
        return Move(matrix=ridge_map(self.sums[0], self.sums[1], self.options.ridge))
