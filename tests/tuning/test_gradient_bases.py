"""Bases of features by plain singular value decompositions, and gradients without their share in them."""

import pytest
import torch

from mambacl.tuning.gradient_bases import GradientBases, gram, grown


def rows(count, seed, scales=(5.0, 3.0, 2.0, 1.0, 0.5, 0.1)):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))[0]
    return torch.randn(count, 6, generator=generator, dtype=torch.float64) * torch.tensor(scales) @ mix


def plainly(basis, x, threshold):
    """As GPM writes it: singular vectors of what is left of X, until both parts hold the share of its norm."""
    left = x - x @ basis @ basis.T
    _, values, vectors = torch.linalg.svd(left, full_matrices=False)
    total, count = x.square().sum(), 0
    held = total - left.square().sum()
    while held < threshold * total:
        held, count = held + values[count] ** 2, count + 1
    return torch.cat((basis, vectors[:count].T), 1)


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.8, 0.97])
def test_a_basis_grows_as_in_gpm(threshold):
    ours = theirs = torch.zeros(6, 0, dtype=torch.float64)
    for task in range(3):
        x = rows(40, task)
        ours, theirs = grown(ours, gram(x.split(7)), threshold), plainly(theirs, x, threshold)
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours @ ours.T, theirs @ theirs.T)  # signs of vectors do not matter
        torch.testing.assert_close(ours.T @ ours, torch.eye(ours.shape[1], dtype=torch.float64))
        assert (x @ ours).square().sum() >= threshold * x.square().sum() * (1 - 1e-9)


def test_a_share_of_one_holds_everything_and_zero_nothing():
    x = rows(40, 0)
    empty = torch.zeros(6, 0, dtype=torch.float64)
    assert grown(empty, gram([x]), 0.0).shape == (6, 0)
    assert 1 <= grown(empty, gram([x[:2]]), 1.0).shape[1] <= 3
    assert grown(grown(empty, gram([x]), 1.0), gram([rows(40, 1)]), 1.0).shape[1] <= 6


def test_projected_gradients():
    """Nothing is left along the features; a split last axis is the same axis."""
    bases = GradientBases(6, torch.zeros(1, dtype=torch.float64))
    gradient = rows(4, 9)
    before = gradient.clone()
    bases.project(gradient, "a")
    assert torch.equal(gradient, before)  # no task has ended
    x = rows(2, 1)  # spans two directions
    bases.grow("a", gram([x]), 1.0 - 1e-9)
    bases.project(gradient, "a")
    torch.testing.assert_close(gradient @ x.T, torch.zeros(4, 2, dtype=torch.float64))
    assert gradient.norm() > 0.1
    split = torch.stack((before, before)).unflatten(-1, (2, 3))[1]
    bases.project(split, "a")
    torch.testing.assert_close(split.flatten(-2), gradient)
    other = GradientBases(6, torch.zeros(1, dtype=torch.float64))
    other.load_state_dict(bases.state_dict())
    assert torch.equal(other.bases["a"], bases.bases["a"])
