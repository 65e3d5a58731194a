"""Parts with one share per task, and the parts of one ViT block."""

import copy

import pytest
import torch
from torch import nn

from mambacl.backbones import create_model
from mambacl.tuning import AddedModules
from mambacl.tuning.block_parts import BLOCK_PARTS, compensated_attention
from mambacl.tuning.growing_adapters import GrowingAdapters, ScaleShift, orthogonal_to
from mambacl.tuning.per_task import PerTask


def some(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_one_module_per_task():
    model = create_model("vit_nano", num_classes=0, depth=1, embed_dim=12).double()
    one, other = (AddedModules(model, own=PerTask(lambda: nn.Linear(2, 3))) for _ in range(2))
    for _ in range(2):
        added = one.modules["own"].add()
    assert added.weight.dtype == torch.float64 and len(one.modules["own"]) == 2
    assert [name for name, _ in one.trained()] == [f"prompts.own.tasks.1.{name}" for name in ("weight", "bias")]
    assert not one.modules["own"][0].weight.requires_grad and added.weight.requires_grad
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert len(other.modules["own"]) == 2 and torch.equal(other.modules["own"][1].weight, added.weight)
    with pytest.raises(RuntimeError):
        other.load_state_dict({**one.state_dict(), "prompts.own.tasks.1.weight": torch.zeros(1)})


def test_compensated_attention_by_hand():
    q, k, v = some(1, 2, 3, 4), some(1, 2, 7, 4, seed=2), some(1, 2, 7, 4, seed=3)
    found = compensated_attention(q, k, v, prefix=2)
    for head in range(2):
        for row in range(3):
            weights = (k[0, head] @ q[0, head, row] / 2).softmax(0)
            prefix = weights[:2] / weights[:2].sum()
            expected = prefix @ v[0, head, :2] + weights[2:] @ v[0, head, 2:]
            torch.testing.assert_close(found[0, head, row], expected)


@pytest.mark.parametrize("kind", BLOCK_PARTS)
def test_parts_of_a_block_have_scales(kind):
    part = BLOCK_PARTS[kind](8, 3, 2, torch.Generator().manual_seed(0))
    scales = {name: p for name, p in part.named_parameters() if "scale" in name}
    assert len(scales) == (1 if kind == "adapter" else 2) and all(p.item() == 1 for p in scales.values())
    again = BLOCK_PARTS[kind](8, 3, 2, torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(part.parameters(), again.parameters(), strict=True))


def test_rows_orthogonal_to_earlier_ones():
    """Even if these are not orthogonal to each other; without room, they only have unit length."""
    earlier, new = some(3, 8), orthogonal_to(some(3, 8), some(4, 8, seed=2))
    assert (earlier @ new.T).abs().max() < 1e-12
    assert torch.allclose(new @ new.T, torch.eye(4, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(orthogonal_to(earlier, some(6, 8)).norm(dim=1), torch.ones(6, dtype=torch.float64))


def test_growing_adapters():
    adapters = GrowingAdapters(places=2, size=2, width=8).double()
    adapters.add(seed=0)
    u = some(5, 8)
    first = adapters(u, 1)
    assert adapters.overlap() == 0
    adapters.add(seed=1)
    assert adapters.overlap() < 1e-24
    second = adapters.shares[1]
    added = (u @ second.down[1].T).relu() @ second.up[1]
    torch.testing.assert_close(adapters(u, 1), first + added)
    with torch.no_grad():
        second.down[0] += adapters.shares[0].down[0]
    assert adapters.overlap().item() == pytest.approx(2.0)  # two rows, each 1 times itself


def test_scale_and_shift_start_as_nothing():
    module, u = ScaleShift(2, 4), torch.randn(3, 4)
    assert torch.equal(module(u, 1), u)
    with torch.no_grad():
        module.scale[1], module.shift[1] = 2.0, 1.0
    assert torch.equal(module(u, 1), 2 * u + 1) and torch.equal(module(u, 0), u)
