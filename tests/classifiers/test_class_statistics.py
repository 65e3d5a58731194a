"""Sums per class: what follows from them, in any order and any parts, mapped and sampled; and what every classifier
made from them owes its user."""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from tolerance import assert_near, rounding
from torch import Tensor

from mambacl.classifiers import LDA, ClassStatistics, Gaussian
from mambacl.classifiers.class_statistics import ClassStatisticsClassifier, whitening
from mambacl.classifiers.gaussian import FECAM, FECAM_VIT
from mambacl.classifiers.sampling import root
from mambacl.errors import UserError

D, CLASSES = 6, 4
MAKERS: dict[str, Callable[[int], ClassStatisticsClassifier]] = {
    "lda": LDA,
    "lda-counts": lambda d: LDA(d, shrinkage=0.1, balanced=False),
    "gaussian": Gaussian,
    "fecam": lambda d: Gaussian(d, **dataclasses.asdict(FECAM)),
    "fecam-vit": lambda d: Gaussian(d, **dataclasses.asdict(FECAM_VIT)),
}


def some(count: int = 200, seed: int = 0, mean: float = 0.0) -> tuple[Tensor, Tensor]:
    """Correlated features of classes of unequal size."""
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(count, generator=generator) ** 2 * CLASSES).long()
    mixing = torch.eye(D, dtype=torch.float64) + 0.5 * torch.rand(D, D, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, D, generator=generator, dtype=torch.float64) @ mixing
    centres = 2 * torch.randn(CLASSES, D, generator=generator, dtype=torch.float64)
    return mean + centres[labels] + noise, labels


def cuts(features: Tensor, labels: Tensor) -> Iterator[list[Tensor]]:
    """The same images in other orders and parts: single ones, class by class, large and small batches."""
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    yield list(shuffled.split(1))
    yield list(shuffled.split(37))
    yield [(labels == label).nonzero()[:, 0] for label in reversed(range(CLASSES))]


# Sums


@pytest.mark.parametrize("mean", [0.0, 1e3])
def test_means_and_covariances_are_those_of_the_features(mean: float) -> None:
    """Also with a mean of 1000 times the spread, where sums about zero lose six of sixteen digits."""
    features, labels = some(mean=mean)
    statistics, size = ClassStatistics(D), features.square().max().item()
    statistics.update(features, labels)
    scatter, freedom = torch.zeros(D, D, dtype=torch.float64), 0
    for label in range(CLASSES):
        own = features[labels == label]
        assert statistics.counts[label] == len(own)
        assert_near(statistics.means()[label], own.mean(0), len(own))
        assert_near(statistics.covariances()[label], own.T.cov(), len(own), size=size)
        scatter, freedom = scatter + (len(own) - 1) * own.T.cov(), freedom + len(own) - 1
    assert_near(statistics.within(), scatter / freedom, len(labels), size=size)
    error = torch.linalg.matrix_norm(statistics.within() - scatter / freedom, ord=2).item()
    assert error <= statistics.rounding().item() < 1e-6


def test_pooled_sums_give_the_same_covariance() -> None:
    features, labels = some()
    pooled, full = ClassStatistics(D, "pooled"), ClassStatistics(D)
    for statistics in (pooled, full):
        statistics.update(features, labels)
    assert_near(pooled.within(), full.within(), len(labels), size=features.square().max().item())
    assert pooled.moments.nbytes * CLASSES == full.moments.nbytes
    with pytest.raises(UserError, match="no covariance per class"):
        pooled.covariances()
    with pytest.raises(UserError, match="kind of covariance can merge"):
        full.merge(pooled)


@pytest.mark.parametrize("covariance", ["class", "pooled"])
def test_order_cut_and_merge_change_only_rounding(covariance: str) -> None:
    features, labels = some()
    whole = ClassStatistics(D, covariance)
    whole.update(features, labels)
    for parts in cuts(features, labels):
        left, right = ClassStatistics(D, covariance), ClassStatistics(D, covariance)
        for place, part in enumerate(parts):
            (left if place % 2 else right).update(features[part], labels[part])
        left.merge(right)
        assert torch.equal(left.counts, whole.counts)
        assert_near(left.sums, whole.sums, len(labels), size=features.abs().max().item() * len(labels) ** 0.5)
        assert_near(left.moments, whole.moments, len(labels), size=whole.moments.max().item())


def test_autocast_plays_no_part() -> None:
    features, labels = some()
    one, other = ClassStatistics(D), ClassStatistics(D)
    one.update(features.float(), labels)
    with torch.autocast("cpu", torch.bfloat16):
        other.update(features.float(), labels)
    assert torch.equal(one.moments, other.moments)


