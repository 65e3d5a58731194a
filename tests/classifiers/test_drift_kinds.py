"""What every kind of drift correction owes: nothing changes without drift, drift that a kind models is undone, the same
seed gives the same bits, and a classifier that cannot follow a kind says so."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tolerance import rounding
from torch import Tensor

from mambacl.classifiers import LDA, AlignedHeads, Gaussian, NearestMean, Ridge
from mambacl.classifiers.drift import DriftOptions
from mambacl.classifiers.drifts import KINDS
from mambacl.classifiers.drifts.base import TaskEnd
from mambacl.classifiers.drifts.efc import elastic_sum, penalty
from mambacl.errors import UserError
from mambacl.options import options_of

D, OLD, NEW, EACH = 5, 3, 4, 60
CLASSIFIERS: dict[str, Any] = {
    "nearest-mean": NearestMean,
    "lda": LDA,
    "gaussian": Gaussian,
    "aligned": AlignedHeads,
    "ridge": lambda d, **options: Ridge(d, width=20, storage="float64", ridge=1.0, **options),
}
SMALL: dict[str, dict[str, Any]] = {
    "adagauss": {"hidden": 20, "epochs": 2, "samples": 50},
    "sldc": {"steps": 30},
    "ldc": {"epochs": 2},
}
MEANS_ONLY = ("shift", "sdc", "ldc", "adc", "efc")
TRAINED = ("ldc", "adagauss", "sldc")


def followed(classifier: str, kind: str) -> bool:
    needs = KINDS[kind]
    holds = classifier in ("lda", "gaussian", "aligned")
    return (holds or not needs.needs_covariances) and (classifier != "ridge" or not needs.needs_features)


PAIRS = [(name, kind) for name in CLASSIFIERS for kind in KINDS if followed(name, kind)]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some(first: int, classes: int, each: int = EACH, seed: int = 0) -> tuple[Tensor, Tensor]:
    labels = (first + torch.arange(classes)).repeat_interleave(each)
    means = 2 * torch.randn(classes, D, generator=generator(seed + first), dtype=torch.float64)
    noise = torch.randn(len(labels), D, generator=generator(seed + first + 50), dtype=torch.float64)
    return 1 + means.repeat_interleave(each, 0) + noise, labels


def bent(x: Tensor) -> Tensor:
    """A drift that no kind models."""
    matrix = torch.eye(D, dtype=torch.float64) + 0.2 * torch.randn(D, D, generator=generator(5), dtype=torch.float64)
    return x @ matrix + 0.3 * x.sin()


class Network:
    """Images are (b, 1, 1, D); their features are the values, moved by `change` unless it is before the task."""

    def __init__(self, change: Any, images: Tensor) -> None:
        self.change, self.moved, self.all = change, True, images.view(-1, 1, 1, D)
        self.weight = torch.randn(OLD + NEW, D, generator=generator(3))

    def features(self, images: Tensor) -> Tensor:
        return self.change(images.flatten(1)) if self.moved else images.flatten(1)

    def heads(self, features: Tensor) -> Tensor:
        return features @ self.weight.T.to(features)

    @contextmanager
    def before(self) -> Iterator[None]:
        self.moved = False
        try:
            yield
        finally:
            self.moved = True

    def end(self, seed: int = 0, size: int = 50) -> TaskEnd:
        return TaskEnd(
            seed,
            self.heads,
            lambda: self.all.split(size),
            self.features,
            self.before,
        )


def made(name: str, kind: str, **options: Any) -> Any:
    """After a first task, at whose end nothing has moved."""
    classifier = CLASSIFIERS[name](D, drift=kind, drift_options={**SMALL.get(kind, {}), **options})
    x, labels = some(0, OLD)
    classifier.add_task(OLD)
    if kind != "none":
        classifier.follow([(x, x, labels)], Network(bent, x).end())
    classifier.update(x, labels)
    classifier.finish_task()
    return classifier


def follow(classifier: Any, change: Any, seed: int = 0, size: int = NEW * EACH, order: Tensor | None = None) -> Any:
    x, labels = some(OLD, NEW)
    order = torch.arange(len(labels)) if order is None else order
    x, labels = x[order], labels[order]
    pairs = [(x[part], change(x[part]), labels[part]) for part in torch.arange(len(x)).split(size)]
    return classifier.follow(pairs, Network(change, x).end(seed))


def statistics(classifier: Any) -> list[Tensor]:
    means = [classifier.class_means()[0]]
    return [*means, classifier.class_covariances()] if hasattr(classifier, "statistics") else means


# Every kind


def test_every_kind_is_an_option_with_a_paper() -> None:
    import sys

    known = options_of(DriftOptions)["drift"].kind.__args__
    assert known == ("none", *KINDS)
    for kind in KINDS.values():
        assert sys.modules[kind.__module__].__doc__
        kind.options_class()  # has a default for everything


@pytest.mark.parametrize("name, kind", PAIRS)
def test_without_drift_nothing_changes_by_a_bit(name: str, kind: str) -> None:
    classifier = made(name, kind)
    before = {key: tensor.clone() for key, tensor in classifier.state_dict().items()}
    assert follow(classifier, lambda x: x).choice == math.inf
    after = classifier.state_dict()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items() if key != "drift_matrix")


@pytest.mark.parametrize("name, kind", PAIRS)
def test_drift_is_followed_and_old_classes_stay_finite(name: str, kind: str) -> None:
    """Those that act on means leave covariances as they were; a class without images and one with a single image do
    not matter."""
    classifier = made(name, kind)
    classifier.add_task(2)
    classifier.update(some(OLD, 1)[0][:1], torch.tensor([OLD + 1]))
    before = [tensor.clone() for tensor in statistics(classifier)]
    follow(classifier, bent)
    after = statistics(classifier)
    assert all(torch.isfinite(tensor).all() for tensor in after)
    assert (after[0][:OLD] - before[0][:OLD]).norm() > 1e-3 and not after[0][OLD].any()
    if len(after) == 2:
        change = (after[1][:OLD] - before[1][:OLD]).norm() / before[1][:OLD].norm()
        assert change < 1e-10 if kind in MEANS_ONLY else change > 1e-3


@pytest.mark.parametrize("kind", ["sdc", "dpcr", "sldc-linear", "efc", "linear"])
def test_order_and_batches_do_not_matter_to_maps_from_sums(kind: str) -> None:
    one, other = made("gaussian", kind), made("gaussian", kind)
    follow(one, bent)
    follow(other, bent, size=7, order=torch.randperm(NEW * EACH, generator=generator(1)))
    for ours, theirs in zip(statistics(one), statistics(other), strict=True):
        assert (ours - theirs).abs().max() <= 1e-9 * theirs.abs().max()


@pytest.mark.parametrize("kind", TRAINED)
def test_maps_that_train_follow_from_the_seed(kind: str) -> None:
    torch.manual_seed(7)
    state = torch.get_rng_state()
    one, same, other = (made("gaussian", kind) for _ in range(3))
    for classifier, seed in ((one, 0), (same, 0), (other, 1)):
        follow(classifier, bent, seed=seed)
    assert torch.equal(torch.get_rng_state(), state)
    for ours, theirs in zip(statistics(one), statistics(same), strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(statistics(one)[0], statistics(other)[0])


@pytest.mark.parametrize("name, kind", [(n, k) for n in CLASSIFIERS for k in KINDS if not followed(n, k)])
def test_a_classifier_refuses_what_it_cannot_follow(name: str, kind: str) -> None:
    with pytest.raises(UserError, match=f"The drift {kind} needs .*, which {name} does not have") as caught:
        CLASSIFIERS[name](D, drift=kind)
    text = str(caught.value)
    assert text.endswith("sldc-linear.") and text.count(". ") == 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"drift": "sdc", "drift_options": {"sigma": 0}}, "drift sdc: sigma must be finite and above 0"),
        ({"drift": "sdc", "drift_options": {"sigmas": 1.0}}, "There is no option 'sigmas'|there is no option 'sigmas'"),
        ({"drift": "shift", "drift_options": {"sigma": 1.0}}, "here is no option 'sigma'"),
        ({"drift_options": {"sigma": 1.0}}, "set drift as well"),
    ],
)
def test_options_of_a_kind_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Gaussian(D, **options)


@pytest.mark.parametrize("kind, what", [("adc", "images"), ("efc", "heads")])
def test_what_a_kind_needs_beside_features_is_named(kind: str, what: str) -> None:
    classifier = made("gaussian", "none")
    classifier.options = Gaussian(D, drift=kind).options
    x, labels = some(OLD, NEW)
    with pytest.raises(UserError, match=rf"call follow with TaskEnd\({what}"):
        classifier.follow([(x, bent(x), labels)])


# Drift that a kind models


def error(classifier: Any, change: Any) -> list[float]:
    """Of means, relative to how far they move, and of covariances, relative to their size, against those of the old
    images after the drift."""
    x, labels = some(0, OLD)
    fresh = type(classifier)(D)
    fresh.add_task(OLD)
    fresh.update(change(x), labels)
    stale = made("gaussian" if isinstance(classifier, Gaussian) else "nearest-mean", "none")
    sizes = [(statistics(stale)[0] - statistics(fresh)[0]).norm(), *(x.norm() for x in statistics(fresh)[1:])]
    both = zip(statistics(classifier), statistics(fresh), sizes, strict=True)
    return [float((ours[:OLD] - theirs).norm() / size) for ours, theirs, size in both]


def turned(x: Tensor) -> Tensor:
    matrix = torch.linalg.qr(torch.randn(D, D, generator=generator(8), dtype=torch.float64))[0]
    return x @ matrix.to(x)


def mixed(x: Tensor) -> Tensor:
    matrix = torch.eye(D, dtype=torch.float64) + 0.3 * torch.randn(D, D, generator=generator(9), dtype=torch.float64)
    return x @ matrix.to(x)


def stepped(x: Tensor) -> Tensor:
    return x + torch.linspace(-1, 1, D).to(x)


def test_dpcr_undoes_a_linear_drift() -> None:
    """To the rounding of the sums and the ridge of 1e-9."""
    classifier = made("gaussian", "dpcr")
    follow(classifier, mixed)
    assert max(error(classifier, mixed)) < 1e-9 + 1e4 * rounding(NEW * EACH, torch.float64)


def test_sldc_linear_undoes_a_rotation() -> None:
    """Lengths stay, so the map of features of length 1 is that of the features, up to the ridge, the share of the
    identity and the residual."""
    classifier = made("gaussian", "sldc-linear", ridge=1e-12, trust=0.1, residual=0.0)
    follow(classifier, turned)
    assert max(error(classifier, turned)) < 1e-9


def test_ldc_learns_a_linear_drift() -> None:
    classifier = made("nearest-mean", "ldc", epochs=2000, batch=240, lr=5e-3)
    follow(classifier, mixed)
    assert error(classifier, mixed)[0] < 1e-2


@pytest.mark.parametrize("kind", ["sdc", "shift", "efc", "adc", "linear"])
def test_a_common_shift_is_followed(kind: str) -> None:
    classifier = made("gaussian", kind, **({"step": 100.0, "steps": 20} if kind == "adc" else {}))
    follow(classifier, stepped)
    assert error(classifier, stepped)[0] < 1e-5  # features are kept in float32


@pytest.mark.parametrize(
    "kind, change, options, off",
    [
        ("adagauss", mixed, {"map": "linear", "alpha": 0.0, "weight_decay": 0.0, "lr": 0.2, "samples": 20_000}, 0.05),
        ("sldc", turned, {"steps": 3000, "samples": 2000, "lr": 5e-3, "residual": 0.0}, 0.2),
    ],
)
def test_networks_learn_a_drift_of_gaussians(kind: str, change: Any, options: dict[str, Any], off: float) -> None:
    """Of 10,000 samples, a mean is off by 1/100 of a deviation and a variance by 1/70 of itself; the map adds its own
    error, and SLDC's is not linear. Without a correction, covariances are off by 0.38 and more."""
    classifier = made("gaussian", kind, **{**SMALL[kind], "epochs": 100, **options} if kind == "adagauss" else options)
    follow(classifier, change)
    means, covariances = error(classifier, change)
    assert means < 0.05 and covariances < off
    assert error(made("gaussian", "none"), change)[1] > 0.38


