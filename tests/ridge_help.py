"""Images and options for tests of the ridge classifier, and a plain ridge regression to compare it with."""

from typing import Any

import torch
import torch.nn.functional as F
from tolerance import assert_near
from torch import Tensor

from mambacl.classifiers import Ridge
from mambacl.classifiers.lift import draw

D, WIDTH, CLASSES = 6, 40, 5
PLAIN: dict[str, Any] = {"width": WIDTH, "ridge": 2.0, "activation": "relu", "bandwidth": 1.0}


def some(count: int = 120, classes: int = CLASSES, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Classes with different means, and features of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    means = torch.randn(CLASSES, D, generator=torch.Generator().manual_seed(9))
    features = means[labels] + torch.randn(count, D, generator=generator)
    return features * torch.tensor([1.0, 10.0, 0.1, 1.0, 1.0, 1.0]) + 3, labels


def taught(features: Tensor, labels: Tensor, cuts: int = 1, **options: Any) -> Ridge:
    """One task, in `cuts` parts."""
    made = Ridge(features.shape[1], **{**PLAIN, **options})
    for f, y in zip(features.chunk(cuts), labels.chunk(cuts), strict=True):
        made.update(f, y)
    made.finish_task()
    return made


def joint(features: Tensor, labels: Tensor, test: Tensor, scaled_by: Tensor, ridge: float = 2.0) -> Tensor:
    """Scores of a plain ridge regression in float64."""
    m, s = scaled_by.double().mean(0), scaled_by.double().std(0, correction=0)
    h, t = (torch.relu((f.double() - m) / s @ draw(D, WIDTH, 0).double()) for f in (features, test))
    return t @ torch.linalg.solve(h.T @ h + ridge * torch.eye(WIDTH), h.T @ F.one_hot(labels).double())


ALIKE = 100 * D * WIDTH


def assert_alike(one: Tensor, other: Tensor) -> None:
    """Scores from the same images, rounded differently. G + r I has a condition number of about 500, which multiplies
    errors of the worst direction; ten times the rounding of the sums is for a usual one."""
    assert_near(one, other, ALIKE)
