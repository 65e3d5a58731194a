"""The temperature, the knee, the thresholds for unknown images, and the features that are kept for them."""

import math

import pytest
import torch
from tolerance import assert_near
from torch import Tensor

from mambacl.classifiers.calibration import FEWEST, Calibration, calibrated, fit_temperature
from mambacl.classifiers.kept import CHUNK, KeptFeatures, from_bytes, to_bytes


def drawn(temperature: float, images: int = 20000, classes: int = 7) -> tuple[Tensor, Tensor]:
    """Scores, and labels drawn from their softmax at a temperature."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(images, classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(torch.softmax(scores / temperature, 1), 1, generator=generator)[:, 0]
    return scores, labels


@pytest.mark.parametrize("temperature", [0.05, 0.3, 1.0, 3.0])
def test_the_fit_recovers_a_known_temperature(temperature: float) -> None:
    scores, labels = drawn(temperature)
    assert fit_temperature(scores, labels) == pytest.approx(temperature, rel=0.05)


@pytest.mark.parametrize("knee", [0.5, 1.0, 2.0])
def test_the_fit_recovers_a_known_knee(knee: float) -> None:
    """To the nearest one that is tried."""
    scores, _ = drawn(1.0, 5000)
    truth = Calibration(0.3, knee, scores, scores).probabilities(scores)
    labels = torch.multinomial(truth, 1, generator=torch.Generator().manual_seed(1))[:, 0]
    found, plain = (calibrated(scores, scores, labels, estimates) for estimates in (True, False))
    assert found is not None and plain is not None and plain.knee == math.inf
    assert found.knee == pytest.approx(knee, rel=0.3) and found.temperature == pytest.approx(0.3, rel=0.1)
    assert (found.probabilities(scores) - truth).abs().max() < 0.05
    logits, classes = drawn(0.3, 5000)
    none = calibrated(logits, logits, classes, True)
    assert none is not None and (none.knee > 8 * none.temperature)  # hardly bent


def test_the_temperature_follows_the_scale_of_the_scores_and_ignores_their_shift() -> None:
    scores, labels = drawn(0.5, 500)
    found = fit_temperature(scores, labels)
    assert fit_temperature(1000 * scores + 77, labels) == pytest.approx(1000 * found, rel=1e-9)
    unseen = torch.cat((scores, torch.full((len(scores), 1), -torch.inf)), dim=1)
    assert fit_temperature(unseen, labels) == pytest.approx(found, rel=0.01)


def test_images_that_are_all_right_have_a_temperature_above_zero() -> None:
    labels = torch.arange(100) % 3
    scores = torch.nn.functional.one_hot(labels).double()
    confidence = torch.softmax(scores / fit_temperature(scores, labels), 1).amax(1)
    assert (confidence < 1 - 1 / 200).all() and (confidence > 0.9).all()


def some_calibration() -> Calibration:
    scores, labels = drawn(0.4, 400)
    found = calibrated(scores, scores.scatter(1, labels[:, None], -torch.inf), labels, True)
    assert found is not None
    return found


def test_calibration_changes_no_order() -> None:
    scores, _ = drawn(1.0, 50)
    found = some_calibration().probabilities(scores.float())
    assert torch.equal(found.argsort(1), scores.float().argsort(1))
    assert_near(found.sum(1), torch.ones(50).double(), 7)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.05, 0.333, 0.99])
def test_a_threshold_rejects_at_most_what_was_asked_and_nearly_that(share: float) -> None:
    calibration = some_calibration()
    rates = calibration.rejecting(share)
    rejected = float((calibration.known < rates.threshold).double().mean())
    assert rates.false_rejections == rejected <= share
    assert rejected > share - 1 / 400 - 1e-9
    assert rates.false_acceptances == float((calibration.foreign >= rates.threshold).double().mean())
    assert calibration.rates(rates.threshold) == rates and rates.images == 400


def test_more_rejections_mean_fewer_acceptances() -> None:
    accepted = [some_calibration().rejecting(share / 20).false_acceptances for share in range(20)]
    assert accepted == sorted(accepted, reverse=True) and accepted[0] > accepted[-1]


def test_few_images_or_another_version_give_no_calibration() -> None:
    scores, labels = drawn(1.0, FEWEST)
    assert calibrated(scores, scores, labels, True) is not None
    assert calibrated(scores[1:], scores[1:], labels[1:], True) is None
    assert calibrated(scores[:, :1], scores[:, :1], 0 * labels, True) is None
    state = some_calibration().state_dict()
    again = Calibration.from_state(state)
    assert again is not None and torch.equal(again.known, state["known"])
    assert Calibration.from_state({}) is None
    assert Calibration.from_state({**state, "version": torch.tensor(2)}) is None


# Features that are kept


def test_eight_bits_are_within_half_a_step() -> None:
    features = torch.randn(5, 2, CHUNK + 7, generator=torch.Generator().manual_seed(0))
    features[..., CHUNK:] *= 1000  # has its own scale
    features[0] = 0
    values, scales = to_bytes(features)
    again = from_bytes(values, scales)
    assert values.dtype == torch.int8 and torch.equal(again[0], features[0])
    for part in (slice(0, CHUNK), slice(CHUNK, None)):
        step = features[..., part].abs().amax(-1, keepdim=True) / 127
        assert ((again - features)[..., part].abs() <= step * 0.5001).all()


def kept(batches: list[int], room: int = 20, seed: int = 0) -> KeptFeatures:
    made = KeptFeatures(room, 2, 3, seed)
    features = torch.arange(100.0)[:, None, None].expand(100, 2, 3)
    labels = torch.arange(100) % 5
    for part, y in zip(features.split(batches), labels.split(batches), strict=True):
        made.add([part[:, 0], part[:, 1]], y)
    return made


def test_the_sample_does_not_depend_on_the_batches() -> None:
    expected = kept([100]).state_dict()
    assert len(expected["labels"]) == 20 and expected["counts"].tolist() == [20] * 5
    for batches in ([1] * 100, [7] * 14 + [2], [50, 50]):
        found = kept(batches).state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert not torch.equal(kept([100], seed=1).places, expected["places"])


def test_the_sample_is_of_all_images_alike() -> None:
    places = torch.cat([kept([10] * 10, seed=seed).places for seed in range(200)])
    shares = torch.bincount(places // 25, minlength=4) / len(places)
    assert (shares - 0.25).abs().max() < 0.04  # four standard deviations: 0.027


def test_a_state_continues_as_if_nothing_had_happened() -> None:
    whole, first = kept([100]), KeptFeatures(20, 2, 3)
    features, labels = torch.arange(100.0)[:, None].expand(100, 3), torch.arange(100) % 5
    first.add([features[:40]] * 2, labels[:40])
    second = KeptFeatures(20, 2, 3)
    second.load_state_dict(first.state_dict())
    second.add([features[40:]] * 2, labels[40:])
    assert all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in second.state_dict().items())


def test_a_class_with_one_image_is_not_read() -> None:
    made = KeptFeatures(20, 1, 3)
    made.add([torch.ones(4, 3)], torch.tensor([0, 1, 0, 2]))
    features, labels = made.read()
    assert len(made) == 4 and labels.tolist() == [0, 0] and features.shape == (2, 1, 3)
    assert made.nbytes == sum(tensor.nbytes for tensor in made.state_dict().values())
    assert made.nbytes == 4 * made.image_nbytes + made.counts.nbytes
