"""The choice of the ridge from sums against the generalised error of the images."""

import math

import pytest
import torch
import torch.nn.functional as F
from ridge_help import WIDTH, D, some
from tolerance import assert_near
from torch import Tensor

from mambacl.classifiers.least_squares import CURRENT, STEPS, allowed, choose, factor, first_true, rises, solve
from mambacl.classifiers.lift import draw
from mambacl.errors import UserError


def sums_of(h: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gram = h.T @ h
    return gram, gram.diagonal().clone(), F.one_hot(labels).to(h).T @ h


def noisy(count: int, units: int) -> tuple[Tensor, Tensor]:
    """Lifted features with more noise than signal, in float64."""
    generator = torch.Generator().manual_seed(3)
    means = torch.randn(10, 50, generator=generator, dtype=torch.float64)
    labels = torch.arange(count) % 10
    features = means[labels] + 4 * torch.randn(count, 50, generator=generator, dtype=torch.float64)
    return torch.relu(features @ draw(50, units, 0).double()), labels


@pytest.mark.parametrize("images", [30, 120])
def test_the_slope_of_the_generalised_error_is_that_of_the_images(images: int) -> None:
    """The slope is known from the hat matrix; where it is clear, the estimate from sums has its sign."""
    features, labels = some(images)
    h = torch.relu(features.double() @ draw(D, WIDTH, 0).double())
    y, clear = F.one_hot(labels).double(), 0
    gram, diagonal, sums = sums_of(h, labels)

    def error(ridge: float) -> float:
        hat = h @ torch.linalg.solve(h.T @ h + ridge * torch.eye(WIDTH), h.T)
        return float(images * (y - hat @ y).square().sum() / (images - hat.trace()) ** 2)

    for ridge in (10.0 ** (step / 2) for step in range(-2, 11)):
        slope = (error(1.01 * ridge) - error(ridge / 1.01)) / (2 * math.log(1.01) * error(ridge))
        if abs(slope) > 0.1:
            clear += 1
            assert rises(gram.clone(), diagonal, sums, images, ridge) == (slope > 0), ridge
    assert clear >= 4


def test_the_first_that_holds() -> None:
    for first in range(-5, 4):
        asked: list[int] = []
        assert first_true(lambda x, f=first, a=asked: a.append(x) or x >= f, -5, 3) == first
        assert len(asked) <= 4 and all(-5 <= x < 3 for x in asked)
    assert first_true(lambda x: False, -5, 3) == 3


@pytest.mark.parametrize("units", [40, 300])  # fewer units than images, and more
def test_the_choice_is_half_a_decade_below_the_least_error(units: int) -> None:
    """The least generalised error of the images, in float64, of all ridges that are tried."""
    h, labels = noisy(200, units)
    gram, diagonal, sums = sums_of(h, labels)
    y, unit = F.one_hot(labels).double(), diagonal.mean().item()

    def error(step: int) -> float:
        inverse = torch.linalg.inv(gram + unit * 10 ** (step / 2) * torch.eye(units, dtype=torch.float64))
        hat = h @ inverse @ h.T
        return float((y - hat @ y).square().sum() / (200 - hat.trace()) ** 2)

    least = min(range(*STEPS), key=error)
    assert STEPS[0] < least < STEPS[1]
    assert choose(gram.clone(), diagonal, sums, 200)[0] == pytest.approx(unit * 10 ** ((least - 1) / 2))


def test_a_ridge_that_the_precision_does_not_allow_gives_way_to_the_next() -> None:
    """A G whose least eigenvalue is -0.02, as rounding can make it: 0.01 would be chosen, 10^-1.5 is the next."""
    basis = torch.linalg.qr(torch.randn(20, 20, generator=torch.Generator().manual_seed(0)).double())[0]
    values = torch.ones(20, dtype=torch.float64)
    values[0], values[1] = -0.02, 2.02  # the mean is 1
    gram = basis @ values.diag() @ basis.T
    diagonal, sums = gram.diagonal().clone(), 990**0.5 * basis[:, 2][None]  # 990 of 1000 images are explained
    assert factor(gram.clone(), diagonal, 0.01) is None
    assert not rises(gram.clone(), diagonal, sums, 1000, 0.01) and rises(gram.clone(), diagonal, sums, 1000, 0.05)
    ridge, lower = choose(gram.clone(), diagonal, sums, 1000)
    assert ridge == pytest.approx(10**-1.5)
    assert_near(lower @ lower.T, gram + ridge * torch.eye(20, dtype=torch.float64), 20)
    with pytest.raises(UserError, match="not those of finite features"):
        choose(gram * torch.nan, diagonal, sums, 1000)


def test_the_choice_is_near_the_best_ridge_for_other_images() -> None:
    """More units than images, where a ridge matters."""
    h, labels = noisy(1200, 300)
    gram, diagonal, sums = sums_of(h[:200], labels[:200])

    def accuracy(ridge: float) -> float:
        weights = solve(gram, diagonal, sums, ridge)
        return ((h[200:] @ weights.T).argmax(1) == labels[200:]).double().mean().item()

    chosen, lower = choose(gram.clone(), diagonal, sums, 200)
    assert chosen == choose(gram.clone(), diagonal, sums, 200)[0] == choose(gram.float(), diagonal, sums, 200)[0]
    assert_near(lower @ lower.T, gram + chosen * torch.eye(300, dtype=torch.float64), 300)
    unit = float(diagonal.mean())
    best = max(accuracy(unit * 10.0**power) for power in range(-4, 4))
    assert accuracy(chosen) > best - 0.02 and accuracy(unit * 1e-4) < best - 0.05


def test_a_ridge_below_the_precision_of_the_sums_is_raised() -> None:
    """RanPAC's choice sees one task in float64; the sums of all tasks are stored in float32."""
    h = torch.randn(20, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = h.T @ h  # singular
    for gram, raised in ((exact + torch.eye(100), False), (exact.float().double() - 1e-6 * torch.eye(100), True)):
        ridge, lower = allowed(gram.clone(), gram.diagonal().clone(), 1e-8)
        assert (ridge > 1e-8) == raised and ridge in CURRENT
        torch.testing.assert_close(lower @ lower.T, gram + ridge * torch.eye(100))
    with pytest.raises(UserError, match="not those of finite features"):
        allowed(torch.full((2, 2), torch.nan), torch.ones(2), 1.0)
