"""Prompts: pools and their selection, growing pools, prefixes and tokens."""

import copy

import pytest
import torch
from torch import nn

from mambacl.backbones import create_model
from mambacl.errors import UserError
from mambacl.tuning import AddedModules
from mambacl.tuning.average import averaged_copy, follow
from mambacl.tuning.growing_pool import GrowingPool, orthogonal_rows, orthogonality
from mambacl.tuning.prefix_prompts import PrefixPrompts, split_rows
from mambacl.tuning.prompt_pool import PromptPool, cosines, majority, nearest, pulled
from mambacl.tuning.token_prompts import TokenPrompts, place_of_prompts


def some(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_rows_are_split_into_keys_and_values_and_then_into_heads():
    rows = torch.arange(4 * 6).view(4, 6)
    prefix = split_rows(rows, heads=3)
    assert prefix.shape == (2, 2, 3, 2)
    assert prefix[0, 1, 2].tolist() == rows[1, 4:].tolist() and prefix[1, 0, 0].tolist() == rows[2, :2].tolist()


def test_prefix_prompts():
    prompts = PrefixPrompts([1, 3], length=5, width=12, heads=3, seed=0)
    assert prompts.prefix(0) is None and prompts.prefix(3).shape == (1, 2, 5, 3, 4)
    assert torch.equal(prompts.prefix(3)[0], prompts.values[1])
    assert torch.equal(prompts.values, PrefixPrompts([1, 3], 5, 12, 3, seed=0).values)
    assert prompts.values.abs().max() <= 1


@pytest.mark.parametrize("family, place", [("vit_nano", 1), ("defocus_mamba_nano", 0), ("vim_nano", "ends")])
def test_token_prompts_know_their_place(family, place):
    model = create_model(family, num_classes=0, pretrained=False, depth=1)
    assert place_of_prompts(model) == place
    prompts = TokenPrompts(model, [0], length=3, seed=0)
    assert prompts.tokens(1) is None and prompts.tokens(0).at == place
    assert prompts.tokens(0).values.shape == (1, 3, model.num_features)


def test_a_pool_selects_the_nearest_keys():
    pool, queries = PromptPool(6, 8, (2, 8), seed=0).double(), some(4, 8)
    selected, similarity = pool.select(queries, 3)
    for image, row in enumerate(selected.tolist()):
        by_hand = [float(nn.functional.cosine_similarity(queries[image], key, dim=0)) for key in pool.keys.detach()]
        assert torch.allclose(similarity[image], torch.tensor(by_hand, dtype=torch.float64))
        assert row == sorted(range(6), key=lambda k: -by_hand[k])[:3]
    expected = sum(float(similarity[b, k].detach()) for b in range(4) for k in selected[b]) / 4
    assert pulled(similarity, selected).item() == pytest.approx(expected)
    pulled(similarity, selected).backward()
    unused = [k for k in range(6) if k not in selected]
    assert pool.values.grad is None and all(not pool.keys.grad[k].any() for k in unused)


def test_the_majority_of_a_batch():
    selected = torch.tensor([[5, 1], [1, 3], [3, 5], [1, 0]])
    assert majority(selected, 6).tolist() == [[1, 3]] * 4  # 1: three times; 3 and 5 twice each, the lower counts


def test_selection_of_one_image_does_not_depend_on_the_others():
    similarity = cosines(some(5, 8), some(6, 8, seed=2))
    assert torch.equal(nearest(similarity, 2), torch.cat([nearest(row[None], 2) for row in similarity]))


def test_a_prompt_starts_as_a_copy():
    pool = PromptPool(3, 4, (2, 4), seed=0)
    keys = pool.keys.clone()
    pool.copy(0, 1)
    assert torch.equal(pool.values[1], pool.values[0]) and torch.equal(pool.keys, keys)


def test_new_rows_are_orthogonal():
    earlier = orthogonal_rows(some(0, 8), some(3, 8))
    new = orthogonal_rows(earlier, some(2, 8, seed=3))
    together = torch.cat((earlier, new))
    assert torch.allclose(together @ together.T, torch.eye(5, dtype=torch.float64), atol=1e-12)
    assert orthogonality(together) < 1e-24 and orthogonality(2 * together[:1]) == 9


@pytest.mark.parametrize("gates", [False, True])
def test_a_growing_pool(gates):
    pool = GrowingPool([0, 2], size=5, length=2, width=8, gates=gates).double()
    pool.grow(2, seed=0)
    first = {name: matrix.clone() for name, matrix in pool.matrices().items()}
    pool.grow(2, seed=1)
    assert (pool.start, pool.stop) == (2, 4) and pool.prompt(1, some(3, 8)) is None
    for name, matrix in pool.matrices().items():
        rows = matrix[1].flatten(1)
        assert torch.equal(matrix[:, :2], first[name][:, :2]) and not matrix[:, 4:].any()
        assert torch.allclose(rows[:4] @ rows[:4].T, torch.eye(4, dtype=torch.float64), atol=1e-12)
    query = some(3, 8)
    gate = pool.gates[1] if gates else torch.ones(5, 8, dtype=torch.float64)
    by_hand = torch.stack(
        [
            sum(
                nn.functional.cosine_similarity(q * gate[m], pool.keys[1, m], dim=0) * pool.components[1, m]
                for m in range(4)
            )
            for q in query
        ]
    )
    found = pool.prompt(2, query)
    assert torch.allclose(found, by_hand)
    (found.square().sum() + pool.penalty()).backward()
    for matrix in pool.matrices().values():  # only the rows of the current task get a gradient
        assert not matrix.grad[:, :2].any() and not matrix.grad[:, 4:].any()
        assert matrix.grad[1, 2:4].flatten(1).any(1).all()
    with pytest.raises(UserError, match="pool of 5 components is full: 4 are in use, and a task needs 2"):
        pool.grow(2, seed=2)


def test_a_pool_that_starts_at_once_is_orthogonal_and_left_alone():
    pool = GrowingPool([0], size=4, length=2, width=8).double()
    pool.grow(2, seed=0, afresh=False)
    rows = pool.keys[0].clone()
    assert torch.allclose(rows @ rows.T, torch.eye(4, dtype=torch.float64), atol=1e-12)
    pool.grow(2, seed=1, afresh=False)
    assert torch.equal(pool.keys[0], rows) and pool.stop == 4


def test_the_state_of_added_modules_comes_back():
    """With the place that a growing pool has reached."""
    model = create_model("vit_nano", num_classes=0, depth=1, embed_dim=12)
    one, other = (AddedModules(model, pool=GrowingPool([0], 4, 2, 12)) for _ in range(2))
    one.modules["pool"].grow(3, seed=0)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert other.modules["pool"].stop == 3
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))
    assert [name for name, _ in one.trained()] == [f"prompts.pool.{name}" for name in ("keys", "gates", "components")]
    for state in ({"model.x": torch.zeros(1)}, {"prompts.pool.keys": torch.zeros(1)}):
        with pytest.raises((KeyError, RuntimeError)):
            other.load_state_dict(state)


