"""Outputs with earlier values."""

import torch
from torch import nn

from mambacl.tuning.snapshots import output_with, snapshot


def test_the_output_is_that_of_the_earlier_values_and_nothing_changes(tiny_model) -> None:
    model, images = tiny_model(), torch.randn(2, 3, 16, 16)
    before = snapshot(model.named_parameters())
    with torch.no_grad():
        expected = model(images)
        for parameter in model.parameters():
            parameter += 0.1
        now = model(images)
    some = {name: tensor for name, tensor in before.items() if "proj" in name}
    assert torch.equal(output_with(model, before, images), expected)
    assert not torch.equal(output_with(model, some, images), expected)
    found = output_with(model, before, images)
    assert not found.requires_grad and torch.equal(model(images), now)


def test_a_snapshot_is_a_copy() -> None:
    layer = nn.Linear(2, 2)
    values = snapshot(layer.named_parameters())
    with torch.no_grad():
        layer.weight += 1
    assert torch.equal(values["weight"] + 1, layer.weight)
