"""What the tests of a user's own loop share."""

import torch
from nullspace_help import images

from mambacl.nullspace import NullSpace


def doubles(seed=0, count=1):
    return images(count, seed, torch.float64)


def wanted(model, count=4):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(count, model.num_features, generator=generator).to(next(model.parameters()).dtype)


def teach(model, optimizer, steps=5, seed=100, run=None):
    """A few steps on other images."""
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        optimizer.zero_grad()
        ((run or model)(images(4, seed + step, dtype)) - wanted(model)).square().sum().backward()
        optimizer.step()


@torch.no_grad()
def drift(model, old, before):
    return ((model(old) - before).norm() / before.norm()).item()


def protected(tiny_model, setting="exact", **overrides):
    """A model in float64, its space after one task, an old image and the output for it."""
    model = tiny_model().double()
    space = NullSpace(model, setting, **overrides)
    space.consolidate([doubles()])
    return model, space, doubles(), model(doubles()).detach()


def assert_kept(model, start, old, before, tolerance=1e-11):
    moved = [(model.get_parameter(name) - value).norm().item() for name, value in start.items()]
    assert max(moved) > 1e-3, "nothing was learned, so nothing is shown"
    assert drift(model, old, before) < tolerance