# Single kinds


def test_sdc_is_a_weighted_mean_of_movements() -> None:
    """Beside its plain twin, with and without length 1, and with the floor that lets far classes follow the mean."""
    x, _ = some(OLD, NEW)
    moved, before = bent(x) - x, made("gaussian", "none").class_means()[0]
    for unit, floor in ((True, 0.0), (False, 1e-5), (True, 1e-5)):
        classifier = made("gaussian", "sdc", unit=unit, floor=floor, sigma=0.5)
        follow(classifier, bent)
        at, to = (F.normalize(x), F.normalize(before)) if unit else (x, before)
        weights = torch.exp(-(at - to[:, None]).square().sum(2) / 0.5) + floor
        expected = before + (weights @ moved) / weights.sum(1, keepdim=True)
        assert (classifier.class_means()[0] - expected).abs().max() < 1e-5


def test_adc_moves_images_to_old_means() -> None:
    """Beside its plain twin: from the nearest images, with gradients of the network before the task."""
    x, _ = some(OLD, NEW)
    x = x.float()
    means = made("nearest-mean", "none").class_means()[0]
    classifier = made("nearest-mean", "adc", images=30, steps=4, step=12.0)
    follow(classifier, bent)
    moved = 0
    for c, mean in enumerate(means.float()):
        images = x[(x - mean).norm(dim=1).argsort()[:30]]
        for _ in range(4):
            gradient = images - mean
            images = (images - 12.0 * gradient / gradient.norm()).clamp(x.min(), x.max())
        arrived = torch.cdist(images.double(), means).argmin(1) == c
        expected = (bent(images[arrived].double()) - images[arrived]).mean(0) if arrived.any() else torch.zeros(D)
        moved += int(arrived.any())
        found = classifier.class_means()[0][c] - mean
        assert (found - expected).abs().max() < 1e-4
    assert moved


