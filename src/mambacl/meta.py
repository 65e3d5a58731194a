"""A Mamba that learns a stream in its hidden state: Zhao and Gong, *Learning Mamba as a Continual Learner*, 2024.

    learner = MetaLearner(num_features=64, slots=5)
    train(learner, lambda generator: synthetic_streams(generator, 32, classes=5, shots=4, num_features=64), steps=1000)
    state = learner.observe(None, features, labels)  # one more image of each stream: (b, d) and (b,)
    scores = learner.scores(state, queries)  # (b, q, slots) for queries (b, q, d)

A stream x_1, y_1, ..., x_T, y_T is a sequence of tokens, and so is a query x at its end; the answer is read at that
token. What is trained, once, is how to learn: over many streams whose classes have a random label ("slot") in each. To
learn a new stream, no weight changes, and the state does not grow. It is not a method of `mambacl train`, because it
needs streams of other classes to be trained on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.backbones.layers import RMSNorm
from mambacl.errors import UserError
from mambacl.tuning.mamba_mixer import MambaMixer, State

States = list[State]
"""of each layer"""


@dataclass(frozen=True)
class Streams:
    """A batch of streams, and queries whose labels are known."""

    features: Tensor
    """(b, T, d), in the order in which they are learned"""
    labels: Tensor
    """(b, T)"""
    queries: Tensor
    """(b, q, d)"""
    answers: Tensor
    """(b, q)"""


class MetaLearner(nn.Module):
    """Layers of norm, Mamba mixer and residual. `slots`: the most classes that a stream can have."""

    def __init__(
        self, num_features: int, slots: int, width: int = 64, depth: int = 2, states: int = 16, rank: int = 4
    ) -> None:
        super().__init__()
        self.slots = slots
        self.image, self.label = nn.Linear(num_features, width), nn.Embedding(slots, width)
        self.norms = nn.ModuleList([RMSNorm(width, 1e-5) for _ in range(depth)])
        self.mixers = nn.ModuleList([MambaMixer(width, states, rank, expand=2, projects_out=True) for _ in self.norms])
        self.norm, self.head = RMSNorm(width, 1e-5), nn.Linear(width, slots)

    def learn(self, features: Tensor, labels: Tensor) -> tuple[States, list[Tensor]]:
        """Whole streams at once, by the parallel scan: the states after them, and each layer's B of all 2 T tokens."""
        if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < self.slots:
            raise UserError(
                f"Labels of a stream must be from 0 to {self.slots - 1}: build the learner with more slots."
            )
        x = torch.stack((self.image(features), self.label(labels)), dim=2).flatten(1, 2)  # (b, 2 T, c)
        states, written = [], []
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            mixed = mixer(norm(x))
            x = x + mixed.output
            states.append(mixed.state)
            written.append(mixed.B)
        return states, written

    def observe(self, states: States | None, features: Tensor, labels: Tensor) -> States:
        """The states after one more image of each stream, (b, d), with its label: two steps of the recurrence."""
        for token in (self.image(features), self.label(labels)):
            _, states, _ = self._step(token, states)
        assert states is not None
        return states

    def scores(self, states: States, queries: Tensor) -> Tensor:
        """(b, q, slots) of queries (b, q, d). The states stay as they are."""
        return self._answer(states, queries)[0]

    def forward(self, streams: Streams) -> tuple[Tensor, Tensor]:
        """Scores of the queries, and the association (b, layers, q, 2 T) of each query with the stream's tokens: the
        products of its C with their B, as log-probabilities."""
        states, written = self.learn(streams.features, streams.labels)
        scores, read = self._answer(states, streams.queries)
        products = [torch.einsum("bqn,bln->bql", C, B) for C, B in zip(read, written, strict=True)]
        return scores, torch.stack(products, dim=1).log_softmax(-1)

    def _answer(self, states: States, queries: Tensor) -> tuple[Tensor, list[Tensor]]:
        count = queries.shape[1]
        each = [(window.repeat_interleave(count, 0), h.repeat_interleave(count, 0)) for window, h in states]
        x, _, read = self._step(self.image(queries).flatten(0, 1), each)
        scores = self.head(self.norm(x))
        return scores.unflatten(0, (-1, count)), [C.unflatten(0, (-1, count)) for C in read]

    def _step(self, x: Tensor, states: States | None) -> tuple[Tensor, States, list[Tensor]]:
        after, read = [], []
        for layer, (norm, mixer) in enumerate(zip(self.norms, self.mixers, strict=True)):
            assert isinstance(mixer, MambaMixer)
            mixed = mixer.step(norm(x), None if states is None else states[layer])
            x = x + mixed.output
            after.append(mixed.state)
            read.append(mixed.C)
        return x, after, read


