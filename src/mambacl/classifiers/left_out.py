"""What a classifier would say about an image if it had never seen it, or never its class: closed forms from its sums.

Images are rows h (units,) of a ridge regression, A = G + r I, W = A^-1 Q. The views of an image, itself and maybe its
mirror image, are left out together.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def without_images(scores: Tensor, leverages: Tensor, labels: Tensor) -> Tensor:
    """The scores (n, views, classes) of images if the regression had been fitted without them, each one on its own.

    `leverages` is H A^-1 H^T (n, views, views) of each image's views H. Without them, the residuals Y - H W become
    (I - H A^-1 H^T)^-1 (Y - H W): the Sherman-Morrison-Woodbury identity, as in the PRESS statistic (Allen, 1974).
    """
    targets = F.one_hot(labels, scores.shape[2]).to(scores)[:, None]
    identity = torch.eye(scores.shape[1], dtype=scores.dtype, device=scores.device)
    return targets - torch.linalg.solve(identity - leverages, targets - scores)


def without_class(scores: Tensor, products: Tensor, counts: Tensor, labels: Tensor) -> Tensor:
    """The scores (n, views, classes) of images if the regression had never seen their class; that of the class itself
    means nothing.

    G holds no sums per class, but the largest part of what class c adds to it is q q^T / n, with the sum q of its n
    rows; the rest, its variation around its mean, is much like that of other classes and stays. Removing that part,
    and the column c of Q, adds s_c (q^T W)_k / (n - q^T W_c) to the score of class k. `products` is Q^T W (classes,
    classes).
    """
    own = scores.gather(2, labels[:, None, None].expand(-1, scores.shape[1], 1))
    left = (counts.to(products) - products.diagonal()).clamp(min=torch.finfo(products.dtype).tiny)
    return scores + own * (products / left[:, None])[labels][:, None]


def without_own(scores: Tensor, labels: Tensor) -> Tensor:
    """The scores (n, views, classes) with minus infinity for each image's own class."""
    return scores.scatter(2, labels[:, None, None].expand(-1, scores.shape[1], 1), -torch.inf)


def regression(
    lower: Tensor, rows: Tensor, sums: Tensor, counts: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """W (classes, units), and the scores of rows (n, views, units) without the image and without its class, from the
    Cholesky factor of A, Q as (classes, units), and the number of rows per class; all in float64."""
    weights = torch.cholesky_solve(sums.T.to(lower.dtype), lower).T.double()
    half = torch.linalg.solve_triangular(lower, rows.flatten(0, 1).T.to(lower.dtype), upper=False)
    half = half.T.double().unflatten(0, rows.shape[:2])
    known = without_images(rows.double() @ weights.T, half @ half.mT, labels)
    return weights, known, without_class(known, sums @ weights.T, counts, labels)
