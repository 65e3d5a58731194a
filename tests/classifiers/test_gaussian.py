"""One Gaussian per class: FeCAM's recorded numbers, densities as the plain twin, drift."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tolerance import assert_near
from torch import Tensor
from torch.distributions import MultivariateNormal

from mambacl.classifiers import Gaussian, gaussian
from mambacl.classifiers.gaussian import FECAM, FECAM_VIT, RGDA, GaussianOptions
from mambacl.errors import UserError

D, CLASSES = 5, 3
IDENTITY = torch.eye(D, dtype=torch.float64)


def some(count: int = 120, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    mixing = torch.rand(CLASSES, D, D, generator=generator, dtype=torch.float64) + torch.eye(D)
    centres = 2 * torch.randn(CLASSES, D, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, 1, D, generator=generator, dtype=torch.float64)
    return centres[labels] + (noise @ mixing[labels])[:, 0], labels


def made(options: GaussianOptions, num_features: int = D) -> Gaussian:
    return Gaussian(num_features, **dataclasses.asdict(options))


RULES = {
    "cnn": FECAM,
    "cnn_no_tukey_no_norm": dataclasses.replace(FECAM, tukey=1.0, correlation=False),
    "vit": FECAM_VIT,
}


@pytest.mark.parametrize("rule", RULES)
def test_fecam_as_recorded(rule: str, goldens: Path) -> None:
    """github.com/dipamgoswami/FeCAM at d2479b7: covariances and squared distances, in float64."""
    recorded = load_file(goldens / "fecam.safetensors")
    classifier = made(RULES[rule], 7)
    for label in range(6):
        features = recorded[f"class{label}.features"]
        classifier.update(features, torch.full((len(features),), label))
    used = recorded.get(f"{rule}.covariances_normalised", recorded.get(f"{rule}.covariances_shrunk_twice"))
    torch.testing.assert_close(classifier.covariances(), used, rtol=1e-8, atol=1e-10)
    once = made(dataclasses.replace(RULES[rule], rounds=1, correlation=False), 7)
    once.load_state_dict(classifier.state_dict())
    torch.testing.assert_close(once.covariances(), recorded[f"{rule}.covariances_shrunk_once"], rtol=1e-8, atol=1e-10)
    if f"{rule}.covariances_shrunk_twice" in recorded:
        twice = made(dataclasses.replace(RULES[rule], correlation=False), 7)
        twice.load_state_dict(classifier.state_dict())
        torch.testing.assert_close(
            twice.covariances(), recorded[f"{rule}.covariances_shrunk_twice"], rtol=1e-8, atol=1e-10
        )
    plain = classifier.plain_sums if RULES[rule].tukey != 1 else classifier.statistics.sums
    means = plain / classifier.statistics.counts[:, None]
    torch.testing.assert_close(means, recorded[f"{rule}.class_means"], rtol=1e-8, atol=1e-10)
    distances = -2 * classifier.scores(recorded["test.features"])
    torch.testing.assert_close(distances, recorded[f"{rule}.test.squared_distances"], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("rule", ["default", "rgda", "own", "pooled", "correlation"])
def test_scores_are_log_densities(rule: str) -> None:
    """With torch's density as the plain twin; the covariance from its formula."""
    options = {
        "default": GaussianOptions(),
        "rgda": RGDA,
        "own": GaussianOptions(own=1.0, pooled=0.0, variance=0.0),
        "pooled": GaussianOptions(own=0.0, pooled=1.0, variance=0.0),
        "correlation": GaussianOptions(correlation=True),
    }[rule]
    features, labels = some()
    classifier = made(options)
    classifier.update(features, labels)
    parts = [features[labels == label] for label in range(CLASSES)]
    within = sum((len(part) - 1) * part.T.cov() for part in parts) / (len(labels) - CLASSES)
    densities, least = [], []
    for part in parts:
        auto = (len(part) - 1) / (len(part) - 1 + 2 * D)
        own = auto if options.own == "auto" else options.own
        pooled = 1 - auto if options.pooled == "auto" else options.pooled
        covariance = own * part.T.cov() + pooled * within
        covariance = covariance + (options.variance * covariance.trace() / D + options.identity) * IDENTITY
        if options.correlation:
            covariance = covariance / torch.outer(covariance.diagonal().sqrt(), covariance.diagonal().sqrt())
        least.append(torch.linalg.eigvalsh(covariance).min().item())
        densities.append(MultivariateNormal(part.mean(0), covariance).log_prob(features))
    expected = torch.stack(densities, 1) + D / 2 * torch.log(torch.tensor(2 * torch.pi, dtype=torch.float64))
    # The sums are as exact as the second moments are large; the inverse divides by the least variance.
    size = features.square().sum(1).mean().item() / min(least) * expected.abs().max().item()
    for dtype in (torch.float64, torch.float32):
        assert_near(classifier.scores(features.to(dtype)), expected, 120 * D, size=size)


