"""The Gram matrix as a rounded Cholesky factor, and the ridge classifier with it."""

from typing import Any

import pytest
import torch
from ridge_help import D, some, taught
from tolerance import assert_near, rounding
from torch import Tensor

from mambacl.classifiers import Ridge, factor
from mambacl.classifiers.factor import CENTRED, JITTER, LARGEST, PANEL, UPWARDS, Factor, below, panels
from mambacl.classifiers.gram import ROWS
from mambacl.classifiers.ridge_options import FACTOR_BELOW, RidgeOptions, parsed_size, resolved, state_size
from mambacl.errors import UserError

UNITS = PANEL + 44
STEP = 0.5 / LARGEST * UPWARDS * (1 + 2**-11)  # half a step, relative to a row's largest value: scales are half floats


def rows_of(count: int, units: int = UNITS, seed: int = 0) -> Tensor:
    """Lifted features whose covariance has a spectrum that falls by four decades."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(20, units, generator=torch.Generator().manual_seed(9)) / 20**0.5
    return (torch.randn(count, 20, generator=generator) @ mixing + 0.3).cos()


def plain(rows: Tensor) -> Tensor:
    return rows.double().T @ rows.double()


def stored(rows: Tensor, before: Factor | None = None) -> Factor:
    units = rows.shape[1]
    before = before or Factor(factor.empty(units), torch.zeros(units, dtype=torch.float64), 0)
    whole = before.block(slice(0, units), torch.float64)
    factor.add_products(whole, rows)
    return before.replaced(whole, before.sums + rows.double().sum(0), before.images + len(rows))


def read(gram: Factor) -> Tensor:
    return gram.block(slice(0, gram.units), torch.float64)


def relative(error: Tensor, gram: Tensor, ridge: float) -> float:
    """The norm of A^-1/2 E A^-1/2, with A = G + r I: how far (A + E)^-1 is from A^-1."""
    lower = torch.linalg.cholesky(gram + ridge * torch.eye(len(gram), dtype=torch.float64))
    half = torch.linalg.solve_triangular(lower, error, upper=False)
    return float(torch.linalg.matrix_norm(torch.linalg.solve_triangular(lower, half.T, upper=False), 2))


# Bytes


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_two_integers_have_three_bytes(count: int) -> None:
    values = torch.tensor([0, -1, LARGEST, -LARGEST, 1, 255, -256])[:count]
    made = factor.to_bytes(values)
    assert made.dtype == torch.uint8 and len(made) == 3 * ((count + 1) // 2)
    assert torch.equal(factor.from_bytes(made, count), values.to(torch.int32))


@pytest.mark.parametrize("units", [1, 2, PANEL - 1, PANEL, PANEL + 1, 2 * PANEL + 3])
def test_the_bytes_are_as_stated(units: int) -> None:
    held = torch.zeros(units, units, dtype=torch.int64)
    integers = scales = 0
    for panel in panels(units):
        mask = below(panel, units, held.device)
        held[panel.columns.start :, panel.columns] += mask
        assert (panel.stored.start, panel.rows.start) == (integers, scales)
        integers += 3 * ((int(mask.sum()) + 1) // 2)
        scales += units - panel.columns.start
    assert torch.equal(held, torch.ones_like(held).tril(-1))
    assert factor.empty(units).nbytes == 8 + 8 * units + 2 * scales + integers
    assert state_size(D, units, "factor", 1, 5) >= 8 + 8 * units + 2 * scales + integers + 8 * units * 5
    assert integers <= 0.75 * units**2 + 3 * -(-units // PANEL)


# What is read back


@pytest.mark.parametrize("units, images", [(1, 5), (PANEL, 600), (UNITS, 1000), (UNITS, 40), (ROWS + 76, 300)])
def test_what_is_read_back_is_within_half_a_step_of_each_value(units: int, images: int) -> None:
    """Also with fewer images than units."""
    rows = rows_of(images, units)
    exact, sums = plain(rows), rows.double().sum(0)
    gram = stored(rows[:0]).replaced(exact.clone(), sums, images)
    rest = exact - CENTRED / images * sums.outer(sums)
    lower = torch.linalg.cholesky(rest + gram.jitter * torch.eye(units, dtype=torch.float64))
    # The jitter keeps the condition number below 1e5 per unit, which multiplies the rounding of a factorisation.
    noise = 1e5 * units * rounding(units, torch.float64) * lower.diagonal().max()
    bound = torch.zeros_like(lower)
    for panel in panels(units):
        part = lower[panel.columns.start :, panel.columns].tril(-1)
        scale = part.square().mean(0).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
        bound[panel.columns.start :, panel.columns] = (part / scale).abs().amax(1, keepdim=True) * scale * STEP
    bound = bound.tril(-1) + noise + rounding(1) * lower.diagonal().diag()
    assert bool(((gram.lower() - lower).abs() <= bound).all())
    allowed = bound @ lower.abs().T
    whole = read(gram)
    assert bool(((whole - exact).abs() <= allowed + allowed.T + bound @ bound.T).all())
    assert torch.equal(whole, whole.T)
    assert gram.jitter == pytest.approx(JITTER * float(exact.diagonal().mean()), rel=1e-12)


def test_errors_grow_slowly_with_the_number_of_writes() -> None:
    """As a random walk, at most: ten writes may have four times the error of one. Any ridge above the jitter works."""
    rows = rows_of(2000)
    once, exact = stored(rows), plain(rows)
    ridge = 1e-4 * float(exact.diagonal().mean())
    gram = None
    for part in rows.split(200):
        gram = stored(part, gram)
    assert gram is not None and gram.images == 2000
    errors = [relative(read(one) - exact, exact, ridge) for one in (once, gram)]
    assert 0 < errors[0] < 0.01 and errors[1] < 4 * errors[0]
    assert torch.linalg.eigvalsh(read(gram)).min() > -1.01 * gram.jitter


def test_factors_merge() -> None:
    rows = rows_of(900)
    left, right = stored(rows[:300]), stored(rows[300:])
    merged = left.merge(right, left.sums + right.sums, 900)
    exact = plain(rows)
    ridge = 1e-4 * float(exact.diagonal().mean())
    each = [
        relative(read(gram) - plain(part), exact, ridge) for gram, part in ((left, rows[:300]), (right, rows[300:]))
    ]
    again = relative(read(stored(rows)) - exact, exact, ridge)
    assert relative(read(merged) - exact, exact, ridge) < sum(each) + 2 * again


@pytest.mark.parametrize("kind", ["zero", "constant", "twice", "one image"])
def test_singular_sums_are_stored(kind: str) -> None:
    rows = rows_of(50, 6)
    if kind == "zero":
        rows[:] = 0
    elif kind == "one image":
        rows = rows[:1]
    else:
        rows[:, 2] = rows[:, 4] if kind == "twice" else 0.7
    gram, exact = stored(rows), plain(rows)
    # The error of a value of L is half a step of at most the largest deviation; a row has six.
    allowed = 2 * 6 * STEP * float(exact.diagonal().max()) + 2 * JITTER * rounding(1)
    assert (read(gram) - exact).abs().max() <= allowed
    assert torch.linalg.cholesky_ex(read(gram) + 2 * gram.jitter * torch.eye(6))[1] == 0


def test_sums_that_are_no_sums_are_refused() -> None:
    gram = stored(rows_of(50, 6))
    with pytest.raises(UserError, match="not those of finite features"):
        gram.replaced(-torch.eye(6, dtype=torch.float64), gram.sums, 50)


# The classifier

OPTIONS: dict[str, Any] = {"width": UNITS, "activation": "fourier", "bandwidth": 0.5, "ridge": 1.0}
LEARNED = {**OPTIONS, "storage": "factor"}


def whole_of(made: Ridge) -> Tensor:
    return made._whole(slice(0, made.units), torch.float64)


def assert_close_to_exact(made: Ridge, exact: Ridge, features: Tensor) -> None:
    """Scores h (A + E)^-1 Q are within e / (1 - e) |A^-1/2 h| |A^-1/2 Q| of h A^-1 Q, with e = |A^-1/2 E A^-1/2|."""
    gram, ridge = whole_of(exact), float(exact.ridge)
    error = relative(whole_of(made) - gram, gram, ridge)
    assert error < 0.1
    lower = torch.linalg.cholesky(gram + ridge * torch.eye(len(gram), dtype=torch.float64))
    h, q = (torch.linalg.solve_triangular(lower, side.double().T, upper=False).norm(dim=0)
            for side in (exact.lifted(features), exact.sums))  # fmt: skip
    # Sums of h y and of h W in float32: the weights are larger than the scores.
    noise = rounding(len(gram)) * float(exact.weights.abs().max()) * len(gram) ** 0.5
    allowed = error / (1 - error) * h[:, None] * q + 10 * noise
    assert bool(((made.scores(features).double() - exact.scores(features).double()).abs() <= allowed).all())


def in_tasks(features: Tensor, labels: Tensor, tasks: int, **options: Any) -> Ridge:
    made = Ridge(D, **options)
    made.fit_scale(features)
    for f, y in zip(features.chunk(tasks), labels.chunk(tasks), strict=True):
        made.update(f, y)
        made.finish_task()
    return made


@pytest.mark.parametrize("tasks", [1, 5])
def test_scores_are_those_of_exact_sums(tasks: int) -> None:
    features, labels = some(1000)
    options = {**OPTIONS, "ridge": 5.0}
    made, exact = (in_tasks(features, labels, tasks, **options, storage=name) for name in ("factor", "float64"))
    assert_close_to_exact(made, exact, some(50, seed=1)[0])


def test_any_order_and_cut_of_a_task_gives_the_same() -> None:
    features, labels = some(400)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(2))
    exact = taught(features, labels, **OPTIONS, storage="float64")
    for cuts in (1, 7, 400):
        for one in (slice(None), order):
            assert_close_to_exact(taught(features[one], labels[one], cuts, **LEARNED), exact, some(50, seed=1)[0])


def test_single_images_do_not_round_again_and_again() -> None:
    """Answers know each image at once; G is written when the task ends."""
    features, labels = some(200)
    test, _ = some(50, seed=1)
    made = taught(features[:150], labels[:150], **LEARNED)
    before = made.gram.clone()
    for image in range(150, 200):
        earlier = made.scores(test)
        made.update(features[image : image + 1], labels[image : image + 1])
        assert not torch.equal(made.scores(test), earlier)
    assert torch.equal(made.gram, before)
    exact = Ridge(D, **OPTIONS, storage="float64")
    exact.fit_scale(features[:150])
    exact.update(features, labels)
    exact.finish_task()
    assert_close_to_exact(made, exact, test)
    known, others = (one.left_out(features[:50, None], labels[:50])[0] for one in (made, exact))
    gram, h = whole_of(exact), exact.lifted(features[:50]).double()
    free = 1 - (h * torch.linalg.solve(gram + torch.eye(UNITS, dtype=torch.float64), h.T).T).sum(1).max()
    error = relative(whole_of(made) - gram, gram, 1.0)
    # Scores and leverages are off by e / (1 - e) at most, and residuals are divided by 1 - leverage.
    assert (known - others).abs().max() <= error / (1 - error) / free**2 * others.abs().max()
    made.finish_task()
    assert not torch.equal(made.gram, before) and not made._unstored
    assert_close_to_exact(made, exact, test)


def test_features_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = some(100)
    made = taught(features[:50], labels[:50], **LEARNED)
    monkeypatch.setattr("mambacl.classifiers.ridge.WAITING", 20 * features[0].nbytes)
    for image in range(50, 100):
        made.update(features[image : image + 1], labels[image : image + 1])
        made.scores(features[:1])
        assert len(made._unstored) <= 20
    assert made.counts.sum() == 100


def test_a_state_in_the_middle_of_a_task_goes_on() -> None:
    features, labels = some()
    made = Ridge(D, **LEARNED)
    for start in (0, 20, 60):  # before and after the scale is fixed
        made.update(features[start : start + 20], labels[start : start + 20])
        made.scores(features)
        resumed = Ridge(D, **LEARNED)
        resumed.load_state_dict({name: tensor.clone() for name, tensor in made.state_dict().items()})
        for one in (made, resumed):
            one.update(features[start + 20 : start + 40], labels[start + 20 : start + 40])
            one.finish_task()
        theirs = resumed.state_dict()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in made.state_dict().items())


def test_parts_merge() -> None:
    features, labels = some(400)
    test, _ = some(50, seed=1)
    exact = Ridge(D, **OPTIONS, storage="float64")
    exact.fit_scale(features[:200])
    exact.update(features, labels)
    exact.finish_task()
    made = taught(features[:200], labels[:200], **LEARNED)
    other = Ridge.like(made)
    other.update(features[200:], labels[200:])
    other.scores(test)  # in Q, not in G yet
    made.merge(other)
    assert_close_to_exact(made, exact, test)


def test_a_drift_is_followed() -> None:
    features, labels = some(400)
    generator = torch.Generator().manual_seed(3)
    matrix = torch.eye(UNITS, dtype=torch.float64)
    matrix += 0.1 * torch.randn(UNITS, UNITS, generator=generator, dtype=torch.float64) / UNITS**0.5
    both = [taught(features, labels, **OPTIONS, storage=storage) for storage in ("factor", "float64")]
    for made in both:
        made.transport(matrix, 0.01 * torch.ones(UNITS, dtype=torch.float64))
    assert_close_to_exact(*both, some(50, seed=1)[0])


@pytest.mark.parametrize("activation", ["relu", "fourier"])
def test_images_that_are_all_alike(activation: str) -> None:
    """With relu, G is 0."""
    made = taught(torch.ones(20, D), torch.arange(20) % 2, **{**LEARNED, "activation": activation, "ridge": "auto"})
    found = made.scores(torch.ones(1, D))
    assert found.isfinite().all() and float((found[0, 0] - found[0, 1]).abs()) < 1e-3
    made.update(*some(100, classes=2))
    made.finish_task()
    assert made.scores(torch.ones(1, D)).isfinite().all()


def test_a_constant_feature_changes_nothing() -> None:
    features, labels = some(400)
    wider = torch.cat([features, torch.full((400, 1), 5.0)], dim=1)
    made, exact = (taught(wider, labels, **OPTIONS, storage=storage) for storage in ("factor", "float64"))
    assert_close_to_exact(made, exact, wider[:50])


def test_what_predicts_has_no_factor() -> None:
    made = taught(*some(), **LEARNED)
    state = made.state_dict()
    needed = made.for_scores(state)
    assert len(needed["gram"]) == 0 < len(state["gram"])
    only = Ridge(D, **LEARNED)
    only.load_state_dict(needed)
    assert torch.equal(only.scores(some(7)[0]), made.scores(some(7)[0]))


def test_the_ridge_is_above_the_jitter() -> None:
    """Without noise, the best ridge would be smaller."""
    features, labels = some(600)
    made = taught(features, (features[:, 0] > 3).long(), **{**LEARNED, "ridge": "auto", "bandwidth": 0.1})
    exact = taught(features, (features[:, 0] > 3).long(), **{**OPTIONS, "ridge": "auto", "bandwidth": 0.1})
    gram = made._gram()
    assert isinstance(gram, Factor) and 2 * gram.jitter < float(made.ridge) <= 7 * gram.jitter
    assert float(exact.ridge) < float(made.ridge)
    with pytest.raises(UserError, match="too small for sums in this precision"):
        taught(features, labels, **{**LEARNED, "ridge": 0.0})


# Which limits choose it


@pytest.mark.parametrize("limit", ["300kB", "1MB"])
def test_the_state_keeps_to_its_limit(limit: str) -> None:
    made = Ridge(D, state_limit=limit, expected_classes=5)
    made.update(*some(60, classes=5))
    made.finish_task()
    assert made.options.storage == "factor"
    assert 0.97 * parsed_size(limit) < made.nbytes <= parsed_size(limit)


@pytest.mark.parametrize(
    "options, storage",
    [
        ({"state_limit": "199MB"}, "factor"),
        ({"state_limit": "200MB"}, "int24"),
        ({"state_limit": "1GB"}, "int24"),
        ({"state_limit": "10MB", "storage": "int24"}, "int24"),
        ({"state_limit": "1GB", "storage": "factor"}, "factor"),
        ({"state_limit": "10MB", "width": 100}, "int24"),
        ({"state_limit": "10MB", "blocks": 2}, "int24"),
        ({"state_limit": "10MB", "ridge": 1.0}, "int24"),
        ({"state_limit": "10MB", "drift": "linear"}, "int24"),
        ({"state_limit": "10MB", "rule": "ranpac"}, "float32"),
        ({}, "float32"),
    ],
)
def test_small_limits_choose_a_factor(options: dict[str, Any], storage: str) -> None:
    assert parsed_size("200MB") == FACTOR_BELOW
    assert resolved(RidgeOptions(**options), 100).storage == storage


def test_a_limit_has_room_for_more_units() -> None:
    units = {
        storage: int(
            resolved(RidgeOptions(state_limit="100MB", expected_classes=100, storage=storage), 4800).width or 0
        )
        for storage in ("int24", "factor")
    }
    assert units == {"int24": 7776, "factor": 10991}


def test_states_from_before_keep_their_storage() -> None:
    """A limit used to mean int24."""
    features, labels = some()
    limit: dict[str, Any] = {"state_limit": "300kB", "expected_classes": 5}
    old = Ridge(D, **limit, storage="int24")
    old.update(features[:60], labels[:60])
    old.finish_task()
    made = Ridge(D, **limit)
    assert made.options.storage == "factor" and made.units != old.units
    made.load_state_dict(old.state_dict())
    assert made.options.storage == "int24" and torch.equal(made.scores(features), old.scores(features))
    other = Ridge.like(made)
    other.update(features[60:], labels[60:])
    made.merge(other)
    old.update(features[60:], labels[60:])
    for one in (made, old):
        one.finish_task()
    assert_near(made.scores(features), old.scores(features), 10**4 * made.units)  # the chosen ridge is small
    with pytest.raises(UserError, match="other options"):
        Ridge(D, **limit, storage="factor").load_state_dict(old.state_dict())


def test_blocks_have_no_factor() -> None:
    with pytest.raises(UserError, match="storage factor is for one block: set blocks to 1 or storage to int24"):
        Ridge(D, storage="factor", blocks=2)
    with pytest.raises(UserError, match="storage takes"):
        Ridge(D, storage="cholesky")
