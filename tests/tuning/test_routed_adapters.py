"""Adapters mixed by a router, autoencoders that tell what is new, and the scan that decides where to add an adapter."""

import pytest
import torch
from adapter_methods_help import FAMILIES, small

from mambacl.tuning.adapters import AdapterOptions, PlacedOptions, chosen_place
from mambacl.tuning.routed_adapters import STAYS, Branch, Descriptor, Routed, RoutedAdapters, in_batches_of


def some(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def routed(family="vit_nano", last=1):
    model = small(family)
    place = chosen_place(model, PlacedOptions())
    return model, RoutedAdapters(model, AdapterOptions(bottleneck=3), place, seed=0, last=last, hidden=4, room=10)


def test_errors_and_their_record_by_hand():
    descriptor, means = Descriptor(5, 2, room=4).double(), some(3, 5)
    back = (means @ descriptor.encoder.weight.T + descriptor.encoder.bias) @ descriptor.decoder.weight.T
    expected = (back + descriptor.decoder.bias - means).square().sum(1) / 5
    torch.testing.assert_close(descriptor(means), expected)
    assert descriptor.novelty(means).item() == 0  # nothing is recorded yet
    descriptor.keep(torch.tensor([1.0, 2.0]))
    assert descriptor.record.tolist() == [1, 2, 0, 0]
    z = (descriptor(means) - 1.5) / 0.5**0.5
    torch.testing.assert_close(descriptor.novelty(means), z.abs().mean())
    descriptor.keep(torch.tensor([3.0, 4.0, 5.0]))
    assert descriptor.record.tolist() == [2, 3, 4, 5] and int(descriptor.count) == 4
    descriptor.keep(torch.arange(6.0))
    assert descriptor.record.tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("shape", [(2, 7, 6), (2, 3, 4, 6)])
def test_the_mixture_by_hand(shape):
    place, tokens = Routed().double(), some(*shape)
    for seed in (1, 2):
        branch = Branch(6, AdapterOptions(bottleneck=3, scale=1.0), hidden=2, room=4).double()
        branch.reset(torch.Generator().manual_seed(seed))
        torch.nn.init.normal_(branch.adapter.up.weight)
        place.branches.append(branch)
    mean = tokens.reshape(2, -1, 6).mean(1)
    scores = torch.stack([mean @ branch.row.weight[0] + branch.row.bias[0] for branch in place.branches], dim=1)
    expected = torch.zeros_like(tokens)
    for image in range(2):
        for share, branch in zip(scores[image].softmax(0), place.branches, strict=True):
            expected[image] += share * branch.adapter(tokens[image])
    torch.testing.assert_close(place(tokens), expected)
    assert place.seen is None
    place.watched = True
    place(tokens)
    torch.testing.assert_close(place.seen, mean)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_changes_at_first_and_a_state_has_all_branches(family):
    model, one = routed(family)
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model(images), small(family)(images))
    place = one.growing[-1]
    assert one.growing == [len(one.widths) - 1]
    assert all(branch.row is None for index in range(place) for branch in one.at(index).branches)
    one.begin(first=False)
    assert one.trained() == [] and one.grown == 0
    one.grow(place, seed=3)
    assert one.grown == 1 and len(one.trained()) == len(one.trained(True)) + len(one.trained(False)) == 4 + 6
    assert not any(p.requires_grad for p in one.at(place).branches[0].parameters())
    for branch in one.at(place).branches:
        torch.nn.init.normal_(branch.adapter.up.weight)
    other_model, other = routed(family)
    other.load_state_dict(one.state_dict())
    assert torch.equal(other_model(images), model(images)) and other.status.tolist() == one.status.tolist()
    assert [name for name, _ in other.trained()] == [name for name, _ in one.trained()]
    other.load_state_dict(routed(family)[1].state_dict())
    assert len(other.at(place).branches) == 1
    with pytest.raises(RuntimeError):
        other.load_state_dict({})


def test_the_scan():
    """Place 0 is new in the second batch, place 1 in the first and in the third; place 1 may grow only once."""
    _, sets = routed(last=2)
    sets.begin(first=False)
    new = {(0, 1): 5.0, (1, 0): 3.0, (1, 2): 3.0}
    seen, at = [], {"batch": 0}
    sets.novelties = lambda place: torch.tensor([new.get((place, at["batch"]), 0.0), 9.0])  # an older one, a stranger

    def run(batch):
        at["batch"] = int(batch[0, 0])
        seen.append(at["batch"])

    def batches():
        return [(torch.full((2, 1), float(batch)), torch.zeros(2)) for batch in range(3)]

    def search():
        seen.clear()
        place = sets.search(batches, 2, run, threshold=2.0)
        if place is not None:
            sets.settle()
            sets.grow(place, seed=0)
        return place, list(seen)

    assert search() == (1, [0])
    assert search() == (0, [1])
    state = {name: tensor.clone() for name, tensor in sets.state_dict().items()}
    assert search() == (None, [2, 0, 1, 2]) and sets.scan.tolist() == [0, 0, 1]
    assert search() == (None, [])
    assert sets.grown == 2
    sets.load_state_dict(state)  # it goes on from where it was
    assert search() == (None, [2, 0, 1, 2])
    sets.begin(first=False)
    assert sets.status.tolist() == [STAYS, STAYS] and search() == (1, [0])


def test_batches_of_another_size():
    images, labels = torch.arange(11.0)[:, None], torch.zeros(11)
    for size in (1, 3, 4, 11, 20):
        given = list(zip(images.split(4), labels.split(4), strict=True))
        found = list(in_batches_of(size, given))
        assert torch.equal(torch.cat(found), images)
        assert [len(part) for part in found] == [len(part) for part in images.split(size)]
    assert list(in_batches_of(3, [])) == []
