"""The learner in a hidden state: one recurrence for whole streams and single images, its loss, and that it learns."""

import pytest
import torch
import torch.nn.functional as F

from mambacl.errors import UserError
from mambacl.meta import MetaLearner, Streams, accuracy, loss, streams_of, synthetic_streams, train


def small(seed: int = 0, **options: int) -> MetaLearner:
    torch.manual_seed(seed)
    return MetaLearner(8, slots=4, **{"width": 16, "depth": 2, "states": 4, **options})


def some(batch: int = 3, shots: int = 2) -> Streams:
    made = synthetic_streams(torch.Generator().manual_seed(0), batch, 4, shots, 8, queries=2)
    return Streams(*(t.double() if t.is_floating_point() else t for t in vars(made).values()))


def test_step_by_step_is_the_parallel_scan() -> None:
    """In float64: states and answers, after every image; the state does not grow, and queries do not change it."""
    learner, streams = small().double(), some()
    states, sizes = None, set()
    for t in range(streams.features.shape[1]):
        states = learner.observe(states, streams.features[:, t], streams.labels[:, t])
        whole, written = learner.learn(streams.features[:, : t + 1], streams.labels[:, : t + 1])
        for one, other in zip(states, whole, strict=True):
            for ours, theirs in zip(one, other, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
        assert [B.shape for B in written] == [(3, 2 * t + 2, 4)] * 2
        sizes.add(sum(tensor.numel() for pair in states for tensor in pair))
    assert len(sizes) == 1
    scores = learner.scores(states, streams.queries)
    torch.testing.assert_close(scores, learner(streams)[0], rtol=1e-10, atol=1e-12)
    alone = torch.cat([learner.scores(states, streams.queries[:, q : q + 1]) for q in range(8)], dim=1)
    torch.testing.assert_close(scores, alone, rtol=1e-10, atol=1e-12)


def test_a_query_at_the_end_of_the_sequence_gives_the_same() -> None:
    """x_1, y_1, ..., x_T, y_T, x as one sequence through the layers by hand."""
    learner, streams = small().double(), some()
    pairs = torch.stack((learner.image(streams.features), learner.label(streams.labels)), dim=2).flatten(1, 2)
    x = torch.cat((pairs, learner.image(streams.queries[:, :1])), dim=1)
    products = []
    for norm, mixer in zip(learner.norms, learner.mixers, strict=True):
        mixed = mixer(norm(x))
        x = x + mixed.output
        products.append((mixed.B[:, :-1] @ mixed.C[:, -1, :, None])[..., 0])
    scores, association = learner(streams)
    torch.testing.assert_close(scores[:, 0], learner.head(learner.norm(x[:, -1])), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(association[:, :, 0], torch.stack(products, 1).log_softmax(-1), rtol=1e-10, atol=1e-12)


def test_the_loss_by_hand() -> None:
    learner, streams = small().double(), some()
    scores, association = learner(streams)
    entropy = F.cross_entropy(scores.flatten(0, 1), streams.answers.flatten())
    divergences = []
    for b in range(3):
        for layer in range(2):
            for q in range(8):
                same = [j for j in range(16) if streams.labels[b, j // 2] == streams.answers[b, q]]
                assert len(same) == 4
                p = torch.zeros(16, dtype=torch.float64)
                p[same] = 1 / 4
                divergences.append(F.kl_div(association[b, layer, q], p, reduction="sum"))
    torch.testing.assert_close(loss(learner, streams, 0.7), entropy + 0.7 * torch.stack(divergences).mean())
    torch.testing.assert_close(loss(learner, streams, 0.0), entropy)


def test_it_learns_to_learn() -> None:
    """New classes of four: far above chance, which is also what the latest label and the commonest one reach; and what
    it knows comes from the stream."""
    learner = small(width=32, states=16)
    losses = train(learner, lambda g: synthetic_streams(g, 16, 4, 2, 8, queries=2), steps=200, lr=6e-3)
    assert losses[-1] < losses[0] / 2
    new = synthetic_streams(torch.Generator().manual_seed(9), 100, 4, 2, 8, queries=2)
    latest = (new.labels[:, -1:] == new.answers).double().mean()
    assert accuracy(learner, new) > 0.65 and latest == 0.25
    swapped = Streams(new.features, new.labels.roll(2, 1), new.queries, new.answers)  # the next class's labels
    assert accuracy(learner, swapped) < 0.25


def test_streams_of_features_that_there_are() -> None:
    classes = [torch.full((6, 8), float(c)) + torch.arange(6)[:, None] / 10 for c in range(5)]
    generator = torch.Generator().manual_seed(0)
    made = streams_of(generator, 20, classes, ways=3, shots=2, queries=4, slots=7)
    assert made.features.shape == (20, 6, 8) and made.queries.shape == (20, 12, 8)
    assert made.labels.max() <= 6 and made.labels.unique().numel() == 7
    for b in range(20):
        own = made.features[b, :, 0].floor()
        assert own.unique().numel() == 3 and torch.equal(own[::2], own[1::2])  # one class after the other
        for c, label in zip(own[::2], made.labels[b, ::2], strict=True):
            asked = made.queries[b, made.answers[b] == label, 0]
            seen = made.features[b, made.labels[b] == label, 0]
            assert (asked.floor() == c).all() and len(asked) == 4
            assert torch.cat((asked, seen)).unique().numel() == 6  # no image is both
    with pytest.raises(UserError, match=r"3 classes with 4 \+ 3 images"):
        streams_of(generator, 1, classes, ways=3, shots=4, queries=3)
    with pytest.raises(UserError, match="Labels of a stream must be from 0 to 3"):
        small().learn(torch.zeros(1, 1, 8), torch.tensor([[4]]))
