"""Adapters that are added where the model's tokens are new, and a router that mixes them, as in SEMA.

A place in one of the last blocks has one branch or more: an adapter, a row of the router and an autoencoder. The place
adds up the adapters' outputs, weighted by the softmax over the rows' values for the mean token. The autoencoder tells
whether mean tokens are like those that its adapter was trained on. Places in earlier blocks have a single adapter.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mambacl.ops.precision import at_least_float32, full_precision
from mambacl.tuning.adapters import Adapter, AdapterOptions, AdapterSets, Place

Batches = Iterable[tuple[Tensor, Tensor]]
STAYS, TRAINS, TRAINED = 0, 1, 2  # in this task, the newest branch of a place: is older, trains, has been trained


class Descriptor(nn.Module):
    """A linear autoencoder of mean tokens, with a record of its latest errors."""

    record: Tensor
    count: Tensor

    def __init__(self, width: int, hidden: int, room: int) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.register_buffer("record", torch.zeros(room))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, means: Tensor) -> Tensor:
        """The mean squared error of each row (b, c)."""
        with full_precision(means):
            means = at_least_float32(means)
            return (self.decoder(self.encoder(means)) - means).square().mean(1)

    @torch.no_grad()
    def keep(self, errors: Tensor) -> None:
        """Adds errors (b,) to the record; the oldest leave when it is full."""
        kept = torch.cat((self.record[: int(self.count)], errors.to(self.record)))[-len(self.record) :]
        self.record[: len(kept)] = kept
        self.count.fill_(len(kept))

    def novelty(self, means: Tensor) -> Tensor:
        """By how many standard deviations of the recorded errors those of the rows differ from their mean, on average;
        0 without a record."""
        kept = self.record[: int(self.count)]
        if len(kept) < 2:
            return kept.new_zeros(())
        return ((self(means) - kept.mean()) / kept.std()).abs().mean()


class Branch(nn.Module):
    """Without `hidden`, an adapter alone."""

    def __init__(self, width: int, options: AdapterOptions, hidden: int, room: int) -> None:
        super().__init__()
        self.adapter = Adapter(width, options.bottleneck, options.scale)
        self.row = nn.Linear(width, 1) if hidden else None
        self.descriptor = Descriptor(width, hidden, room) if hidden else None

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        self.adapter.reset(generator)
        routing: list[Any] = [] if self.descriptor is None else [self.row, *self.descriptor.children()]
        for layer in routing:
            bound = layer.in_features**-0.5
            layer.weight.uniform_(-bound, bound, generator=generator)
            layer.bias.uniform_(-bound, bound, generator=generator)


class Routed(nn.Module):
    """The branches of one place."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList()
        self.watched = False
        self.seen: Tensor | None = None
        """the mean tokens (b, c) of the latest forward while `watched`"""

    def forward(self, tokens: Tensor) -> Tensor:
        branches: Any = self.branches
        if branches[0].row is None:
            return branches[0].adapter(tokens)
        mean = tokens.flatten(1, -2).mean(1)
        if self.watched:
            self.seen = mean.detach()
        weights = torch.cat([branch.row(mean) for branch in branches], dim=1).softmax(1)
        parts = [w.view(-1, *[1] * (tokens.dim() - 1)) * branch.adapter(tokens)
                 for w, branch in zip(weights.unbind(1), branches, strict=True)]  # fmt: skip
        return torch.stack(parts).sum(0)


