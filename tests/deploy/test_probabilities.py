"""Scores become probabilities."""

import torch
from tolerance import assert_near

from mambacl.deploy.probabilities import as_probabilities, onto_simplex


def by_bisection(row: torch.Tensor) -> torch.Tensor:
    """The plain twin: looks for the number to subtract."""
    low, high = float(row.max()) - 1, float(row.max())
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if float((row - middle).clamp(min=0).sum()) > 1 else (low, middle)
    return (row - low).clamp(min=0)


def test_the_projection_is_that_of_a_search() -> None:
    scores = torch.randn(50, 7, generator=torch.Generator().manual_seed(0)).double()
    found = onto_simplex(scores)
    assert (found >= 0).all()
    assert_near(found.sum(1), torch.ones(50).double(), 7)
    assert_near(found, torch.stack([by_bisection(row) for row in scores]), 7, size=float(scores.abs().max()))
    assert torch.equal(found.argmax(1), scores.argmax(1))


def test_probabilities_stay_what_they_are() -> None:
    already = torch.tensor([[0.2, 0.5, 0.3], [1.0, 0.0, 0.0]], dtype=torch.float64)
    assert_near(as_probabilities(already, True), already, 3)
    assert_near(as_probabilities(already.log(), False), already, 3)


def test_a_class_without_images_has_probability_zero() -> None:
    scores = torch.tensor([[0.7, -torch.inf, 0.1, 0.4]])
    for estimates in (True, False):
        found = as_probabilities(scores, estimates)
        assert found[0, 1] == 0 and torch.isfinite(found).all()
        assert_near(found.sum(1), torch.ones(1).double(), 4)
    assert as_probabilities(torch.tensor([[0.3]]), True).tolist() == [[1.0]]