@pytest.mark.parametrize("covariance", ["class", "pooled"])
def test_transport_is_what_the_moved_features_would_give(covariance: str) -> None:
    (features, labels), generator = some(mean=3.0), torch.Generator().manual_seed(3)
    matrix = torch.eye(D) + 0.2 * torch.randn(D, D, generator=generator)
    offset = torch.randn(D, generator=generator)
    moved = features @ matrix.double() + offset.double()
    statistics, expected = ClassStatistics(D, covariance), ClassStatistics(D, covariance)
    statistics.update(features[:150], labels[:150])
    statistics.transport(matrix, offset)
    statistics.update(moved[150:], labels[150:])  # more images of the same classes afterwards
    expected.update(moved, labels)
    size = expected.moments.abs().max().item()
    assert_near(statistics.means(), expected.means(), len(labels) * D**2)
    assert_near(statistics.moments, expected.moments, len(labels) * D**2, size=size)

    residual = torch.diag(torch.arange(1.0, D + 1))
    before = statistics.within(), statistics.means()
    statistics.transport(torch.eye(D), residual=residual)
    assert_near(statistics.within(), before[0] + residual, len(labels), size=size)
    assert torch.equal(statistics.means(), before[1])
    with pytest.raises(UserError, match=r"finite offset \(6,\), got one of shape \(5,\)"):
        statistics.transport(matrix, offset[:5])
    with pytest.raises(UserError, match="finite matrix"):
        statistics.transport(matrix * float("nan"))


def test_samples_have_the_moments_of_the_classes() -> None:
    features, labels = some()
    statistics, count = ClassStatistics(D), 20_000
    statistics.update(features, labels)
    statistics.resize(CLASSES + 1)  # without images: never drawn
    drawn, which = statistics.sample(count, seed=5, own=1.0, pooled=0.0)
    assert which.tolist() == [label for label in range(CLASSES) for _ in range(count)]
    for label in range(CLASSES):
        own, covariance = drawn[which == label], statistics.covariances()[label]
        spread = covariance.diagonal().max().item()
        assert (own.mean(0) - statistics.means()[label]).abs().max() < 5 * (spread / count) ** 0.5
        assert (own.T.cov() - covariance).abs().max() < 5 * spread * (2 / count) ** 0.5
    assert torch.equal(statistics.sample(3, seed=5)[0], statistics.sample(3, seed=5)[0])
    assert not torch.equal(statistics.sample(3, seed=5)[0], statistics.sample(3, seed=6)[0])


def test_few_images_borrow_the_covariance_within_all_classes() -> None:
    features, labels = some()
    statistics = ClassStatistics(D)
    statistics.update(features, labels)
    statistics.update(features[:1], torch.tensor([CLASSES]))  # a class with one image
    blend, _ = statistics.blended()
    freedom = statistics.freedom()[0]
    expected = (freedom * statistics.covariances()[0] + 2 * D * statistics.within()) / (freedom + 2 * D)
    torch.testing.assert_close(blend[0], expected)
    torch.testing.assert_close(blend[CLASSES], statistics.within())
    torch.testing.assert_close(statistics.blended(own=1.0, pooled=0.0)[0][CLASSES], statistics.within())


def test_images_that_are_all_alike_are_drawn_as_they_are() -> None:
    statistics = ClassStatistics(2)
    statistics.update(torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.0, 0.0]]), torch.tensor([0, 0, 1]))
    drawn, _ = statistics.sample(4, seed=0)
    torch.testing.assert_close(drawn, statistics.means().repeat_interleave(4, 0), rtol=0, atol=1e-6)


def test_factors_of_definite_and_indefinite_matrices() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([[4.0, 2.0, 1.0], [4.0, 2.0, -1.0]], dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(2, 3, 3, generator=generator, dtype=torch.float64))[0]
    matrices = basis @ torch.diag_embed(values) @ basis.mT
    kept = basis @ torch.diag_embed(values.clamp(min=0)) @ basis.mT
    roots = root(matrices)
    assert_near(roots @ roots.mT, kept, 100)
    whiteners, log_det = whitening(matrices)
    assert_near(whiteners[0].T @ whiteners[0], matrices[0].inverse(), 100)
    assert abs(log_det[0].item() - math.log(8)) < rounding(100, torch.float64)
    assert torch.isfinite(whiteners).all() and torch.isfinite(log_det).all()


# Classifiers made from them


def taught(name: str, features: Tensor, labels: Tensor) -> ClassStatisticsClassifier:
    classifier = MAKERS[name](D)
    classifier.update(features, labels)
    return classifier


def assert_same_scores(one: ClassStatisticsClassifier, other: ClassStatisticsClassifier, features: Tensor) -> None:
    expected = one.scores(features)
    condition = 1e3  # of the shrunk covariances, far from singular
    assert_near(other.scores(features), expected, 200 * D, size=condition * expected.abs().max().item())
    assert torch.equal(other.scores(features).argmax(1), expected.argmax(1))