def test_blocks_of_classes_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = some()
    expected = None
    for at_once in (gaussian.AT_ONCE, 1):  # 1: one class at a time, in the solution and in the scores
        monkeypatch.setattr(gaussian, "AT_ONCE", at_once)
        classifier = Gaussian(D)
        classifier.update(features, labels)
        expected = classifier.scores(features) if expected is None else expected
        assert_near(classifier.scores(features), expected, D**2, size=1e2 * expected.abs().max().item())


def test_a_class_of_one_image_takes_the_covariance_of_the_others() -> None:
    features, labels = some()
    for options in (GaussianOptions(), FECAM_VIT, RGDA):
        classifier = made(options)
        classifier.update(features, labels)
        classifier.update(features[:1] + 20, torch.tensor([CLASSES]))
        scores = classifier.scores(torch.cat([features, features[:1] + 20]))
        assert torch.isfinite(scores).all() and scores[-1].argmax() == CLASSES
        assert (scores[:-1].argmax(1) == labels).float().mean() > 0.7


def test_the_log_determinant_is_optional() -> None:
    features, labels = some()
    with_it, without = Gaussian(D), Gaussian(D, log_det=False)
    for classifier in (with_it, without):
        classifier.update(features, labels)
    difference = without.scores(features) - with_it.scores(features)
    expected = (torch.logdet(with_it.covariances()) / 2).expand(len(labels), CLASSES)
    assert_near(difference, expected, 120 * D, size=without.scores(features).abs().max().item())


def test_means_under_powers_keep_their_signs() -> None:
    classifier = Gaussian(2, tukey=0.5)
    classifier.update(torch.tensor([[4.0, -9.0], [4.0, -9.0], [1.0, 1.0]]), torch.tensor([0, 0, 1]))
    assert classifier.means().tolist() == [[2.0, -3.0], [1.0, 1.0]]
    assert classifier.nbytes == 8 * (2 + 2 * 2 * 2 + 2 * 4)


def test_transport_needs_plain_features() -> None:
    features, labels = some()
    plain = Gaussian(D, own=1.0, pooled=0.0, variance=0.0)
    plain.update(features, labels)
    before = plain.scores(features)
    plain.transport(2 * torch.eye(D))
    after = plain.scores(2 * features)
    assert_near(after - after[:, :1], before - before[:, :1], 120 * D, size=1e3 * before.abs().max().item())
    for options in ({"tukey": 0.5}, {"unit": "features"}):
        with pytest.raises(UserError, match="Only Gaussians of plain features follow"):
            Gaussian(D, **options).transport(torch.eye(D))


def test_options_are_checked() -> None:
    for options, message in (
        ({"tukey": 0.0}, "above 0 and at most 1"),
        ({"own": -1.0}, "auto, or finite and at least 0"),
        ({"rounds": 0}, "at least 1"),
        ({"unit": "length"}, "one of none, features, distance"),
    ):
        with pytest.raises(UserError, match=message):
            Gaussian(D, **options)