def loss(learner: MetaLearner, streams: Streams, weight: float = 0.5) -> Tensor:
    """Cross-entropy of the queries, plus `weight` times KL(p, q), the mean over layers: p is uniform over the tokens of
    the query's class, both images and labels, and q the association."""
    scores, association = learner(streams)
    entropy = F.cross_entropy(scores.flatten(0, 1), streams.answers.flatten())
    if not weight:
        return entropy
    same = (streams.answers[:, :, None] == streams.labels[:, None]).repeat_interleave(2, dim=2)[
        :, None
    ]  # (b, 1, q, 2 T)
    p = same / same.sum(-1, keepdim=True).clamp(min=1)
    apart = torch.special.xlogy(p, p).sum(-1) - (p * association).sum(-1)
    return entropy + weight * apart.mean()


def train(
    learner: MetaLearner, draw: Callable[[torch.Generator], Streams], steps: int, lr: float = 1e-3,
    weight: float = 0.5, seed: int = 0,
) -> list[float]:  # fmt: skip
    """Adam on a new batch of streams per step; the rate falls to 0 along a cosine. Returns the losses."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(learner.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        found = loss(learner, draw(generator), weight)
        found.backward()
        nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(found.item())
    return losses


@torch.no_grad()
def accuracy(learner: MetaLearner, streams: Streams) -> float:
    """Share of the queries that are answered correctly, by one observation after the other."""
    states: States | None = None
    for t in range(streams.features.shape[1]):
        states = learner.observe(states, streams.features[:, t], streams.labels[:, t])
    assert states is not None
    return float((learner.scores(states, streams.queries).argmax(-1) == streams.answers).double().mean())


def streams_of(
    generator: torch.Generator, batch: int, classes: Sequence[Tensor], ways: int, shots: int, queries: int = 1,
    slots: int | None = None,
) -> Streams:  # fmt: skip
    """Streams of features that there are: `classes` has those of each class, (n, d). A stream learns `ways` of them,
    one class after the other, with `shots` images each, and asks for `queries` other images of each, in any order. A
    class has a random label in each stream."""
    if len(classes) < ways or min(len(own) for own in classes) < shots + queries:
        raise UserError(
            f"Streams of {ways} classes with {shots} + {queries} images need as many classes, each with as many: pass "
            "more, or lower ways, shots or queries."
        )
    learned, asked, names = [], [], []
    for _ in range(batch):
        chosen = torch.randperm(len(classes), generator=generator)[:ways].tolist()
        names.append(torch.randperm(slots or ways, generator=generator)[:ways])
        drawn = [classes[c][torch.randperm(len(classes[c]), generator=generator)[: shots + queries]] for c in chosen]
        learned.append(torch.cat([own[:shots] for own in drawn]))
        asked.append(torch.cat([own[shots:] for own in drawn]))
    labels = torch.stack(names)
    return Streams(
        torch.stack(learned),
        labels.repeat_interleave(shots, 1),
        torch.stack(asked),
        labels.repeat_interleave(queries, 1),
    )


def synthetic_streams(
    generator: torch.Generator, batch: int, classes: int, shots: int, num_features: int, noise: float = 0.3,
    queries: int = 1,
) -> Streams:  # fmt: skip
    """Streams of new classes: each is a random mean of length 1 with Gaussian noise of this length."""
    means = F.normalize(torch.randn(batch, classes, num_features, generator=generator), dim=-1)

    def images(each: int) -> Tensor:
        around = torch.randn(batch, classes, each, num_features, generator=generator)
        return (means[:, :, None] + noise * num_features**-0.5 * around).flatten(1, 2)

    labels = torch.stack([torch.randperm(classes, generator=generator) for _ in range(batch)])
    return Streams(
        images(shots), labels.repeat_interleave(shots, 1), images(queries), labels.repeat_interleave(queries, 1)
    )
