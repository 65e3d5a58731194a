"""The ridge classifier against a plain ridge regression on all images at once, and with difficult input."""

import pytest
import torch
from ridge_help import ALIKE, PLAIN, WIDTH, D, assert_alike, joint, some, taught
from tolerance import assert_near

from mambacl.classifiers import Ridge
from mambacl.classifiers import ridge as module
from mambacl.errors import UserError

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


def test_what_is_solved_in_inference_mode_can_be_changed_later() -> None:
    features, labels = some()
    asked, plain = (Ridge(D, **PLAIN) for _ in range(2))
    for classifier in (asked, plain):
        classifier.update(features[:60], labels[:60])
        with torch.inference_mode(classifier is asked), torch.no_grad():
            classifier.scores(features)
        classifier.finish_task()
        classifier.update(features[60:70], labels[60:70])
        with torch.inference_mode(classifier is asked), torch.no_grad():
            classifier.scores(features)
        classifier.favour_rare(2)
        classifier.update(features[70:], labels[70:])
        classifier.finish_task()
    assert torch.equal(asked.scores(features), plain.scores(features))


def test_classes_with_few_images_are_favoured_by_a_square_root() -> None:
    features = torch.randn(90, 12, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0] * 40 + [1] * 40 + [2] * 10)
    plain, helped = (Ridge(12, width=30) for _ in range(2))
    for classifier in (plain, helped):
        classifier.update(features, labels)
        classifier.finish_task()
    helped.favour_rare(2)
    expected = plain.scores(features) * torch.tensor([1.0, 1.0, 2.0])  # sqrt(40 / 10)
    assert torch.equal(helped.scores(features), expected)
    helped.favour_rare(0)  # nothing to compare with
    helped.update(features[:1], labels[:1])  # the next solution begins without it
    helped.finish_task()
    plain.update(features[:1], labels[:1])
    plain.finish_task()
    assert torch.equal(helped.scores(features), plain.scores(features))
    helped.favour_rare(1)
    rows = helped.weights / plain.weights
    assert torch.allclose(rows[1], torch.tensor((41 / 40) ** 0.5)) and torch.allclose(rows[2], torch.tensor(4.1**0.5))
