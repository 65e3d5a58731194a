"""What the tests of several tasks share."""

import re

import torch
from nullspace_help import images

from mambacl.nullspace import NullSpace

SETTINGS = {
    "paper": {"rank": "energy:0.9"},
    "public-code": {"setting": "public-code"},
    "exact": {"setting": "exact"},
    "boxes": {"setting": "exact", "relax": 0.05},
    "every layer": {"setting": "exact", "layers": "all"},
}


def space_of(model, tasks, kind="paper", **overrides):
    """A space that saw these tasks, an image or two each."""
    space = NullSpace(model, **{**SETTINGS[kind], **overrides})
    for task in tasks:
        space.consolidate([images(1 + task % 2, seed=task)])
    return space


def copied(space):
    return {name: tensor.clone() for name, tensor in space.state_dict().items()}


def same(state, other):
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


def assert_same_protection(space, other):
    """To the bit: covariances, projectors, boxes."""
    assert space.tasks == other.tasks
    assert same(space.covariances(), other.covariances())
    assert space.projectors().keys() == other.projectors().keys()
    for name, projector in other.projectors().items():
        own = space.projectors()[name]
        assert torch.equal(own.basis, projector.basis), name
        assert torch.equal(torch.as_tensor(own.factor), torch.as_tensor(projector.factor)), name
    mine, theirs = space.projected_step.boxes(), other.projected_step.boxes()
    for name, box in theirs.items():
        assert torch.equal(mine[name].lower, box.lower) and torch.equal(mine[name].upper, box.upper)


def one_sentence(error):
    text = str(error.value)
    return "\n" not in text and text.endswith(".") and len(re.findall(r"\.(?= [A-Z])", text)) == 0