@pytest.mark.parametrize("name", MAKERS)
def test_scores_do_not_depend_on_order_cut_or_merge(name: str) -> None:
    (features, labels), (others, _) = some(), some(50, seed=9)
    whole = taught(name, features, labels)
    for parts in cuts(features, labels):
        left, right = MAKERS[name](D), MAKERS[name](D)
        for place, part in enumerate(parts):
            half = left if place % 2 else right
            half.update(features[part], labels[part])
            if place == 3:
                half.scores(others)  # a solution from before the next update must not stay
        left.merge(right)
        assert_same_scores(whole, left, others)


@pytest.mark.parametrize("name", MAKERS)
def test_predictions_do_not_depend_on_the_batch(name: str) -> None:
    classifier = taught(name, *some())
    features = some(50, seed=9)[0].float()
    together = classifier.scores(features)
    assert torch.equal(torch.cat([classifier.scores(one) for one in features.split(1)]).argmax(1), together.argmax(1))
    assert together.dtype == torch.float32 and not together.requires_grad


@pytest.mark.parametrize("name", MAKERS)
def test_a_state_resumes_and_a_copy_is_apart(name: str) -> None:
    (features, labels), (others, _) = some(), some(50, seed=9)
    first = taught(name, features[:100], labels[:100])
    apart = copy.deepcopy(first)
    resumed = MAKERS[name](D)
    resumed.scores(others)  # of no class at all
    resumed.load_state_dict(first.state_dict())
    for classifier in (first, resumed):
        classifier.update(features[100:], labels[100:])
    assert torch.equal(first.scores(others), resumed.scores(others))
    assert not torch.equal(first.scores(others), apart.scores(others))


@pytest.mark.parametrize("name", MAKERS)
def test_a_class_without_images_is_never_the_answer(name: str) -> None:
    features, labels = some()
    classifier = taught(name, features, labels)
    before = classifier.scores(features)
    classifier.add_task(2)
    scores = classifier.scores(features)
    assert (scores[:, CLASSES:] == -torch.inf).all()
    assert_near(scores[:, :CLASSES], before, 200 * D, size=before.abs().max().item())
    classifier.update(features[:1], torch.tensor([CLASSES + 1]))
    assert torch.isfinite(classifier.scores(features)[:, CLASSES + 1]).all()


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("case", ["constant feature", "one image each", "alike", "zeros", "fewer images than features"])
def test_degenerate_features_get_an_answer(name: str, case: str) -> None:
    features, labels = some()
    features, labels = features.abs(), labels.clone()
    if case == "constant feature":
        features[:, 2] = 7.0
    elif case == "one image each":
        features, labels = torch.eye(D, dtype=torch.float64)[:3], torch.arange(3)
    elif case == "alike":
        features, labels = torch.eye(D, dtype=torch.float64)[:3].repeat(5, 1), torch.arange(3).repeat(5)
    elif case == "zeros":
        features = torch.zeros_like(features)
    else:
        features, labels = features[:5], torch.tensor([0, 0, 1, 1, 1])
    for dtype in (torch.float64, torch.float32):
        scores = taught(name, features.to(dtype), labels).scores(features.to(dtype))
        assert torch.isfinite(scores[:, labels.unique()]).all()
        if case in ("one image each", "alike"):
            assert torch.equal(scores.argmax(1), labels)


@pytest.mark.parametrize("name", MAKERS)
def test_bad_batches_are_refused_and_change_nothing(name: str) -> None:
    features, labels = some()
    classifier = taught(name, features, labels)
    before = {key: tensor.clone() for key, tensor in classifier.state_dict().items()}
    bad = features[:2].clone()
    bad[0, 0] = float("nan")
    for wrong, which, message in (
        (bad, labels[:2], "NaN or infinite"),
        (features[:2, :3], labels[:2], r"update needs features \(b, 6\)"),
        (features[:2], labels[:3], r"labels \(b,\)"),
        (features[:2], torch.tensor([0, -1]), "whole numbers from 0"),
        (features[:2], torch.tensor([0.0, 1.0]), "whole numbers from 0"),
    ):
        with pytest.raises(UserError, match=message):
            classifier.update(wrong, which)
    with pytest.raises(UserError, match="with the same features and options can be merged"):
        classifier.merge(MAKERS[name](D + 1))
    classifier.update(features[:0], labels[:0])  # an empty batch
    assert all(torch.equal(tensor, before[key]) for key, tensor in classifier.state_dict().items())
    assert classifier.nbytes == sum(tensor.nbytes for tensor in before.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("name", MAKERS)
def test_the_gpu_gives_the_same(name: str) -> None:
    (features, labels), (others, _) = some(), some(50, seed=9)
    classifier = taught(name, features, labels)
    expected = classifier.scores(others)
    classifier.to("cuda")
    assert_near(classifier.scores(others.cuda()).cpu(), expected, 200 * D, size=1e3 * expected.abs().max().item())
    gathered = MAKERS[name](D).to("cuda")
    gathered.update(features.cuda(), labels.cuda())
    assert_near(gathered.scores(others.cuda()).cpu(), expected, 200 * D, size=1e3 * expected.abs().max().item())
