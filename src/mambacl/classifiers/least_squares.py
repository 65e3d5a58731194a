"""Ridge regression from sums: W = (G + r I)^-1 Q, with G = sum h h^T and Q = sum h y^T over all images so far, and the
choice of the ridge r.

Generalised cross-validation (Golub, Heath and Wahba, 1979) estimates the squared error on new images from G, Q and the
number of images alone. So it judges a ridge by the images of all tasks so far, keeps none of them, and every image
counts for the classifier. The squared error is not the accuracy: the ridge with the best accuracy is smaller, by half
a decade in most cases, and `choose` takes that. On De-focus nano's features of CIFAR-100, in 22 cases (192 and 1,728
values, 192 to 3,000 units, 1,000 to 10,000 images), judged by 2,000 or 3,000 other training images, it was 0.14 points
below the best ridge on average; the ridge of the least squared error was 0.66 below.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from mambacl.errors import UserError

PROBES = 64  # random signs, to estimate a trace
STEPS = (-14, 3)  # tried ridges: 10^(step / 2) times G's mean diagonal
STRIDE = 4  # steps
FOR_ACCURACY = -1  # steps from the least squared error
NOT_FINITE = "The sums of the ridge classifier are not those of finite features: fit it again."
CURRENT = torch.logspace(-8, 8, 17, dtype=torch.float64)  # RanPAC's ridges


def factor(gram: Tensor, diagonal: Tensor, ridge: float) -> Tensor | None:
    """The Cholesky factor of G + r I, or None if rounding has made it indefinite. Overwrites the diagonal of `gram`,
    which saves a copy; `diagonal` is G's own."""
    gram.diagonal().copy_(diagonal + ridge)
    lower, failed = torch.linalg.cholesky_ex(gram)
    return None if failed else lower


def solve(gram: Tensor, diagonal: Tensor, sums: Tensor, ridge: float) -> Tensor:
    """W (classes, units) from Q (classes, units)."""
    return solution(checked_factor(gram, diagonal, ridge), sums)


def checked_factor(gram: Tensor, diagonal: Tensor, ridge: float) -> Tensor:
    """`factor`, or an error with the remedy."""
    lower = factor(gram, diagonal, ridge)
    if lower is None:
        raise UserError(f"The ridge {ridge:g} is too small for sums in this precision: set a larger one, or auto.")
    return lower


def allowed(gram: Tensor, diagonal: Tensor, ridge: float) -> tuple[float, Tensor]:
    """This ridge, or the next larger one of CURRENT that the precision of the sums allows, and the Cholesky factor: a
    few images that are easy to tell apart choose the smallest of them."""
    for larger in (ridge, *(r for r in CURRENT.tolist() if r > ridge)):
        lower = factor(gram, diagonal, larger)
        if lower is not None:
            return larger, lower
    raise UserError(NOT_FINITE)


def solution(lower: Tensor, sums: Tensor) -> Tensor:
    """W (classes, units) from the Cholesky factor and Q (classes, units)."""
    return torch.cholesky_solve(sums.T.to(lower.dtype), lower).T


def rises(gram: Tensor, diagonal: Tensor, sums: Tensor, images: int, ridge: float) -> bool:
    """Whether the generalised error, images * R / F^2, rises with the ridge r at this point.

    With A = G + r I, the residuals of one-hot targets have the sum of squares R = n - tr(Q^T W) - r tr(W^T W), whose
    derivative is 2 r tr(W^T A^-1 W). F = n - tr(G A^-1) = n - units + r tr(A^-1) is the number of images less the
    degrees of freedom; its derivative is tr(A^-1) - r tr(A^-2). Traces are estimated with fixed random signs.
    """
    lower = factor(gram, diagonal, ridge)
    if lower is None:
        return False
    signs = torch.randint(2, (len(gram), PROBES), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    signs, targets = signs.to(lower), sums.T.to(lower)
    solved = torch.cholesky_solve(torch.cat([targets, signs], dim=1), lower)
    weights, inverse = solved.split([targets.shape[1], PROBES], dim=1)
    again = torch.cholesky_solve(weights, lower).double()
    weights, inverse = weights.double(), inverse.double()
    residual = images - (targets * weights).sum() - ridge * weights.square().sum()
    trace, square = (signs * inverse).sum() / PROBES, inverse.square().sum() / PROBES
    free = images - len(gram) + ridge * trace
    if residual <= 0 or free <= 0:  # rounding, where the ridge is far too small
        return False
    return bool(2 * ridge * (weights * again).sum() / residual > 2 * (trace - ridge * square) / free)


def first_true(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The first integer from low to high that a condition holds for, if it holds for all behind it; high if for none
    before."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def choose(gram: Tensor, diagonal: Tensor, sums: Tensor, images: int, least: float = 0.0) -> tuple[float, Tensor]:
    """The ridge, and the Cholesky factor for it: of the ridges tried, all above `least`, the one with the lowest
    generalised error, moved by FOR_ACCURACY, or the next larger one that the precision of the sums allows."""
    unit = max(float(diagonal.mean()), least) or 1.0
    lowest = STEPS[0]
    if least:
        lowest = max(lowest, math.floor(2 * math.log10(least / unit)) + 1 - FOR_ACCURACY)

    def past(step: int) -> bool:
        """Whether the valley is at this step or before."""
        return rises(gram, diagonal, sums, images, unit * 10 ** ((step + 0.5) / 2))

    # From above: with fewer images than units, the error falls again for ridges far below the valley.
    high = STEPS[1]
    low = high - STRIDE
    while low >= lowest and past(low):
        low, high = low - STRIDE, low
    step = first_true(past, max(low + 1, lowest), high)
    for larger in range(step + FOR_ACCURACY, STEPS[1] + 1):
        ridge = unit * 10 ** (larger / 2)
        lower = factor(gram, diagonal, ridge)
        if lower is not None:
            return ridge, lower
    raise UserError(NOT_FINITE)


def current_task_errors(lifted: Tensor, targets: Tensor, share: float) -> Tensor:
    """RanPAC's choice: fits each of CURRENT to all but the last `share` of the task's images (n, units) and returns the
    mean squared errors on those, in float64. The order of the images matters."""
    lifted, targets = lifted.double(), targets.double()
    count = max(1, int((1 - share) * len(lifted)))
    h, y = lifted[:count], targets[:count]
    values, vectors = torch.linalg.eigh(h @ h.T)
    # W = h^T (h h^T + r I)^-1 y, so that all ridges share one decomposition.
    seen, held = vectors.T @ y, lifted[count:] @ (h.T @ vectors)
    fits = (held @ (seen / (values.clamp(min=0) + ridge)[:, None]) for ridge in CURRENT.tolist())
    return torch.stack([(fit - targets[count:]).square().mean() for fit in fits])
