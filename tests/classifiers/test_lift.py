"""The random lift, and the storage of its Gram matrix."""

import math

import pytest
import torch
from tolerance import assert_near, rounding

from mambacl.classifiers import gram
from mambacl.classifiers.gram import (
    KINDS,
    LARGEST,
    PANEL,
    ROWS,
    Gram,
    blocks_of,
    from_bytes,
    panels,
    stored_values,
    to_bytes,
)
from mambacl.classifiers.lift import ACTIVATIONS, draw, fit_scale, lift, projections, standard_normal, uniform

# The lift


WORD = (1 << 64) - 1


def splitmix64(seed: int, position: int) -> int:
    """The output of the generator at a position, in Python's own integers. The seed is mixed first, so that close seeds
    start far apart."""

    def mixed(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
        return x ^ (x >> 31)

    return mixed((position * 0x9E3779B97F4A7C15 + mixed(seed)) & WORD)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 - 1])
def test_uniform_numbers_are_splitmix64(seed: int) -> None:
    for first in (-7, 0, 5, 10**12):
        expected = [(splitmix64(seed, position) >> 11) / 2**53 for position in range(first, first + 6)]
        assert uniform(first, 6, seed).tolist() == expected
    assert min(expected) >= 0 and max(expected) < 1


def test_normal_values_are_box_and_mullers() -> None:
    pairs = uniform(10, 8, 3).view(4, 2).tolist()
    expected = [math.sqrt(-2 * math.log(1 - r)) * math.cos(2 * math.pi * a) for r, a in pairs]
    assert_near(standard_normal(5, 4, 3), torch.tensor(expected, dtype=torch.float64), 4)


def test_weights_do_not_depend_on_how_many_are_drawn_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [draw(6, 9, 2, kind) for kind in ("normal", "uniform")]
    monkeypatch.setattr("mambacl.classifiers.lift.DRAWN", 7)
    assert all(torch.equal(draw(6, 9, 2, kind), one) for kind, one in zip(("normal", "uniform"), whole, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_gpu_draws_the_same() -> None:
    assert torch.equal(uniform(-50, 10**6, 3, "cuda").cpu(), uniform(-50, 10**6, 3))
    assert torch.equal(draw(100, 1000, 3, "uniform", "cuda").cpu(), draw(100, 1000, 3, "uniform"))
    here, there = draw(100, 10000, 3), draw(100, 10000, 3, device="cuda").cpu()
    assert_near(there, here, 1)
    assert (there != here).sum() <= 10


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
    even, limit = draw(100, 10000, 0, "uniform"), torch.tensor(0.1)
    assert -limit <= even.min() < -0.0999 and 0.0999 < even.max() <= limit
    assert abs(even.double().square().mean().item() - 1 / 300) < 5e-3 * (4 / 45 * 1e-4) ** 0.5


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
        "fourier": torch.tensor([[0.5403023, 0.8414710, 0.5403023, -0.8414710, -0.4161468, -0.9092974]]),
        "relu": torch.tensor([[1.0, 0.0, 0.0]]),
        "tanh": torch.tensor([[0.7615942, -0.7615942, -0.9640276]]),
        "gelu": torch.tensor([[0.8413447, -0.1586553, -0.0455003]]),
        "none": x,
    }[activation]
    assert_near(lift(f, m, s, projection, activation), expected, 4)
    assert_near(lift(f, m, s, None, activation), torch.tensor([[1.0, -0.5]]), 2)


def test_products_of_cosines_and_sines_are_a_gaussian_kernel() -> None:
    """The mean of h h' over projections is exp(-|g (f - f')|^2 / 2d) within five standard errors; a term's variance is
    at most 1 / 2."""
    features = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double()
    units, g = 20000, 1.5
    count = projections(units, "fourier")
    h = lift(features, torch.zeros(4), torch.ones(4), g * draw(4, count, 0).double(), "fourier")
    kernel = torch.exp(-(g * torch.cdist(features, features)).square() / 8)
    assert h.shape == (6, units) and (h @ h.T / count - kernel).abs().max() < 5 * math.sqrt(0.5 / count)
    assert kernel.min() < 0.1
    assert projections(7, "fourier") == 4 and projections(7, "relu") == 7


# The storage of G


def random_rows(rows: int, units: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, units, generator=torch.Generator().manual_seed(seed)).relu().to(dtype)


def empty(units: int, kind: str = "float64", blocks: int = 1) -> Gram:
    spread = torch.zeros(units if kind.startswith("int") else 0, dtype=torch.float64)
    return Gram(gram.empty(units, blocks, kind), blocks, torch.zeros(units, dtype=torch.float64), 0, spread)


def step(kind: str) -> float:
    """The distance of stored correlations."""
    largest = LARGEST.get(KINDS[kind])
    return 1 / largest if largest else 0.0


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
    # integers: half a unit of a correlation, each of the two times it was stored
    allowed = rounding(ROWS, dtype) * plain.max() + step(kind) * plain.max()
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
    allowed = rounding(200, dtype) * plain.max() + 1.5 * step(kind) * plain.max()
    assert (merged.block(slice(0, 20), torch.float64) - plain).abs().max() <= allowed


@pytest.mark.parametrize("kind", ["int24", "int16"])
def test_units_that_never_vary_are_stored_as_integers(kind: str) -> None:
    rows = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, 3.0]])
    gram = added(empty(3, kind), rows)
    torch.testing.assert_close(gram.block(slice(0, 3), torch.float64), (rows.T @ rows).double())


def test_three_bytes_hold_an_integer() -> None:
    values = torch.tensor([[0.0, 1.0, -1.0, 255.0], [256.0, -65536.0, 2.0**23 - 1, 1.0 - 2.0**23]], dtype=torch.float64)
    stored = to_bytes(values)
    assert stored.shape == (2, 4, 3) and stored.dtype == torch.uint8
    assert stored[0].tolist() == [[0, 0, 0], [1, 0, 0], [255, 255, 255], [255, 0, 0]]
    assert torch.equal(from_bytes(stored).double(), values)
