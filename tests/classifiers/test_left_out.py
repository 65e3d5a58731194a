"""What a classifier would say without an image, or without its class: closed forms against fitting again."""

from typing import Any

import pytest
import torch
from tolerance import assert_near
from torch import Tensor

from mambacl.classifiers import LDA, Gaussian, NearestMean, Ridge
from mambacl.classifiers.base import Classifier
from mambacl.classifiers.left_out import without_class
from mambacl.errors import UserError

D, CLASSES, IMAGES = 12, 4, 60
RIDGE: dict[str, Any] = {"width": 30, "ridge": 1.0, "storage": "float64", "standardize": "none"}
CASES: dict[str, tuple[type[Classifier], dict[str, Any]]] = {
    "nearest-mean": (NearestMean, {}),
    "lda": (LDA, {"shrinkage": 0.2, "target": "identity"}),
    "lda-unbalanced": (LDA, {"shrinkage": 0.2, "target": "identity", "balanced": False}),
    "ridge": (Ridge, RIDGE),
    "ridge-blocks": (Ridge, {**RIDGE, "blocks": 2}),
    "ridge-no-lift": (Ridge, {**RIDGE, "width": 0}),
}


def some(views: int = 2, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    """Images as features (n, views, d); classes of different sizes."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([0, 1, 2, 3, 0, 1, 2, 0]).repeat(8)[:IMAGES]
    means = 2 * torch.randn(CLASSES, D, generator=generator, dtype=torch.float64)
    noise = spread * torch.randn(IMAGES, views, D, generator=generator, dtype=torch.float64)
    return means[labels][:, None] + noise, labels


def taught(kind: type[Classifier], features: Tensor, labels: Tensor, **options: Any) -> Classifier:
    made = kind(D, **options)
    made.add_task(CLASSES)
    for view in range(features.shape[1]):
        made.update(features[:, view], labels)
    made.finish_task()
    return made


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_left_out_scores_are_those_of_fitting_without_the_image(case: str, views: int) -> None:
    kind, options = CASES[case]
    features, labels = some(views)
    found, _ = taught(kind, features, labels, **options).left_out(features, labels)
    assert found.shape == (IMAGES, views, CLASSES)
    for image in range(0, IMAGES, 7):
        others = torch.arange(IMAGES) != image
        expected = taught(kind, features[others], labels[others], **options)(features[image])
        one = found[image]
        if kind is LDA:  # scores have a term that all classes share
            one, expected = one - one[:, :1], expected - expected[:, :1]
        # LDA adds its rounding error, which depends on the images, to S
        assert_near(one, expected.double(), 10**6 if kind is not LDA else 10**12, size=float(expected.abs().max()))
        assert not torch.allclose(one, taught(kind, features, labels, **options)(features[image]).double())


def test_the_weights_of_classes_hold_without_an_image_too() -> None:
    features, labels = some()
    ridge, plain = taught(Ridge, features, labels, **RIDGE), taught(Ridge, features, labels, **RIDGE)
    ridge.weights[2] *= 3  # type: ignore[operator]
    (found, foreign), (expected, other) = (one.left_out(features, labels) for one in (ridge, plain))
    factors = torch.tensor([1.0, 1.0, 3.0, 1.0], dtype=torch.float64)
    assert_near(found, factors * expected, IMAGES)
    own = torch.arange(CLASSES) == labels[:, None, None]
    assert (foreign.isinf() == own.expand(foreign.shape)).all()
    assert_near(foreign.masked_fill(own, 0), (factors * other).masked_fill(own, 0), IMAGES)


def test_without_a_class_whose_images_are_all_alike_the_regression_is_that_of_the_others() -> None:
    """Then q q^T / n is all that the class adds to G."""
    features, labels = some(spread=0.0)
    features[labels != 1] += torch.randn(features[labels != 1].shape, generator=torch.Generator().manual_seed(1))
    h, y = features.flatten(0, 1), labels.repeat_interleave(2)
    targets = torch.nn.functional.one_hot(y, CLASSES).double()

    def fitted(rows: Tensor) -> Tensor:
        return torch.linalg.solve(h[rows].T @ h[rows] + torch.eye(D).double(), h[rows].T @ targets[rows])

    everything, others = torch.ones(len(y), dtype=torch.bool), y != 1
    weights, sums = fitted(everything), targets.T @ h
    one = features[labels == 1][:1]
    found = without_class(one @ weights, sums @ weights, targets.sum(0), torch.tensor([1]))
    expected = one @ fitted(others)
    columns = torch.tensor([0, 2, 3])
    assert_near(found[..., columns], expected[..., columns], 10**5)
    assert not torch.allclose((one @ weights)[..., columns], expected[..., columns], rtol=1e-2)


def test_without_its_class_an_image_is_scored_nearly_as_by_a_model_that_never_saw_it() -> None:
    """Closer than if only the class's column is dropped."""
    features, labels = some()
    _, found = (ridge := taught(Ridge, features, labels, **RIDGE)).left_out(features, labels)
    dropped, _ = ridge.left_out(features, labels)
    errors = torch.zeros(2, dtype=torch.float64)
    for label in range(CLASSES):
        own, others = labels == label, torch.arange(CLASSES) != label
        expected = taught(Ridge, features[~own], labels[~own], **RIDGE)(features[own].flatten(0, 1))[:, others]
        for i, estimate in enumerate((found, dropped)):
            errors[i] += (estimate[own].flatten(0, 1)[:, others] - expected).square().sum()
    assert errors[0] < 0.5 * errors[1]


def test_a_classifier_without_a_closed_form_says_so() -> None:
    class Other(NearestMean):
        def forward(self, features: Tensor) -> Tensor:
            return 2 * super().forward(features)

    class Same(Ridge):
        name = "same"

    features, labels = some()
    assert [kind(D).leaves_out for kind in (Other, Same, Gaussian, LDA)] == [False, True, False, True]
    with pytest.raises(UserError, match="'gaussian' cannot tell how it would answer without an image"):
        taught(Gaussian, features, labels).left_out(features, labels)