def test_added_modules_can_grow():
    """One layer per task, of which the last trains; a new object takes in a state of several tasks."""
    model = create_model("vit_nano", num_classes=0, depth=1, embed_dim=12).double()

    def growing():
        layers = nn.ModuleList()
        added = AddedModules(model, layers=layers)

        def fit(state):
            while f"layers.{len(layers)}.bias" in state:
                layers.append(nn.Linear(2, 2))

        added.fit, added.trains = fit, lambda name: name.startswith(f"layers.{len(layers) - 1}.")
        return added, layers

    (one, layers), (other, empty) = growing(), growing()
    for _ in range(2):
        layers.append(nn.Linear(2, 2))
        one.place()
    other.load_state_dict(one.state_dict())
    assert torch.equal(empty[1].weight, layers[1].weight) and empty[0].weight.dtype == torch.float64
    assert [name for name, _ in other.trained()] == ["prompts.layers.1.weight", "prompts.layers.1.bias"]


def test_an_average_follows():
    module = nn.Linear(3, 2).double()
    average = averaged_copy(module)
    start, target = module.weight.detach().clone(), some(2, 3)
    with torch.no_grad():
        module.weight.copy_(target)
    for _ in range(2):
        follow(average, module, decay=0.9)
    assert torch.allclose(average.weight, 0.81 * start + 0.19 * target)
    assert not any(p.requires_grad for p in average.parameters())
