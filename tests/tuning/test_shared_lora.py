"""Low-rank changes that the first blocks share and the others have per task: their formulas by hand."""

import pytest
import torch
from adapter_methods_help import small

from mambacl.tuning.shared_lora import BEFORE, NOW, SharedAndOwn, in_blocks, soft_cross_entropy
from mambacl.tuning.task_lora import places_of


def lora_of(family="vit_nano", names=("q", "v"), each_layer=True, rank=3):
    model = small(family).double()
    lora = SharedAndOwn(model, places_of(model, names), rank, None, each_layer, seed=0).double()
    lora.add(seed=5)
    return model, lora


def test_it_starts_with_nothing_and_rows_of_A_are_orthonormal():
    model, lora = lora_of()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    assert torch.equal(lora.late(lora.early(images), 0), small("vit_nano").double()(images))
    for changes in (*lora.shared.tasks.tasks, *lora.own.tasks.tasks):
        for change in changes:
            torch.testing.assert_close(change.A @ change.A.T, torch.eye(3, dtype=torch.float64), atol=1e-6, rtol=0)
    assert {name.rpartition(".")[2] for name, _ in lora.shared.named_parameters()} == {"B"}
    assert bool((lora.weights[0].values >= 0.5).all()) and bool((lora.weights[0].values <= 1.5).all())
    assert in_blocks(model, lora.shared.places) == [0, 0] and in_blocks(model, lora.own.places) == [1, 1]


def test_it_is_the_same_as_changing_the_weights():
    _, lora = lora_of()
    lora.add(seed=6)
    images, size = torch.randn(2, 3, 32, 32, dtype=torch.float64), 32
    with torch.no_grad():
        for parameter in (*lora.shared.parameters(), *lora.own.parameters()):
            parameter.normal_(std=0.1)
        for which, task in ((BEFORE, 0), (NOW, 1)):
            found = lora.late(lora.early(images, which), task)
            plain = small("vit_nano").double()
            scales = lora.weights[task].values[:, 0]
            for block, changes, factors in (
                (0, lora.shared.tasks[which], (1.0, 1.0)),
                (1, lora.own.tasks[task], (scales[0], scales[2])),
            ):
                weight = plain.blocks[block].attn.qkv.weight
                for part, change, factor in zip((0, 2), changes, factors, strict=True):
                    weight[part * size : (part + 1) * size] += factor * change.B @ change.A
            torch.testing.assert_close(found, plain(images))


def test_a_task_keeps_the_shared_changes_from_before():
    _, lora = lora_of()
    with torch.no_grad():
        for change in lora.shared.tasks[NOW]:
            change.B.normal_()
    lora.add(seed=6)
    before, now = (lora.shared.tasks[which].state_dict() for which in (BEFORE, NOW))
    assert all(torch.equal(tensor, now[name]) for name, tensor in before.items())


def test_gradients_by_the_length_of_rows():
    _, lora = lora_of()
    first = lora.shared.tasks[NOW][0]
    for change in lora.shared.tasks[NOW]:
        change.B.grad = torch.ones_like(change.B)
    lora.reassign()  # nothing has been learned yet
    assert torch.equal(first.B.grad, torch.ones_like(first.B))
    with torch.no_grad():
        lora.shared.tasks[BEFORE][0].B[0] = torch.tensor([0.0, 3.0, 4.0])
    lora.reassign()
    expected = torch.zeros(32, 3, dtype=torch.float64)
    expected[0] = 32.0  # the only row with a length: 5, and the mean length is 5 / 32
    torch.testing.assert_close(first.B.grad, expected)


def test_overlap_by_hand():
    _, lora = lora_of()
    assert lora.overlap().item() == 0
    lora.add(seed=6)
    lora.add(seed=7)
    with torch.no_grad():
        for weights, row in zip(lora.weights.tasks, ([1.0, 0, 0], [0, 1.0, 0], [-3.0, 0, 4.0]), strict=True):
            weights.values.copy_(torch.tensor(row)[:, None])
    assert lora.overlap().item() == pytest.approx((0.6 + 0.0) / 2, rel=1e-7)


def test_one_weight_per_block_or_one_per_layer():
    for family, names, each_layer, rows in (
        ("vit_nano", ("q", "v"), False, 1),
        ("vit_nano", ("q", "v"), True, 3),
        ("defocus_mamba_nano", ("x_proj", "out_proj"), True, 2),
        ("vit_nano", ("v", "fc1"), True, 4),
    ):
        _, lora = lora_of(family, names, each_layer)
        assert lora.weights[0].values.shape == (rows, 1)


def test_soft_cross_entropy_by_hand():
    scores, wanted = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 4.0]])
    p, q = (wanted / 2).softmax(1)[0], (scores / 2).softmax(1)[0]
    expected = -(p * q.log()).sum()
    torch.testing.assert_close(soft_cross_entropy(scores, wanted, temperature=2.0), expected)
