"""Classifiers: what every one owes its user, heads that grow task by task, and the nearest class mean."""

import pytest
import torch
from torch import Tensor, nn

from mambacl.classifiers import CLASSIFIERS, CosineHeads, NearestMean, SeparateHeads, TaskHeads
from mambacl.errors import UserError

FEATURES = 8
HEADS = [SeparateHeads, CosineHeads]


def some(count: int = 12, classes: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, FEATURES, generator=generator)
    return features, torch.randint(classes, (count,), generator=generator)


@pytest.fixture(params=CLASSIFIERS.names())
def taught(request: pytest.FixtureRequest):
    """A classifier after a task of two classes and one of three."""
    classifier = CLASSIFIERS.get(request.param)(FEATURES)
    for task, classes in enumerate((2, 3)):
        classifier.add_task(classes, seed=task)
        features, labels = some(20, classes, seed=task)
        classifier.update(features, labels + (0, 2)[task])
        classifier.finish_task()
    return classifier


# Every classifier


def test_scores_of_all_classes(taught) -> None:
    features, _ = some()
    assert taught.name in CLASSIFIERS.names() and taught.summary
    assert taught.classes == 5 and taught.scores(features).shape == (12, 5)
    assert torch.equal(taught.scores(features), taught(features))
    with torch.autocast("cpu", torch.bfloat16):
        assert taught.scores(features.bfloat16()).dtype == torch.float32


def test_a_score_does_not_depend_on_the_batch(taught) -> None:
    features, _ = some()
    alone = torch.cat([taught.scores(feature[None]) for feature in features])
    torch.testing.assert_close(taught.scores(features), alone, rtol=1e-5, atol=1e-6)


def test_a_state_is_taken_up_whatever_was_there(taught) -> None:
    features, _ = some()
    for classes in (0, 1, 9):
        other = type(taught)(FEATURES)
        if classes:
            other.add_task(classes)
        other.load_state_dict({name: tensor.clone() for name, tensor in taught.state_dict().items()})
        assert torch.equal(other.scores(features), taught.scores(features))
        assert other.classes == 5 and other.nbytes == taught.nbytes > 0


def test_a_state_of_another_is_refused(taught) -> None:
    other = (NearestMean if taught.trains else SeparateHeads)(FEATURES)
    other.add_task(2)
    with pytest.raises((KeyError, RuntimeError)):
        taught.load_state_dict(other.state_dict())


def test_parameters_train_where_the_classifier_says_so(taught) -> None:
    assert taught.trains == bool(list(taught.parameters())) == isinstance(taught, TaskHeads)


# Heads


@pytest.mark.parametrize("kind", HEADS)
def test_heads_grow_and_the_old_ones_are_fixed(kind: type[TaskHeads]) -> None:
    heads = kind(FEATURES)
    heads.add_task(3, seed=1)
    heads.add_task(2, seed=2)
    assert heads.widths == [3, 2]
    assert not any(p.requires_grad for p in heads.heads[0].parameters())
    assert all(p.requires_grad for _, p in heads.trained()) and heads.trained()[0][0] == "heads.1.weight"
    assert {name for name, _ in heads.trained()} <= heads.state_dict().keys()
    features, _ = some()
    assert torch.equal(heads(features)[:, 3:], heads.task_logits(features))


@pytest.mark.parametrize("kind", HEADS)
def test_heads_are_drawn_from_their_seed(kind: type[TaskHeads]) -> None:
    weights = []
    for seed in (5, 5, 6):
        torch.manual_seed(len(weights))
        heads = kind(FEATURES)
        heads.add_task(3, seed)
        weights.append(heads.heads[0].weight)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("kind", HEADS)
def test_a_warm_start_needs_equal_widths(kind: type[TaskHeads]) -> None:
    heads = kind(FEATURES)
    heads.add_task(3, seed=1)
    heads.add_task(3, seed=2, warm_start=True)
    heads.add_task(2, seed=3, warm_start=True)
    assert torch.equal(heads.heads[1].weight, heads.heads[0].weight)
    assert heads.heads[2].weight.shape == (2, FEATURES)


