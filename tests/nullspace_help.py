"""What the tests of the null space share."""

from pathlib import Path

import torch

from mambacl.nullspace import NullSpace
from mambacl.nullspace.block_readers import find_blocks
from mambacl.nullspace.statistics import value, watching

GOLDENS = Path(__file__).parent / "goldens"
X_PROJ, A_LOG, OUT = "mixer.x_proj.weight", "mixer.A_log", "mixer.out_proj.weight"


def images(count=4, seed=0, dtype=torch.float32):
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def snapshot(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def set_random_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.grad = gradient.to(parameter.device)


def relative(actual, expected):
    assert actual.shape == expected.shape
    return ((actual - expected).norm() / expected.norm()).item()


def consolidated(model, tasks=1, **overrides):
    space = NullSpace(model, **overrides)
    for task in range(tasks):
        space.consolidate([images(seed=task)])
    return space


def observed(model, batch, index):
    """What one block shows of a batch."""
    seen = {}
    block = find_blocks(model)[index]
    with watching([block], lambda _, features: seen.update({k: value(features, k) for k in features})), torch.no_grad():
        model(batch)
    return seen


def hooks(model):
    """How many hooks there are in a model."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
