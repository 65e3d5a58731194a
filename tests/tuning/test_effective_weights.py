"""A layer that runs with another weight than its own."""

import pytest
import torch
from torch import nn

from mambacl.tuning.effective_weights import use_weight


def test_a_layer_uses_the_given_weight_and_keeps_its_own():
    layer, given = nn.Linear(3, 2), torch.randn(2, 3, requires_grad=True)
    own, current = layer.weight, [given]
    use_weight(layer, lambda: current[0])
    x = torch.randn(4, 3)
    assert torch.equal(layer(x), x @ given.T + layer.bias)
    layer(x).sum().backward()
    assert given.grad is not None and own.grad is None
    assert layer.weight is own and list(layer.state_dict()) == ["weight", "bias"]
    current[0] = None
    assert torch.equal(layer(x), nn.functional.linear(x, own, layer.bias))


def test_the_own_weight_is_back_after_an_error():
    layer = nn.Linear(3, 2)
    own = layer.weight
    use_weight(layer, lambda: torch.zeros(2, 3))
    with pytest.raises(RuntimeError):
        layer(torch.randn(4, 5))
    assert layer.weight is own