def test_a_classifier_from_elsewhere_is_taken_over() -> None:
    linear, (features, _) = nn.Linear(FEATURES, 4), some()
    separate, cosine = SeparateHeads(FEATURES), CosineHeads(FEATURES)
    for heads in (separate, cosine):
        heads.take_over(linear)
        assert heads.widths == [4] and not any(p.requires_grad for p in heads.parameters())
    assert torch.equal(separate(features), linear(features))
    assert torch.equal(cosine.heads[0].weight, linear.weight)
    with pytest.raises(UserError, match="takes 7 features, but the model has 8"):
        separate.take_over(nn.Linear(7, 2))
    with pytest.raises(UserError, match="needs a linear classifier, got Identity"):
        separate.take_over(nn.Identity())


def test_heads_that_start_at_zero_keep_what_their_classes_share_at_zero() -> None:
    """Cross-entropy moves the weights of a task's classes by steps that add up to zero."""
    features, labels = some()
    means = {}
    for start in ("random", "zero"):
        heads = SeparateHeads(FEATURES, start=start)
        heads.add_task(int(labels.max()) + 1, seed=3)
        optimizer = torch.optim.SGD(heads.parameters(), lr=0.5)
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(heads.task_logits(features), labels).backward()
            optimizer.step()
        assert heads.heads[0].weight.abs().max() > 0.01
        means[start] = heads.heads[0].weight.mean(0).abs().max()
    assert means["zero"] < 1e-6 < 1e-3 < means["random"]


def test_trained_heads_cannot_be_merged() -> None:
    with pytest.raises(UserError, match="'separate' is trained step by step"):
        SeparateHeads(FEATURES).merge(SeparateHeads(FEATURES))


# The nearest mean


def test_the_nearest_mean_by_hand() -> None:
    nearest = NearestMean(2)
    nearest.update(torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 5.0]]), torch.tensor([0, 0, 2]))
    assert nearest.classes == 3 and nearest.means().tolist() == [[1.0, 0.0], [0.0, 0.0], [0.0, 5.0]]
    assert nearest.means().dtype == torch.float64
    scores = nearest.scores(torch.tensor([[1.0, 3.0]]))
    torch.testing.assert_close(scores, torch.tensor([[-3.0, -torch.inf, -(5.0**0.5)]]))  # no image of class 1 yet


def test_means_are_the_same_bits_in_any_order_and_any_parts() -> None:
    """Features of very different sizes, whose float64 sums do depend on the order."""
    features, labels = some(1000, 5)
    features = features * 10.0 ** torch.randint(-6, 4, features.shape, generator=torch.Generator().manual_seed(1))
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(2))
    forward, backward = (
        torch.zeros(5, FEATURES, dtype=torch.float64).index_add_(0, labels[i], features[i].double())
        for i in (torch.arange(1000), order)
    )
    assert not torch.equal(forward, backward)
    whole, shuffled, left, right = (NearestMean(FEATURES) for _ in range(4))
    whole.update(features, labels)
    for part in order.split(37):
        shuffled.update(features[part], labels[part])
    left.update(features[:300], labels[:300])
    right.update(features[300:], labels[300:])
    left.merge(right)
    for other in (shuffled, left):
        assert torch.equal(other.means(), whole.means()) and torch.equal(other.counts, whole.counts)
    torch.testing.assert_close(whole.means(), forward / whole.counts[:, None], rtol=0, atol=2.0**-33)


def test_more_images_of_an_old_class_and_a_merge_of_other_classes() -> None:
    one, other = NearestMean(2), NearestMean(2)
    one.update(torch.tensor([[1.0, 1.0]]), torch.tensor([0]))
    other.update(torch.tensor([[3.0, 3.0], [8.0, 0.0]]), torch.tensor([0, 3]))
    one.merge(other)
    assert one.classes == 4 and one.means().tolist() == [[2.0, 2.0], [0.0, 0.0], [0.0, 0.0], [8.0, 0.0]]
    other.update(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))  # an empty batch
    assert other.counts.tolist() == [1, 0, 0, 1]


def test_bad_features_are_refused_and_change_nothing() -> None:
    nearest = NearestMean(2)
    nearest.update(torch.ones(1, 2), torch.tensor([0]))
    for wrong in (float("nan"), float("inf"), 1e10):
        with pytest.raises(UserError, match=r"NaN or infinite|above 2\^30"):
            nearest.update(torch.tensor([[1.0, wrong]]), torch.tensor([0]))
    with pytest.raises(UserError, match=r"update needs features \(b, 2\)"):
        nearest.update(torch.ones(1, 3), torch.tensor([0]))
    with pytest.raises(UserError, match="nearest-mean classifier with the same number of features"):
        nearest.merge(NearestMean(3))
    assert nearest.means().tolist() == [[1.0, 1.0]]
