"""Gradients without their share in the directions of features."""

import torch

from mambacl.tuning.gradient_bases import GradientBases, gram


def rows(count, seed, scales=(5.0, 3.0, 2.0, 1.0, 0.5, 0.1)):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))[0]
    return torch.randn(count, 6, generator=generator, dtype=torch.float64) * torch.tensor(scales) @ mix


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