class RoutedAdapters(AdapterSets):
    """One `Routed` per block. The state also says what has happened to each place in the current task."""

    status: Tensor
    scan: Tensor
    """batches done in the current scan of a task, whether it has found anything, whether scanning has ended"""

    def __init__(
        self, model: nn.Module, options: AdapterOptions, place: Place, seed: int, last: int, hidden: int, room: int
    ) -> None:
        """`last`: number of blocks, the last ones, in which adapters can be added; `hidden`: values that an autoencoder
        keeps of a mean token; `room`: errors in its record."""
        super().__init__(model, options, place)
        self.hidden, self.room = hidden, room
        self.growing = list(range(len(self.widths)))[-last:]
        """the places where adapters can be added"""
        self.register_buffer("status", torch.full((len(self.widths),), TRAINS))
        self.register_buffer("scan", torch.zeros(3, dtype=torch.int64))
        self.adapters.append(nn.ModuleList(Routed() for _ in self.widths))
        for index in range(len(self.widths)):
            self.grow(index, seed + index)
        self.current = 0

    def at(self, index: int) -> Any:
        return self.adapters[0][index]  # type: ignore[index]

    def grow(self, index: int, seed: int) -> None:
        """Adds a branch to a place; it trains, and the place's earlier ones are fixed."""
        branch = Branch(self.widths[index], self.options, self.hidden if index in self.growing else 0, self.room)
        branch.reset(torch.Generator().manual_seed(seed ^ 1))
        self.at(index).branches.requires_grad_(False)
        self.at(index).branches.append(branch.to(self.device, self.dtype))
        self.status[index] = TRAINS

    def begin(self, first: bool) -> None:
        """Starts a task; in the first one, all branches train."""
        self.status.fill_(TRAINS if first else STAYS)
        self.scan.zero_()

    def settle(self) -> None:
        """What has trained is fixed."""
        self.status[self.status == TRAINS] = TRAINED

    @property
    def grown(self) -> int:
        """Number of branches that the current task has added, except in the first one."""
        return int((self.status != STAYS).sum())

    def trained(self, descriptors: bool | None = None) -> list[tuple[str, nn.Parameter]]:
        """Of the branches that train; of their autoencoders only, of the rest only, or of both."""
        found = []
        for index in self.status.eq(TRAINS).nonzero().flatten().tolist():
            last = len(self.at(index).branches) - 1
            named = self.at(index).branches[last].named_parameters()
            found += [(f"adapters.0.{index}.branches.{last}.{name}", parameter) for name, parameter in named]
        return [pair for pair in found if descriptors is None or (".descriptor." in pair[0]) == descriptors]

    def newest(self) -> dict[int, Descriptor]:
        """The autoencoders that train, by place."""
        places = (index for index in self.growing if self.status[index] == TRAINS)
        return {index: self.at(index).branches[-1].descriptor for index in places}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, each forward leaves the mean tokens of all places where adapters can be added."""
        for index in self.growing:
            self.at(index).watched = True
        try:
            yield
        finally:
            for index in self.growing:
                self.at(index).watched = False

    def novelties(self, index: int) -> Tensor:
        """How new the mean tokens that a place has left are to each of its autoencoders, (branches,)."""
        return torch.stack([branch.descriptor.novelty(self.at(index).seen) for branch in self.at(index).branches])

    def search(
        self, batches: Callable[[], Batches], size: int, run: Callable[[Tensor], object], threshold: float
    ) -> int | None:
        """The next place that should grow: in the first batch of `size` images that has one, the first place that has
        not grown in this task and to all of whose autoencoders the images are newer than the threshold. Goes on after
        the batch of the last one found. Scans all images again if it has found any; None if a scan finds nothing.
        `run`: the model's forward."""
        while not self.scan[2]:
            for number, images in enumerate(in_batches_of(size, batches())):
                if number < self.scan[0]:
                    continue
                self.scan[0] += 1
                with self.watching():
                    run(images)
                for index in self.growing:
                    newest = self.novelties(index).min()
                    if self.status[index] == STAYS and newest > threshold:
                        self.scan[1] = 1
                        return index
            self.scan.copy_(torch.tensor([0, 0, 1 - int(self.scan[1])]))
        return None

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Each place gets as many branches as in the state."""
        for index in range(len(self.widths)):
            del self.at(index).branches[1:]
            start = f"adapters.0.{index}.branches."
            while any(name.startswith(f"{start}{len(self.at(index).branches)}.") for name in state):
                self.grow(index, seed=0)
        return nn.Module.load_state_dict(self, state, strict, assign)


def in_batches_of(size: int, batches: Batches) -> Iterator[Tensor]:
    """The images in batches of another size."""
    left: list[Tensor] = []
    for images, _ in batches:
        *full, rest = torch.cat((*left, images)).split(size)
        yield from full
        left = [rest]
    yield from left
