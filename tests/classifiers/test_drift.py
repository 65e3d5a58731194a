"""Statistics of old classes that follow the features: drift that is exactly linear is undone, no drift changes nothing,
and what published code computes comes out."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tolerance import rounding
from torch import Tensor

from mambacl.classifiers import LDA, AlignedHeads, Gaussian, NearestMean, Ridge
from mambacl.classifiers.base import Classifier
from mambacl.classifiers.drift import FollowsDrift
from mambacl.errors import UserError

D, OLD, NEW, EACH = 6, 3, 4, 50  # features, old and new classes, images per class
RIDGE = {"storage": "float64", "ridge": 1.0}
MAKERS: dict[str, Callable[..., Any]] = {
    "nearest-mean": NearestMean,
    "lda": LDA,
    "gaussian": Gaussian,
    "aligned": AlignedHeads,
    "ridge": lambda d, **options: Ridge(d, width=0, **RIDGE, **options),
    "lifted": lambda d, **options: Ridge(d, width=30, **RIDGE, **options),
}
EXACT = [name for name in MAKERS if name != "lifted"]  # a lift of linear drift is not linear


def features(first: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed + first)
    labels = (first + torch.arange(classes)).repeat_interleave(EACH)
    means = 2 * torch.randn(classes, D, generator=generator, dtype=torch.float64)
    noise = torch.randn(len(labels), D, generator=generator, dtype=torch.float64)
    return 1 + means.repeat_interleave(EACH, 0) + noise, labels


def linear(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    matrix = torch.eye(D, dtype=torch.float64) + 0.3 * torch.randn(D, D, generator=generator, dtype=torch.float64)
    return x @ matrix + torch.randn(D, generator=generator, dtype=torch.float64)


def made(name: str, drift: str = "linear", **options: Any) -> Any:
    """After a first task."""
    classifier = MAKERS[name](D, drift=drift, **options)
    classifier.add_task(OLD)
    classifier.update(*features(0, OLD))
    classifier.finish_task()
    return classifier


def statistics(classifier: FollowsDrift) -> list[Tensor]:
    """Means and second moments."""
    if isinstance(classifier, Ridge):
        gram = classifier._gram().block(slice(0, classifier.units), torch.float64)
        return [*classifier.class_means(), gram / EACH]
    others = [classifier.statistics.moments / EACH] if hasattr(classifier, "statistics") else []
    return [*classifier.class_means(), *others]


def pairs(size: int | None = None, order: Tensor | None = None) -> list[tuple[Tensor, Tensor, Tensor]]:
    x, labels = features(OLD, NEW)
    order = torch.arange(len(labels)) if order is None else order
    return [(x[part], linear(x[part]), labels[part]) for part in order.split(size or len(labels))]


@pytest.mark.parametrize("name", EXACT)
def test_linear_drift_is_undone(name: str) -> None:
    """Means, covariances, G and Q are those that the old images would give now, to the rounding of float64 and of the
    smallest ridge that is tried."""
    classifier, again = made(name), made(name, "none")
    stale = [tensor.clone() for tensor in statistics(classifier)]
    found = classifier.follow(pairs(40))
    x, labels = features(0, OLD)
    if isinstance(again, Ridge):  # the scale of the first task stays
        fresh = Ridge.like(again)
        fresh.update(linear(x), labels)
        fresh.finish_task()
    else:
        fresh = MAKERS[name](D)
        fresh.add_task(OLD)
        fresh.update(linear(x), labels)
    smallest = NEW * EACH * 0.05  # far below the smallest eigenvalue of the sums that are inverted
    relative = found.choice / smallest + 100 * rounding(NEW * EACH * D, torch.float64)
    assert relative < 1e-8
    for ours, theirs, before in zip(statistics(classifier), statistics(fresh), stale, strict=True):
        size = theirs.double().abs().max().item()
        assert (ours - theirs).abs().max().item() <= relative * size
        assert (before - theirs).abs().max().item() > 0.1 * size or before.dtype == torch.int64  # something moved


@pytest.mark.parametrize("drift", ["shift", "linear"])
@pytest.mark.parametrize("name", MAKERS)
def test_without_drift_nothing_changes_by_a_bit(name: str, drift: str) -> None:
    classifier = made(name, drift)
    before = {key: tensor.clone() for key, tensor in classifier.state_dict().items()}
    x, labels = features(OLD, NEW)
    assert classifier.follow([(x, x, labels)]).choice == math.inf
    assert all(torch.equal(tensor, before[key]) for key, tensor in classifier.state_dict().items())


@pytest.mark.parametrize("name", MAKERS)
def test_a_common_shift_is_followed_by_both_kinds(name: str) -> None:
    """Every feature moves by the same vector: for features, SDC and the linear map agree with the truth."""
    x, labels = features(OLD, NEW)
    step = torch.linspace(-1, 1, D, dtype=torch.float64)
    for drift in ("shift", "linear"):
        classifier = made(name, drift)
        before = classifier.class_means()[0].clone()
        classifier.follow([(x, x + step, labels)])
        moved = classifier.class_means()[0] - before
        if name == "lifted":
            assert moved.norm() > 0
            continue
        expected = step / classifier.scale if isinstance(classifier, Ridge) else step
        assert (moved - expected).abs().max() < 1e-6


@pytest.mark.parametrize("drift", ["shift", "linear"])
@pytest.mark.parametrize("name", MAKERS)
def test_order_and_batches_do_not_matter(name: str, drift: str) -> None:
    one, other = made(name, drift), made(name, drift)
    shuffled = torch.randperm(NEW * EACH, generator=torch.Generator().manual_seed(1))
    choices = one.follow(pairs()).choice, other.follow(pairs(7, shuffled)).choice
    assert math.isclose(*choices, rel_tol=1e-9)
    for ours, theirs in zip(statistics(one), statistics(other), strict=True):
        # float32 sums of shifts, and what a small ridge makes of rounding
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.double().abs().max()


@pytest.mark.parametrize("drift", ["shift", "linear"])
@pytest.mark.parametrize("name", MAKERS)
def test_single_images_and_single_classes(name: str, drift: str) -> None:
    """One image of a new class, one new class with images alone, and a class without images: answers stay finite."""
    for x, labels in (features(OLD, NEW), features(OLD, 1), tuple(t[:1] for t in features(OLD, 1))):
        keep = (labels == OLD) | (torch.arange(len(labels)) % EACH == 0)
        classifier: Any = made(name, drift)
        classifier.add_task(NEW)
        classifier.follow([(x[keep], linear(x[keep]), labels[keep])])
        classifier.update(linear(x[keep]), labels[keep])
        classifier.finish_task()
        scores = classifier.scores(linear(x).float())
        assert torch.isfinite(scores[:, :OLD]).all() and not torch.isnan(scores).any()


def test_before_the_first_task_there_is_nothing_to_read() -> None:
    def never() -> Any:
        raise AssertionError
        yield

    assert NearestMean(D, drift="linear").follow(never()).matrix is None
    assert made("lda", "none").follow(never()).matrix is None


def test_unexplained_drift_widens_covariances() -> None:
    """Noise that no map explains is added to the covariance, so that old classes do not lose to new ones."""
    x, labels = features(OLD, NEW)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    classifier = made("lda")
    before = classifier.statistics.within()
    found = classifier.follow([(x, linear(x) + noise, labels)])
    assert found.matrix is not None
    mapped = found.matrix.T @ before @ found.matrix
    added = (classifier.statistics.within() - mapped).diagonal()
    assert added.min() > 0.5 and added.max() < 2


def test_drift_that_new_classes_do_not_agree_on_is_not_followed() -> None:
    x, labels = features(OLD, NEW)
    away = torch.randn(NEW, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)[labels - OLD]
    sign = 1.0 - 2 * ((labels - OLD) // 2 % 2).double()[:, None]  # neighbours move apart
    classifier = made("nearest-mean", "shift")
    before = classifier.class_means()[0].clone()
    assert classifier.follow([(x, x + sign * away.abs(), labels)]).choice == math.inf
    assert torch.equal(classifier.class_means()[0], before)


def test_drift_of_features_that_are_not_numbers_is_refused() -> None:
    x, labels = features(OLD, NEW)
    with pytest.raises(UserError, match="A feature is NaN or infinite"):
        made("lda").follow([(x, x * float("nan"), labels)])
    with pytest.raises(UserError, match="update needs features"):
        made("lda").follow([(x[:, :2], x, labels)])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: NearestMean(D, drift="sideways"), "drift"),
        (lambda: Gaussian(D, drift="linear", tukey=0.5), "Only Gaussians of plain features follow a drift"),
        (lambda: Ridge(D, drift="shift", blocks=2), "several blocks cannot follow a drift"),
    ],
)
def test_options_are_refused_in_one_sentence(make: Callable[[], Classifier], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_the_state_comes_back() -> None:
    for name in MAKERS:
        classifier = made(name)
        classifier.follow(pairs())
        other = MAKERS[name](D, drift="linear")
        other.load_state_dict(classifier.state_dict())
        for ours, theirs in zip(statistics(other), statistics(classifier), strict=True):
            assert torch.equal(ours, theirs)
