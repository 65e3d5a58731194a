"""The ridge classifier against a plain ridge regression on all images at once, and against recorded numbers."""

import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tolerance import assert_near, rounding
from torch import Tensor

from mambacl.classifiers import NearestMean, Ridge
from mambacl.classifiers import ridge as module
from mambacl.classifiers.least_squares import (
    CURRENT,
    STEPS,
    choose,
    current_task_errors,
    factor,
    first_true,
    rises,
    solve,
)
from mambacl.classifiers.lift import draw
from mambacl.classifiers.ridge_options import RULES, RidgeOptions, parsed_size
from mambacl.errors import UserError

D, WIDTH, CLASSES = 6, 40, 5
PLAIN: dict[str, Any] = {"width": WIDTH, "ridge": 2.0, "activation": "relu", "bandwidth": 1.0}


def some(count: int = 120, classes: int = CLASSES, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Classes with different means, and features of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    means = torch.randn(CLASSES, D, generator=torch.Generator().manual_seed(9))
    features = means[labels] + torch.randn(count, D, generator=generator)
    return features * torch.tensor([1.0, 10.0, 0.1, 1.0, 1.0, 1.0]) + 3, labels


def taught(features: Tensor, labels: Tensor, cuts: int = 1, **options: Any) -> Ridge:
    """One task, in so many parts."""
    made = Ridge(features.shape[1], **{**PLAIN, **options})
    for f, y in zip(features.chunk(cuts), labels.chunk(cuts), strict=True):
        made.update(f, y)
    made.finish_task()
    return made


def joint(features: Tensor, labels: Tensor, test: Tensor, scaled_by: Tensor, ridge: float = 2.0) -> Tensor:
    """Scores of a plain ridge regression in float64."""
    m, s = scaled_by.double().mean(0), scaled_by.double().std(0, correction=0)
    h, t = (torch.relu((f.double() - m) / s @ draw(D, WIDTH, 0).double()) for f in (features, test))
    return t @ torch.linalg.solve(h.T @ h + ridge * torch.eye(WIDTH), h.T @ F.one_hot(labels).double())


ALIKE = 100 * D * WIDTH


def assert_alike(one: Tensor, other: Tensor) -> None:
    """Scores from the same images, rounded differently. G + r I has a condition number of about 500, which multiplies
    errors of the worst direction; ten times the rounding of the sums is for a usual one."""
    assert_near(one, other, ALIKE)


# The classifier of all images at once


@pytest.mark.parametrize("storage", ["float32", "float64"])
def test_tasks_one_by_one_give_the_classifier_of_all_images(storage: str) -> None:
    features, labels = some()
    test, _ = some(7, seed=1)
    order = labels.argsort(stable=True)
    features, labels = features[order], labels[order]
    first = labels < 2
    made = Ridge(D, **PLAIN, storage=storage)
    for chosen in (first, ~first & (labels < 4), labels == 4):
        made.update(features[chosen], labels[chosen])
        made.finish_task()
    expected = joint(features, labels, test, features[first])
    assert_alike(made.scores(test), expected)
    if storage == "float64":  # W and features are float32 numbers; all else is exact
        assert_near(made.scores(test.double()), expected, ALIKE)
    assert made.counts.tolist() == [24] * 5 and made.ridge == 2.0


def test_any_order_and_any_parts_give_the_same_state() -> None:
    features, labels = some()
    test, _ = some(7, seed=1)
    whole = taught(features, labels)
    order = torch.randperm(120, generator=torch.Generator().manual_seed(2))
    single = taught(features[order], labels[order], cuts=120)
    expected = joint(features, labels, test, features)
    for made in (whole, single):
        assert_alike(made.scores(test), expected)
    for name, tensor in whole.state_dict().items():
        if tensor.is_floating_point() and tensor.numel() and name != "weights":
            assert_near(single.state_dict()[name], tensor, 120 * D, name)


def test_a_limit_on_what_waits_changes_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = some()
    test, _ = some(7, seed=1)
    monkeypatch.setattr(module, "WAITING", 30 * D * 4)
    monkeypatch.setattr(module, "LIFTED", 7 * WIDTH * 4)
    made = Ridge(D, **PLAIN)
    for part in torch.arange(120).split(10):
        made.update(features[part], labels[part])
        assert sum(len(f) for f, _ in made._arrived) <= 30
    assert_alike(made.scores(test), joint(features, labels, test, features[:40]))  # beyond 30, which fixed the scale


def test_single_images_are_answered_before_the_first_task_ends() -> None:
    features, labels = some()
    test, _ = some(7, seed=1)
    made = Ridge(D, **PLAIN)
    made.add_task(2)
    assert made.scores(test).isneginf().all()
    for count in range(1, 12):
        made.update(features[count - 1 : count], labels[count - 1 : count])
        scores = made.scores(test)
        if count > 2:
            expected = joint(features[:count], labels[:count], test, features[:count])
            assert_alike(scores[:, : expected.shape[1]], expected)
        assert scores.isneginf().any(0).tolist() == [c >= count for c in range(max(2, min(5, count)))]
    made.finish_task()
    assert torch.equal(made.scores(test), scores)


def test_later_images_do_not_change_the_scale() -> None:
    features, labels = some()
    made = taught(features[:50], labels[:50])
    center = made.center.clone()
    made.update(features[50:] * 1.5, labels[50:])
    test, _ = some(7, seed=1)
    both = torch.cat([features[:50], features[50:] * 1.5])
    assert_alike(made.scores(test), joint(both, labels, test, features[:50]))  # without finish_task
    made.finish_task()
    assert torch.equal(made.center, center)


def test_a_scale_that_is_given() -> None:
    features, labels = some()
    test, _ = some(7, seed=1)
    made = Ridge(D, **PLAIN)
    made.fit_scale(features[:30])
    made.update(features, labels)
    assert_alike(made.scores(test), joint(features, labels, test, features[:30]))
    with pytest.raises(UserError, match="is fixed already"):
        made.fit_scale(features)


# Parts


def test_parts_with_the_same_scale_merge() -> None:
    features, labels = some()
    test, _ = some(7, seed=1)
    one = taught(features[:60], labels[:60] % 2)
    expected = joint(features, torch.cat([labels[:60] % 2, labels[60:]]), test, features[:60])
    other = Ridge.like(one)
    other.update(features[60:], labels[60:])
    one.merge(other)
    assert one.classes == 5 and one.counts.sum() == 120
    assert_alike(one.scores(test), expected)


def test_a_part_has_the_same_lift() -> None:
    features, labels = some()
    one = taught(features[:60], labels[:60], activation="fourier", bandwidth=0.2)
    other = Ridge.like(one)
    assert torch.equal(other.lifted(features), one.lifted(features))
    other.update(features[60:], labels[60:])
    one.merge(other)
    assert_alike(one.scores(features), taught_by(one, features, labels).scores(features))


def taught_by(scaled: Ridge, features: Tensor, labels: Tensor) -> Ridge:
    """A new classifier with the same lift and scale."""
    made = Ridge.like(scaled)
    made.update(features, labels)
    made.finish_task()
    return made


@pytest.mark.parametrize("finished", ["first", "second", "neither"])
def test_what_waits_merges(finished: str) -> None:
    """The scale is that of the part which has one."""
    features, labels = some()
    test, _ = some(7, seed=1)
    halves = [Ridge(D, **PLAIN) for _ in range(2)]
    for half, part in zip(halves, (slice(0, 60), slice(60, 120)), strict=True):
        half.update(features[part], labels[part])
    by = {"first": features[:60], "second": features[60:], "neither": features}[finished]
    if finished != "neither":
        halves[finished == "second"].finish_task()
    halves[0].merge(halves[1])
    assert_alike(halves[0].scores(test), joint(features, labels, test, by))


def test_what_cannot_be_merged() -> None:
    features, labels = some()
    one = taught(features[:60], labels[:60])
    for other in (NearestMean(D), Ridge(D, width=41, ridge=2.0), Ridge(D + 1, **PLAIN)):
        with pytest.raises(UserError, match="same number of features and options"):
            one.merge(other)
    with pytest.raises(UserError, match=r"Ridge\.like\(first\)"):
        one.merge(taught(features[60:], labels[60:]))


def test_a_state_in_the_middle_of_a_task_goes_on() -> None:
    features, labels = some()
    test, _ = some(7, seed=1)
    made = Ridge(D, **PLAIN)
    for start in (0, 20, 60):  # before and after the scale is fixed
        made.update(features[start : start + 20], labels[start : start + 20])
        resumed = Ridge(D, **PLAIN)
        resumed.load_state_dict({name: tensor.clone() for name, tensor in made.state_dict().items()})
        assert torch.equal(resumed.scores(test), made.scores(test))
        for one in (made, resumed):
            one.update(features[start + 20 : start + 40], labels[start + 20 : start + 40])
            one.finish_task()
        assert torch.equal(resumed.scores(test), made.scores(test))
        assert resumed.nbytes == made.nbytes


OTHERS = [{"seed": 1}, {"activation": "tanh"}, {"bandwidth": 0.3}, {"width": 41}, {"storage": "int16"}]


@pytest.mark.parametrize("options", OTHERS)
def test_a_state_of_other_options_is_refused(options: dict[str, Any]) -> None:
    state = taught(*some()).state_dict()
    with pytest.raises(UserError, match="other options"):
        Ridge(D, **{**PLAIN, **options}).load_state_dict(state)


# Options


@pytest.mark.parametrize("storage, size", [("int24", 0.75), ("int16", 0.5)])
def test_integers_are_close_and_smaller(storage: str, size: float) -> None:
    features, labels = some(1000)
    test, _ = some(200, seed=1)
    wide = {"width": 600, "ridge": 20.0}
    exact, small = taught(features, labels, **wide), taught(features, labels, cuts=3, storage=storage, **wide)
    assert small.gram.nbytes == size * exact.gram.nbytes
    # Correlations are off by 0.29 units on average: a random matrix, whose largest eigenvalue the ridge divides.
    step = 1 / module.storage_of.LARGEST[small.gram.dtype]
    relative = 2 * 600**0.5 * 0.29 * step * small.spread.square().max().item() / 20.0
    assert relative < 0.05
    relative += 100 * rounding(600)  # of the sums, in another order
    difference = (small.scores(test) - exact.scores(test)).norm() / exact.scores(test).norm()
    assert (
        difference <= relative and (small.scores(test).argmax(1) == exact.scores(test).argmax(1)).float().mean() > 0.95
    )


@pytest.mark.parametrize("storage", [None, "float32", "float64", "int24", "int16"])
@pytest.mark.parametrize("limit", ["300kB", "3MB", "2.5 MB"])
def test_the_state_keeps_to_its_limit(limit: str, storage: str | None) -> None:
    features, labels = some(60, classes=5)
    made = taught(features, labels, width="auto", state_limit=limit, storage=storage, expected_classes=5, ridge=1e3)
    assert 0.97 * parsed_size(limit) < made.nbytes <= parsed_size(limit)
    assert made.options.storage == (storage or "int24")


def test_a_limit_and_a_width() -> None:
    assert Ridge(D, width=100, state_limit="1MB").units == 100
    with pytest.raises(UserError, match=r"5000 units and room for 200 classes needs \d+\.\d MB, more than .* 1MB"):
        Ridge(D, width=5000, state_limit="1MB")
    with pytest.raises(UserError, match="more than the state_limit of 1kB"):
        Ridge(D, state_limit="1kB")
    for options, message in (
        ({"state_limit": "lots"}, "such as 500MB, got 'lots'"),
        ({"width": "auto"}, "needs a state_limit"),
        ({"width": -1}, "width must be at least 0"),
        ({"ridge": -1.0}, "ridge must be at least 0"),
        ({"rigde": 1.0}, "Did you mean 'ridge'"),
        ({"storage": "float8"}, "storage takes"),
    ):
        with pytest.raises(UserError, match=message):
            Ridge(D, **options)


def test_more_classes_than_expected_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    made = Ridge(D, state_limit="1MB", expected_classes=3)
    for _ in range(4):
        made.add_task(2)
    assert [record.message.count("expected_classes (3)") for record in caplog.records] == [1]


def test_without_a_lift() -> None:
    features, labels = some()
    test, _ = some(7, seed=1)
    made = taught(features, labels, width=0, activation="none")
    m, s = features.double().mean(0), features.double().std(0, correction=0)
    h, t = (features - m) / s, (test - m) / s
    assert made.units == D
    assert_alike(
        made.scores(test), t @ torch.linalg.solve(h.T @ h + 2 * torch.eye(D), h.T @ F.one_hot(labels).double())
    )


def test_blocks_are_classifiers_whose_scores_are_averaged() -> None:
    features, labels = some()
    test, _ = some(7, seed=1)
    made = taught(features, labels, blocks=2)
    m, s = features.double().mean(0), features.double().std(0, correction=0)
    parts = []
    for W in draw(D, WIDTH, 0).double().chunk(2, dim=1):
        h, t = (torch.relu((f - m) / s @ W) for f in (features, test))
        parts.append(t @ torch.linalg.solve(h.T @ h + 2 * torch.eye(20), h.T @ F.one_hot(labels).double()))
    assert_alike(made.scores(test), (parts[0] + parts[1]) / 2)


@pytest.mark.parametrize("width", [WIDTH, WIDTH - 1])
def test_fourier_features_are_cosines_and_sines(width: int) -> None:
    features, labels = some()
    test, _ = some(7, seed=1)
    made = taught(features, labels, activation="fourier", bandwidth=0.3, width=width)
    m, s = features.double().mean(0), features.double().std(0, correction=0)
    angles = (0.3 * ((f - m) / s @ draw(D, WIDTH // 2, 0).double()) for f in (features, test))
    h, t = (torch.stack((x.cos(), x.sin()), 2).flatten(1)[:, :width] for x in angles)
    expected = t @ torch.linalg.solve(h.T @ h + 2 * torch.eye(width), h.T @ F.one_hot(labels).double())
    assert_alike(made.scores(test), expected)


def test_balanced_divides_by_the_number_of_images() -> None:
    features, labels = some()
    test, _ = some(7, seed=1)
    chosen = (labels > 0) | (torch.arange(120) < 20)  # class 0 has 4 images, the others 24
    plain, balanced = (taught(features[chosen], labels[chosen], balanced=value) for value in (False, True))
    counts = torch.tensor([4.0, 24, 24, 24, 24])
    assert balanced.counts.tolist() == counts.tolist()
    assert_alike(balanced.scores(test), plain.scores(test) * counts.mean() / counts)


def test_rules_are_settings() -> None:
    for rule, values in RULES.items():
        made = Ridge(D, rule=rule, **({} if rule == "ours" else {"width": 50}))
        assert {name: getattr(made.options, name) for name in values if name != "width"} == {
            name: value for name, value in values.items() if name != "width"
        }
    assert (
        Ridge(D).units == 32 * D and Ridge(1000).units == 5000 and Ridge(D, rule="acil", width=8).options.ridge == 0.1
    )


def test_the_page_shows_every_option_and_its_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "classifiers.md").read_text(encoding="utf-8")
    for option in fields(RidgeOptions):
        assert f"| `{option.name}` |" in text
    features, labels = some()
    names: dict[str, Any] = {"features": features, "labels": labels}
    exec(re.findall(r"```python\n(.*?)```", text, re.S)[0], names)
    assert names["classifier"].counts.sum() == 240 and names["classifier"].nbytes <= 2e6
    assert capsys.readouterr().out.endswith(" MB\n")


# Difficult input


def test_a_class_without_images_has_no_chance() -> None:
    features, labels = some()
    made = Ridge(D, width=WIDTH)
    made.add_task(7)
    made.update(features[labels != 1], labels[labels != 1])
    made.finish_task()
    scores = made.scores(features)
    assert scores.isneginf().all(0).tolist() == [False, True, False, False, False, True, True]
    assert scores.dtype == torch.float32 and not scores.isnan().any()


def test_a_constant_feature_one_image_and_none() -> None:
    features, labels = some()
    features[:, 2] = 0.1
    made = taught(features, labels, ridge="auto")
    assert made.scores(features).isfinite().all() and (made.scores(features).argmax(1) == labels).float().mean() > 0.5
    one = taught(features[:1], torch.tensor([0]), ridge="auto")
    one.update(features[1:2], torch.tensor([1]))
    assert one.scores(features).isfinite().all()
    one.update(features[:0], labels[:0])
    assert one.counts.tolist() == [1, 1]


def test_bad_features_are_refused_and_change_nothing() -> None:
    features, labels = some()
    made = taught(features, labels)
    before = made.scores(features)
    features[3, 2] = torch.nan
    with pytest.raises(UserError, match="NaN or infinite"):
        made.update(features, labels)
    assert torch.equal(made.scores(some()[0]), before)
    with pytest.raises(UserError, match="ridge 0 is too small"):
        taught(*some(10), ridge=0.0)


# The choice of the ridge


def sums_of(h: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gram = h.T @ h
    return gram, gram.diagonal().clone(), F.one_hot(labels).to(h).T @ h


@pytest.mark.parametrize("images", [30, 120])
def test_the_slope_of_the_generalised_error_is_that_of_the_images(images: int) -> None:
    """The slope is known from the hat matrix; where it is clear, the estimate from sums has its sign."""
    features, labels = some(images)
    h = torch.relu(features.double() @ draw(D, WIDTH, 0).double())
    y, clear = F.one_hot(labels).double(), 0
    gram, diagonal, sums = sums_of(h, labels)

    def error(ridge: float) -> float:
        hat = h @ torch.linalg.solve(h.T @ h + ridge * torch.eye(WIDTH), h.T)
        return float(images * (y - hat @ y).square().sum() / (images - hat.trace()) ** 2)

    for ridge in (10.0 ** (step / 2) for step in range(-2, 11)):
        slope = (error(1.01 * ridge) - error(ridge / 1.01)) / (2 * math.log(1.01) * error(ridge))
        if abs(slope) > 0.1:
            clear += 1
            assert rises(gram.clone(), diagonal, sums, images, ridge) == (slope > 0), ridge
    assert clear >= 4


def test_the_first_that_holds() -> None:
    for first in range(-5, 4):
        asked: list[int] = []
        assert first_true(lambda x, f=first, a=asked: a.append(x) or x >= f, -5, 3) == first
        assert len(asked) <= 4 and all(-5 <= x < 3 for x in asked)
    assert first_true(lambda x: False, -5, 3) == 3


@pytest.mark.parametrize("units", [40, 300])  # fewer units than images, and more
def test_the_choice_is_half_a_decade_below_the_least_error(units: int) -> None:
    """The least generalised error of the images, in float64, of all ridges that are tried."""
    h, labels = noisy(200, units)
    gram, diagonal, sums = sums_of(h, labels)
    y, unit = F.one_hot(labels).double(), diagonal.mean().item()

    def error(step: int) -> float:
        inverse = torch.linalg.inv(gram + unit * 10 ** (step / 2) * torch.eye(units, dtype=torch.float64))
        hat = h @ inverse @ h.T
        return float((y - hat @ y).square().sum() / (200 - hat.trace()) ** 2)

    least = min(range(*STEPS), key=error)
    assert STEPS[0] < least < STEPS[1]
    assert choose(gram.clone(), diagonal, sums, 200)[0] == pytest.approx(unit * 10 ** ((least - 1) / 2))


def test_a_ridge_that_the_precision_does_not_allow_gives_way_to_the_next() -> None:
    """A G whose least eigenvalue is -0.02, as rounding can make it: 0.01 would be chosen, 10^-1.5 is the next."""
    basis = torch.linalg.qr(torch.randn(20, 20, generator=torch.Generator().manual_seed(0)).double())[0]
    values = torch.ones(20, dtype=torch.float64)
    values[0], values[1] = -0.02, 2.02  # the mean is 1
    gram = basis @ values.diag() @ basis.T
    diagonal, sums = gram.diagonal().clone(), 990**0.5 * basis[:, 2][None]  # 990 of 1000 images are explained
    assert factor(gram.clone(), diagonal, 0.01) is None
    assert not rises(gram.clone(), diagonal, sums, 1000, 0.01) and rises(gram.clone(), diagonal, sums, 1000, 0.05)
    ridge, lower = choose(gram.clone(), diagonal, sums, 1000)
    assert ridge == pytest.approx(10**-1.5)
    assert_near(lower @ lower.T, gram + ridge * torch.eye(20, dtype=torch.float64), 20)
    with pytest.raises(UserError, match="not those of finite features"):
        choose(gram * torch.nan, diagonal, sums, 1000)


def noisy(count: int, units: int) -> tuple[Tensor, Tensor]:
    """Lifted features with more noise than signal, in float64."""
    generator = torch.Generator().manual_seed(3)
    means = torch.randn(10, 50, generator=generator, dtype=torch.float64)
    labels = torch.arange(count) % 10
    features = means[labels] + 4 * torch.randn(count, 50, generator=generator, dtype=torch.float64)
    return torch.relu(features @ draw(50, units, 0).double()), labels


def test_the_choice_is_near_the_best_ridge_for_other_images() -> None:
    """More units than images, where a ridge matters."""
    h, labels = noisy(1200, 300)
    gram, diagonal, sums = sums_of(h[:200], labels[:200])

    def accuracy(ridge: float) -> float:
        weights = solve(gram, diagonal, sums, ridge)
        return ((h[200:] @ weights.T).argmax(1) == labels[200:]).double().mean().item()

    chosen, lower = choose(gram.clone(), diagonal, sums, 200)
    assert chosen == choose(gram.clone(), diagonal, sums, 200)[0] == choose(gram.float(), diagonal, sums, 200)[0]
    assert_near(lower @ lower.T, gram + chosen * torch.eye(300, dtype=torch.float64), 300)
    unit = float(diagonal.mean())
    best = max(accuracy(unit * 10.0**power) for power in range(-4, 4))
    assert accuracy(chosen) > best - 0.02 and accuracy(unit * 1e-4) < best - 0.05


# Recorded numbers


def recorded_like(goldens: Path, rule: str, features: int, projection: Tensor, **options: Any) -> Ridge:
    made = Ridge(features, rule=rule, width=projection.shape[1], storage="float64", **options)
    made.projection = projection.double()
    return made


def test_the_recorded_ranpac(goldens: Path) -> None:
    recorded = load_file(goldens / "ranpac.safetensors")
    made = recorded_like(goldens, "ranpac", 24, recorded["random_projection"])
    made.add_task(9)  # the recording's targets have a column for every class of all tasks
    for task in range(3):
        tensors = {key: recorded[f"task{task}.{key}"] for key in ("features", "labels", "ridge_losses", "weight")}
        h, y = made.lifted(tensors["features"]), F.one_hot(tensors["labels"], 9)
        errors = current_task_errors(h, y, made.options.held_out)
        torch.testing.assert_close(
            errors, tensors["ridge_losses"], rtol=2e-5, atol=0
        )  # small ridges are ill-conditioned
        made.update(tensors["features"], tensors["labels"])
        made.finish_task()
        assert made.ridge == recorded[f"task{task}.ridge"] and made.ridge in CURRENT
        torch.testing.assert_close(made._gram().block(slice(0, 40), torch.float64), recorded[f"task{task}.gram"])
        torch.testing.assert_close(made.sums.T, recorded[f"task{task}.class_sums"])
        seen = len(tensors["weight"])
        torch.testing.assert_close(made.weights[:seen], tensors["weight"], rtol=1e-7, atol=1e-9)


def test_the_recorded_acil(goldens: Path) -> None:
    """Its recursive least squares are this ridge regression."""
    recorded = load_file(goldens / "acil.safetensors")
    made = recorded_like(goldens, "acil", 6, recorded["random_projection.weight"].T)
    for chunk in range(3):
        features, labels = recorded[f"chunk{chunk}.features"], recorded[f"chunk{chunk}.labels"]
        torch.testing.assert_close(made.lifted(features), recorded[f"chunk{chunk}.expanded_features"])
        made.update(features, labels)
        made.finish_task()
        torch.testing.assert_close(made.weights.T, recorded[f"chunk{chunk}.recursive.weight"], rtol=1e-8, atol=1e-10)
        inverse = torch.linalg.inv(made._gram().block(slice(0, 20), torch.float64) + 0.1 * torch.eye(20))
        torch.testing.assert_close(inverse, recorded[f"chunk{chunk}.recursive.R"], rtol=1e-6, atol=1e-6)  # a recursion
    scores = made.scores(recorded["test.features"])
    torch.testing.assert_close(scores, recorded["test.recursive_scores"], rtol=1e-8, atol=1e-10)


def test_ranpac_answers_before_a_task_ends() -> None:
    features, labels = some()
    made = Ridge(D, rule="ranpac", width=WIDTH)
    made.update(features[:60], labels[:60])
    assert made.scores(features).isfinite().all() and made.ridge > 0
    made.update(features[60:], labels[60:])
    made.finish_task()  # judged by what has arrived since
    assert made.ridge in CURRENT


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("storage", ["float32", "int24", "int16"])
def test_a_gpu_gives_the_same(storage: str) -> None:
    features, labels = some()
    test, _ = some(7, seed=1)
    there = Ridge(D, **PLAIN, storage=storage).cuda()
    here = Ridge(D, **PLAIN, storage=storage)
    for made, device in ((here, "cpu"), (there, "cuda")):
        made.update(features.to(device), labels.to(device))
        made.finish_task()
    assert torch.equal(here.projection, there.projection.cpu())
    expected = joint(features, labels, test, features)
    back = Ridge(D, **PLAIN, storage=storage)
    back.load_state_dict(there.state_dict())
    assert_alike(back.scores(test), there.scores(test.cuda()).cpu())
    for made in (here, back) if storage == "float32" else ():
        assert_alike(made.scores(test), expected)
    auto = Ridge(D, width=WIDTH, storage=storage).cuda()
    auto.update(features.cuda(), labels.cuda())
    auto.finish_task()
    assert auto.scores(test.cuda()).isfinite().all() and auto.ridge > 0
