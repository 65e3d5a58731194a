"""Statistics of features, gathered for whoever wants them: here class means and second moments of a plain model."""

import pytest
import torch
from nullspace_help import hooks
from tasks_help import one_sentence
from torch import nn

from mambacl.errors import UserError
from mambacl.nullspace.statistics import Accumulator, Source, gather

CLASSES, WIDTH = 3, 5


class ClassSums(Accumulator):
    """Sums and counts of a feature by class; from them the means."""

    def contribution(self, features, labels):
        chosen = nn.functional.one_hot(labels, CLASSES).to(features.dtype)
        return {"sum": chosen.T @ features, "count": chosen.sum(0)}

    def means(self):
        return self.totals["sum"] / self.totals["count"][:, None]


class SecondMoment(Accumulator):
    """And the largest value that was seen."""

    largest = ("peak",)

    def contribution(self, features):
        return {"moment": features.T @ features, "peak": features.amax(0)}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, WIDTH), nn.Dropout(0.9), nn.Tanh(), nn.Linear(WIDTH, CLASSES)).train()


def batches(count=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 4, generator=generator)
    labels = torch.arange(count) % CLASSES
    return images, labels


def split(images, labels, sizes):
    return list(zip(images.split(sizes), labels.split(sizes), strict=True))


def wanted(model):
    feature = Source("feature", model[2])
    return {feature: {"by class": ClassSums(["output", "labels"]), "moment": SecondMoment(["output"])}}


def features(model, images):
    modes, _ = model.training, model.eval()
    with torch.no_grad():
        found = model[:3](images).double()
    model.train(modes)
    return found


@pytest.mark.parametrize("sizes", [[7], [3, 3, 1], [1] * 7], ids=str)
def test_class_means_and_second_moments_in_one_pass(model, sizes):
    images, labels = batches()
    (source, found), *_ = wanted(model).items()
    assert gather(model, {source: found}, split(images, labels, sizes)) == 7
    rows = features(model, images)
    for label in range(CLASSES):
        torch.testing.assert_close(found["by class"].means()[label], rows[labels == label].mean(0))
    torch.testing.assert_close(found["moment"].totals["moment"], rows.T @ rows)
    assert torch.equal(found["moment"].totals["peak"], rows.amax(0))
    assert all(total.dtype == torch.float64 for one in found.values() for total in one.totals.values())
    assert model.training and hooks(model) == 0  # as it was before


def test_two_merged_are_one_that_saw_all(model):
    images, labels = batches()
    (_, together), (_, first), (_, second) = (next(iter(wanted(model).items())) for _ in range(3))
    source = Source("feature", model[2])
    gather(model, {source: together}, [(images, labels)])
    gather(model, {source: first}, [(images[:4], labels[:4])])
    gather(model, {source: second}, [(images[4:], labels[4:])])
    kept = {label: {name: total.clone() for name, total in one.totals.items()} for label, one in second.items()}
    for label, one in first.items():
        one.merge(second[label])
        one.merge(type(one)(one.inputs))  # one that has seen nothing changes nothing
        for name, total in together[label].totals.items():
            torch.testing.assert_close(one.totals[name], total)
            assert torch.equal(second[label].totals[name], kept[label][name])


def test_totals_are_saved_and_taken_up_again(model):
    images, labels = batches()
    source, found = next(iter(wanted(model).items()))
    gather(model, {source: found}, [(images[:4], labels[:4])])
    again = {label: type(one)(one.inputs) for label, one in found.items()}
    for label, one in again.items():
        one.load_state_dict(found[label].state_dict())
    for accumulators in (found, again):
        gather(model, {source: accumulators}, [(images[4:], labels[4:])])
    for label, one in again.items():
        assert all(torch.equal(total, found[label].totals[name]) for name, total in one.totals.items())


def test_the_forward_function_and_the_precision_may_be_chosen(model):
    images, _ = batches()
    seen = []

    class Seen(Accumulator):
        def contribution(self, features):
            seen.append(features.dtype)
            return {"sum": features.sum(0)}

    source = Source("feature", model[2])
    gather(model, {source: {"sum": Seen(["output"])}}, [images], forward=model[:3], products=torch.float32)
    assert seen == [torch.float32]


MISTAKES = {
    "labels": (lambda model: [batches()[0]], None, "The statistic by class needs labels"),
    "empty": (lambda model: [], None, "the loader is empty"),
    "elsewhere": (lambda model: [batches()], lambda model: model[:2], "found no features of feature"),
    "not a number": (lambda model: [(batches()[0] * float("nan"), batches()[1])], None, "of feature holds NaN"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(model, mistake):
    loader, forward, message = MISTAKES[mistake]
    with pytest.raises(UserError, match=message) as error:
        gather(model, wanted(model), loader(model), None if forward is None else forward(model))
    assert one_sentence(error) and model.training and hooks(model) == 0
