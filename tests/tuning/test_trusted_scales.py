"""Scales within earlier subspaces, as in the formulas of TRGP."""

import pytest
import torch
from torch import nn

from mambacl.tuning.trusted_scales import TrustedScales, trusted


def basis(size, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, columns, generator=generator, dtype=torch.float64))[0]


def layer_with_scales():
    torch.manual_seed(0)
    layer = nn.Linear(6, 4).double()
    scales = TrustedScales({"a": layer})
    scales.bases = {0: {"a": basis(6, 2, 0)}, 1: {"a": basis(6, 3, 1)}}
    return layer, scales


def test_a_layer_acts_with_the_effective_weight_of_the_paper():
    layer, scales = layer_with_scales()
    x = torch.randn(5, 3, 6, dtype=torch.float64)
    plain = layer(x)
    scales.add_task(2)
    torch.testing.assert_close(layer(x), plain)  # the scales start at the identity
    assert scales.trusts[2]["a"].tolist() == [1, 0]
    W, effective = layer.weight, layer.weight
    for number, Q in zip((1, 0), scales.scales[2]["a"], strict=True):
        S = scales.bases[number]["a"]
        with torch.no_grad():
            Q.add_(torch.randn(Q.shape, dtype=torch.float64))
        Q = Q[: S.shape[1], : S.shape[1]]
        effective = effective - W @ S @ S.T + W @ S @ Q @ S.T
    expected = x @ effective.T + layer.bias
    torch.testing.assert_close(layer(x), expected)
    gradients = torch.autograd.grad(layer(x).square().sum(), [W, *scales.scales[2]["a"]])
    by_hand = torch.autograd.grad(expected.square().sum(), [W, *scales.scales[2]["a"]])
    for one, other in zip(gradients, by_hand, strict=True):
        torch.testing.assert_close(one, other)
    with scales.using(0):
        torch.testing.assert_close(layer(x), plain)  # the first task has no scales
    torch.testing.assert_close(layer(x), expected)


def test_scales_change_only_what_lies_in_the_trusted_subspaces():
    layer, scales = layer_with_scales()
    scales.add_task(2)
    with torch.no_grad():
        for Q in scales.scales[2]["a"]:
            Q.mul_(3)
    both = torch.cat([scales.bases[number]["a"] for number in (0, 1)], 1)
    outside = torch.randn(4, 6, dtype=torch.float64)
    outside = outside - outside @ both @ torch.linalg.pinv(both)
    with scales.using(None):
        plain = layer(outside)
    torch.testing.assert_close(layer(outside), plain)


def test_tasks_are_trusted_by_their_share_of_the_gradient():
    eye = torch.eye(6, dtype=torch.float64)
    bases = [eye[:, :1], eye[:, 1:3], eye[:, 3:]]
    gradient = torch.tensor([[3.0, 2.0, 0.0, 0.5, 0.0, 0.0]], dtype=torch.float64)
    assert trusted(gradient, bases, 0.5) == [0, 1]  # 3, 2 and 0.5 of 3.64
    assert trusted(gradient, bases, 0.7) == [0] and trusted(gradient, bases, 0.1) == [0, 1]  # two at most
    assert trusted(0 * gradient, bases, 0.5) == []


def test_trust_and_state():
    layer, scales = layer_with_scales()
    scales.add_task(2)
    scales.trust(2, "a", [0])
    assert scales.trusts[2]["a"].tolist() == [0, -1]
    names = [name for name, _ in scales.trained()]
    assert names == ["scales.2.0.a", "scales.2.1.a"]
    layer(torch.randn(2, 6, dtype=torch.float64)).sum().backward()
    first, second = scales.scales[2]["a"]
    assert first.grad is not None and second.grad is None
    with torch.no_grad():
        first.mul_(2)
    again = nn.Linear(6, 4).double()
    again.load_state_dict(layer.state_dict())
    other = TrustedScales({"a": again})
    other.load_state_dict(scales.state_dict())
    other.active = 2
    x = torch.randn(3, 6, dtype=torch.float64)
    size = scales.bases[0]["a"].shape[1]
    S, Q = scales.bases[0]["a"], first[:size, :size]
    torch.testing.assert_close(
        again(x), x @ (layer.weight + layer.weight @ S @ (Q - torch.eye(size)) @ S.T).T + layer.bias
    )
    assert other.state_dict().keys() == scales.state_dict().keys()
    with pytest.raises(KeyError):
        TrustedScales({"b": layer}).load_state_dict(scales.state_dict())
