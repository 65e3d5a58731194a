"""Linear discriminant analysis: the shrinkage by hand, the scores by densities, priors."""

import pytest
import torch
from tolerance import assert_near
from torch import Tensor
from torch.distributions import MultivariateNormal

from mambacl.classifiers import LDA, NearestMean
from mambacl.classifiers.lda import oas
from mambacl.errors import UserError

D = 5


def some(count: int = 120, mean: float = 0.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    mixing = torch.rand(D, D, generator=generator, dtype=torch.float64) + torch.eye(D)
    centres = 3 * torch.randn(3, D, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, D, generator=generator, dtype=torch.float64) @ mixing
    return mean + centres[labels] + noise, labels


def test_the_shrinkage_by_hand() -> None:
    """d = 2: tr(S)^2 / (n (tr(S^2) - tr(S)^2 / 2)) = 16 / (10 (10 - 8)); at most 1."""
    covariance = torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))
    assert oas(covariance, 10.0).item() == pytest.approx(0.8)
    assert oas(covariance, 1.0).item() == 1.0
    assert oas(torch.eye(2), 10.0).item() == 1.0  # nothing to shrink


def test_the_shrinkage_brings_few_images_closer_to_the_truth() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.diag(torch.arange(1.0, 21.0, dtype=torch.float64))
    features = torch.randn(30, 20, generator=generator, dtype=torch.float64) @ truth.sqrt()
    errors = {}
    for shrinkage in ("auto", 0.0):
        lda = LDA(20, shrinkage=shrinkage)
        lda.update(features, torch.zeros(30, dtype=torch.int64))
        errors[shrinkage] = (lda.shrunk() - truth).norm().item()
    assert errors["auto"] < 0.8 * errors[0.0]


@pytest.mark.parametrize("shrinkage, target", [("auto", "variance"), (0.0, "variance"), (0.3, "identity")])
@pytest.mark.parametrize("mean", [0.0, 1e3])
def test_scores_are_log_densities(shrinkage: float | str, target: str, mean: float) -> None:
    """Up to what all classes share; also with a mean of 1000 times the spread."""
    features, labels = some(mean=mean)
    lda = LDA(D, shrinkage=shrinkage, target=target)
    lda.update(features, labels)
    means = torch.stack([features[labels == label].mean(0) for label in range(3)])
    centred = features - means[labels]
    within = centred.T @ centred / (len(labels) - 3)
    a = oas(within, len(labels) - 3) if shrinkage == "auto" else shrinkage
    shape = torch.eye(D, dtype=torch.float64)
    scale = within.trace() / D if target == "variance" else 1.0
    covariance = (1 - a) * within + a * scale * shape
    density = torch.stack([MultivariateNormal(m, covariance).log_prob(features) for m in means], 1)
    scores = lda.scores(features)
    # The sums are as exact as the second moments are large; the inverse divides by the least variance.
    moment, least = features.square().sum(1).mean(), torch.linalg.eigvalsh(covariance).min()
    size = (moment / least).item() * density.abs().max().item()
    assert_near(scores - scores[:, :1], density - density[:, :1], len(labels) * D, size=size)
    assert torch.equal(scores.argmax(1), density.argmax(1))
    alike = lda.scores(features.float())  # far from zero, float32 features have few digits left; the answer holds
    assert (alike.argmax(1) == scores.argmax(1)).float().mean() > 0.98


def test_priors_from_the_counts() -> None:
    features, labels = some()
    kept = (labels != 0) | (torch.arange(len(labels)) < 30)
    scores = []
    for balanced in (True, False):
        lda = LDA(D, balanced=balanced)
        lda.update(features[kept], labels[kept])
        scores.append(lda.scores(features))
    counts = torch.bincount(labels[kept]).double()
    expected = (counts / counts.sum()).log().expand(len(labels), 3)
    assert_near(scores[1] - scores[0], expected, D, size=scores[0].abs().max().item())


def test_without_variance_it_is_the_nearest_mean() -> None:
    features, labels = some(3)
    lda, nearest = LDA(D), NearestMean(D)
    for classifier in (lda, nearest):
        classifier.update(features, labels)
    others = some(50, seed=4)[0]
    assert torch.equal(lda.scores(others).argmax(1), nearest.scores(others).argmax(1))
    distances = torch.cdist(others, features).square()
    scores = lda.scores(others)
    torch.testing.assert_close(2 * (scores[:, :1] - scores), distances - distances[:, :1])


def test_it_holds_one_matrix_for_all_classes() -> None:
    lda = LDA(D)
    lda.update(*some())
    assert lda.nbytes == 8 * (3 + 3 * D + D * D)


def test_transport_moves_the_answer_with_the_features() -> None:
    (features, labels), generator = some(), torch.Generator().manual_seed(2)
    matrix = torch.eye(D, dtype=torch.float64) + 0.3 * torch.randn(D, D, generator=generator, dtype=torch.float64)
    lda = LDA(D, shrinkage=0.0)
    lda.update(features, labels)
    before = lda.scores(features)
    lda.transport(matrix, torch.ones(D))
    after = lda.scores(features @ matrix + 1)  # without shrinkage, an invertible map changes no density ratio
    assert_near(after - after[:, :1], before - before[:, :1], 120 * D, size=1e3 * before.abs().max().item())


def test_options_are_checked() -> None:
    for options, message in (
        ({"shrinkage": 1.5}, "at least 0 and at most 1"),
        ({"shrinkage": "much"}, "takes a number or one of auto"),
        ({"shrinkge": 0.1}, "Did you mean 'shrinkage'"),
        ({"balanced": 1}, "true or false"),
    ):
        with pytest.raises(UserError, match=message):
            LDA(D, **options)