def test_adc_leaves_a_class_that_no_image_reaches() -> None:
    classifier = made("nearest-mean", "adc", images=2)
    classifier.update(50 + some(0, 1)[0], torch.full((EACH,), OLD))
    before = classifier.class_means()[0].clone()
    follow(classifier, bent)
    moved = (classifier.class_means()[0] - before).norm(dim=1)
    assert moved[OLD] < 1e-8 and moved[:OLD].max() > 1e-3


def test_efc_keeps_the_matrix_of_the_task_before() -> None:
    """It is of the first task's features after that task, comes back with the state, and decides the second's drift."""
    classifier = made("gaussian", "efc")
    x, _ = some(0, OLD)
    network = Network(bent, x)
    expected = elastic_sum(x, network.heads) / len(x)
    assert (classifier.drift_matrix - expected).abs().max() < 1e-6
    other = Gaussian(D, drift="efc")
    other.load_state_dict(classifier.state_dict())
    for one in (classifier, other):
        follow(one, bent)
    assert torch.equal(classifier.class_means()[0], other.class_means()[0])
    assert not torch.allclose(classifier.drift_matrix, expected)


def test_the_elastic_matrix_is_that_of_gradients() -> None:
    """Beside its definition: the mean over images of sum_c p_c g_c g_c^T, with the gradients of log p_c."""
    features = torch.randn(6, D, generator=generator(1), dtype=torch.float64)
    weight, bias = torch.randn(4, D, generator=generator(2)).double(), torch.randn(4, generator=generator(3)).double()
    expected = torch.zeros(D, D, dtype=torch.float64)
    for f in features:
        log_p = torch.log_softmax(weight @ f + bias, 0)
        jacobian = torch.func.jacrev(lambda f: torch.log_softmax(weight @ f + bias, 0))(f)
        expected += jacobian.T @ torch.diag(log_p.exp()) @ jacobian / len(features)
    found = elastic_sum(features, lambda f: F.linear(f, weight, bias)) / len(features)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert float(penalty(features, features, found, 10.0, 0.1)) == 0


def test_adagauss_without_room_for_its_term_still_trains() -> None:
    """Fewer images than features: their covariance has no Cholesky factor."""
    x, labels = some(OLD, 1, each=D - 1)
    classifier = made("gaussian", "adagauss")
    before = classifier.class_means()[0].clone()
    classifier.follow([(x, bent(x), labels)])
    after = classifier.class_means()[0]
    assert torch.isfinite(after).all() and not torch.equal(after, before)


def test_covariances_can_be_set() -> None:
    for name in ("lda", "gaussian"):
        classifier = made(name, "none")
        means, wanted = classifier.class_means()[0], 2 * classifier.class_covariances()
        classifier.set_covariances(wanted)
        assert (classifier.class_covariances() - wanted).abs().max() < 1e-9
        assert torch.equal(classifier.class_means()[0], means)
