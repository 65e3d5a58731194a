"""The random lift, and the storage of its Gram matrix."""

import pytest
import torch
from tolerance import assert_near, rounding

from mambacl.classifiers.gram import KINDS, LARGEST, PANEL, ROWS, Gram, blocks_of, panels, stored_values
from mambacl.classifiers.lift import ACTIVATIONS, draw, fit_scale, lift

# The lift


@pytest.mark.parametrize("distribution", ["normal", "unit-normal", "uniform"])
def test_weights_come_from_the_seed_alone(distribution: str) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = draw(10, 7, 3, distribution)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(draw(10, 7, 3, distribution), first) and not torch.equal(draw(10, 7, 4, distribution), first)
    assert first.shape == (10, 7) and first.dtype == torch.float32


def test_the_distributions() -> None:
    """Moments of 10^6 values within five standard errors."""
    normal = draw(100, 10000, 0).double() * 10
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(normal.pow(power).mean().item() - expected) < 5e-3 * variance**0.5, power
    torch.testing.assert_close(draw(100, 50, 0, "unit-normal"), 10 * draw(100, 50, 0))
    uniform = draw(100, 10000, 0, "uniform").double()
    assert -0.1 <= uniform.min() < -0.0999 and 0.0999 < uniform.max() <= 0.1
    assert abs(uniform.square().mean().item() - 1 / 300) < 5e-3 * (4 / 45 * 1e-4) ** 0.5


def test_the_scale_of_features() -> None:
    features = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 100.0, 0.01, 1.0])
    features[:, 3] = 0.1  # constant, but its float32 sums would not say so
    center, scale = fit_scale(features)
    torch.testing.assert_close(center, features.double().mean(0))
    varying = features[:, :3].double().std(0, correction=0)
    torch.testing.assert_close(scale, torch.cat([varying, varying.mean()[None]]))
    one = fit_scale(features[:1])  # a single image has no deviation
    assert torch.equal(one[0], features[0].double()) and one[1].tolist() == [1.0] * 4


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_lift_by_hand(activation: str) -> None:
    f, m, s = torch.tensor([[3.0, -1.0]]), torch.tensor([1.0, 1.0]), torch.tensor([2.0, 4.0])
    projection = torch.tensor([[1.0, 0.0, -2.0], [0.0, 2.0, 0.0]])
    x = torch.tensor([[1.0, -1.0, -2.0]])
    expected = {
        "relu": torch.tensor([[1.0, 0.0, 0.0]]),
        "tanh": torch.tensor([[0.7615942, -0.7615942, -0.9640276]]),
        "gelu": torch.tensor([[0.8413447, -0.1586553, -0.0455003]]),
        "none": x,
    }[activation]
    assert_near(lift(f, m, s, projection, activation), expected, 4)
    assert_near(lift(f, m, s, None, "none"), torch.tensor([[1.0, -0.5]]), 2)


# The storage of G


def random_rows(rows: int, units: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, units, generator=torch.Generator().manual_seed(seed)).relu().to(dtype)


def empty(units: int, kind: str = "float64", blocks: int = 1) -> Gram:
    flat = torch.zeros(stored_values(units, blocks), dtype=KINDS[kind])
    spread = torch.zeros(units if kind == "int16" else 0, dtype=torch.float64)
    return Gram(flat, blocks, torch.zeros(units, dtype=torch.float64), 0, spread)


def added(gram: Gram, rows: torch.Tensor) -> Gram:
    return gram.add(rows, gram.sums + rows.sum(0, dtype=torch.float64), gram.images + len(rows))


@pytest.mark.parametrize("units, blocks", [(1, 1), (PANEL - 1, 1), (PANEL, 1), (2 * PANEL + 3, 1), (600, 2), (7, 3)])
def test_the_panels_hold_each_block_up_to_its_diagonal(units: int, blocks: int) -> None:
    held, place = torch.zeros(units, units, dtype=torch.int64), 0
    for panel in panels(units, blocks):
        held[panel.rows, panel.columns] += 1
        assert panel.stored.start == place
        place = panel.stored.stop
    assert place == stored_values(units, blocks) == held.sum() and held.max() == 1
    for block in blocks_of(units, blocks):
        assert held[block, block].tril().sum() == sum(range(block.stop - block.start + 1))
        held[block, block] = 0
    assert held.sum() == 0  # nothing between blocks
    assert place <= sum((n := block.stop - block.start) * (n + PANEL) / 2 for block in blocks_of(units, blocks))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [1, 2])
def test_a_stored_gram_is_the_plain_one(kind: str, blocks: int) -> None:
    units, dtype = PANEL + 44, torch.float64 if kind == "float64" else torch.float32
    rows = random_rows(ROWS + 100, units, dtype)
    gram = added(added(empty(units, kind, blocks), rows[:30]), rows[30:])
    plain = rows.double().T @ rows.double()
    # int16: half a unit of a correlation, each of the two times it was stored
    allowed = rounding(ROWS, dtype) * plain.max() + (plain.max() / LARGEST if kind == "int16" else 0)
    for block in blocks_of(units, blocks):
        whole = gram.block(block, torch.float64)
        assert torch.equal(whole, whole.T)
        assert (whole - plain[block, block]).abs().max() <= allowed
    assert_near(gram.diagonal().to(dtype), plain.diagonal().to(dtype), ROWS)


@pytest.mark.parametrize("kind", KINDS)
def test_grams_merge(kind: str) -> None:
    dtype = torch.float64 if kind == "float64" else torch.float32
    rows = random_rows(200, 20, dtype)
    left, right, whole = added(empty(20, kind), rows[:50]), added(empty(20, kind), rows[50:]), rows.double()
    merged = left.merge(right, left.sums + right.sums, 200)
    plain = whole.T @ whole
    allowed = rounding(200, dtype) * plain.max() + (1.5 * plain.max() / LARGEST if kind == "int16" else 0)
    assert (merged.block(slice(0, 20), torch.float64) - plain).abs().max() <= allowed


def test_units_that_never_vary_are_stored_as_int16() -> None:
    rows = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, 3.0]])
    gram = added(empty(3, "int16"), rows)
    torch.testing.assert_close(gram.block(slice(0, 3), torch.float64), (rows.T @ rows).double())
