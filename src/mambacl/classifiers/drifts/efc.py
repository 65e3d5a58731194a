"""EFC and EFC++ (Magistri et al., *Elastic Feature Consolidation for Cold Start Exemplar-Free Incremental Learning*,
ICLR 2024): class c moves by the mean movement of the new images, weighted by how close they are to its mean m_c where
the heads' answers depend on it:

    E = mean over images of sum_c p_c g_c g_c^T,  p = softmax(logits(f)),  g_c the gradient of log p_c,
        which is W^T (e_c - p) for linear heads
    d_ci = (x_i - m_c)^T E (x_i - m_c),  scaled to [0, 1] over all classes and images
    b_c = sum_i w_ci (y_i - x_i) / sum_i w_ci,  w_ci = exp((1 - d_ci) / (2 s^2))

E is from the task before, and kept. Acts on means. The same E weights EFC's penalty in training: `penalty`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from mambacl.classifiers.drifts.base import Move, TaskEnd, WithPairs
from mambacl.classifiers.drifts.shift import positive
from mambacl.errors import UserError
from mambacl.options import Options

AT_ONCE = 32  # images


def elastic_sum(features: Tensor, heads: Callable[[Tensor], Tensor]) -> Tensor:
    """E (d, d) times the number of images with these features (n, d), for heads that give logits (n, classes). With the
    gradients J of the logits and P = diag(p) - p p^T, the sum of p_c g_c g_c^T is J^T P J."""
    gradients = torch.func.vmap(torch.func.jacrev(lambda feature: heads(feature[None])[0]))
    total = features.new_zeros(features.shape[1], features.shape[1])
    for part in features.split(AT_ONCE):
        p, j = heads(part).detach().softmax(1), gradients(part).detach()  # j (b, classes, d)
        centred = j - (p[:, None] @ j)
        total += ((p[:, :, None] * centred).mT @ centred).sum(0)
    return total


def penalty(new: Tensor, old: Tensor, matrix: Tensor, weight: float, damping: float) -> Tensor:
    """The mean over images of (y - x)^T (weight E + damping I) (y - x)."""
    moved = new - old
    return weight * ((moved @ matrix) * moved).sum(1).mean() + damping * moved.square().sum(1).mean()


def elastic_shift(old: Tensor, moved: Tensor, points: Tensor, matrix: Tensor, variance: float) -> Tensor:
    """How far points (c, d) move: the mean of `moved` (n, d), weighted by the distance to `old` (n, d) under E."""
    differences = (old - point for point in points)
    distances = torch.stack([((x @ matrix) * x).sum(1) for x in differences])
    least, most = distances.min(), distances.max()
    scaled = (distances - least) / (most - least).clamp(min=torch.finfo(distances.dtype).tiny)
    return torch.softmax(-scaled / (2 * variance), dim=1) @ moved


@dataclass(frozen=True)
class EFCOptions(Options):
    """Options of the drift efc."""

    sigma: Annotated[float, positive] = 0.2
    """s"""


class EFC(WithPairs):
    name = "efc"
    options_class: ClassVar[type] = EFCOptions
    needs_features = True
    keeps_matrix = True

    def __init__(self, options: Any = None, end: TaskEnd | None = None) -> None:
        super().__init__(options, end)
        if self.end.heads is None:
            raise UserError("The drift efc needs heads: call follow with TaskEnd(heads=...), or choose another drift.")

    def move(self, means: Tensor, covariances: Tensor | None = None) -> Move:
        assert self.end.heads is not None
        (x, y), before = self.pairs(), self.matrix
        self.matrix = elastic_sum(y, self.end.heads).double() / len(y)
        if before is None or not len(means):
            return Move()
        x, y = x.double(), y.double()
        return Move(offset=elastic_shift(x, y - x, means, before, self.options.sigma**2))
