"""One linear layer over all classes, stored per task."""

import torch

from mambacl.classifiers.joint import JointHeads, WideningHeads


def test_all_rows_train_as_one_layer() -> None:
    heads = JointHeads(4)
    for task in range(2):
        heads.add_task(3, seed=task)
    assert [name for name, _ in heads.trained()] == [
        f"heads.{i}.{kind}" for i in range(2) for kind in ("weight", "bias")
    ]
    assert all(parameter.requires_grad for _, parameter in heads.trained())
    features = torch.randn(5, 4)
    weight, bias = (torch.cat([getattr(head, kind) for head in heads.heads]) for kind in ("weight", "bias"))
    torch.testing.assert_close(heads(features), features @ weight.T + bias)
    other = JointHeads(4)
    other.load_state_dict(heads.state_dict())
    assert torch.equal(other(features), heads(features)) and len(other.trained()) == 4


def test_widening_keeps_what_was_there() -> None:
    heads = WideningHeads(4)
    heads.add_task(3, seed=0)
    features = torch.randn(5, 4)
    before = heads(features)
    heads.widen(6, seed=1)
    heads.add_task(2, seed=2)
    torch.testing.assert_close(heads(torch.cat((features, torch.zeros(5, 2)), dim=1))[:, :3], before)
    assert [tuple(head.weight.shape) for head in heads.heads] == [(3, 6), (2, 6)]
    assert heads.heads[0].weight[:, 4:].abs().min() > 0 and heads.heads[0].weight.requires_grad
    other = WideningHeads(4)
    other.load_state_dict(heads.state_dict())
    wide = torch.randn(5, 6)
    assert torch.equal(other(wide), heads(wide)) and other.num_features == 6
