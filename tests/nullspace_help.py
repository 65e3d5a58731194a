"""What the tests of the null space share."""

from pathlib import Path

import torch

from mambacl.nullspace import NullSpace

GOLDENS = Path(__file__).parent / "goldens"
X_PROJ, A_LOG, OUT = "mixer.x_proj.weight", "mixer.A_log", "mixer.out_proj.weight"


def images(count=4, seed=0, dtype=torch.float32):
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def snapshot(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def set_random_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def relative(actual, expected):
    assert actual.shape == expected.shape
    return ((actual - expected).norm() / expected.norm()).item()


def consolidated(model, tasks=1, **overrides):
    space = NullSpace(model, **overrides)
    for task in range(tasks):
        space.consolidate([images(seed=task)])
    return space
