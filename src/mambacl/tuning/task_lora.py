"""Changes of linear layers that add up over tasks: W becomes W + sum_t f_t dW_t.

    places = places_of(model, ["k", "v"])  # the rows of a ViT's fused qkv; or x_proj, out_proj, ... of a Mamba block
    changes = TaskChanges(places, lambda place, task, generator: LowRank(place.inputs, place.outputs, 4, generator))
    changes.add(seed)                      # the change of a new task; the earlier ones are fixed

A change is a module with a function `matrices`, which gives the sum of several as matrices that multiply the layer's
input in turn: `LowRank` gives two, `FourierChange` one. Hooks add the result, so the model keeps its weights and names.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.errors import UserError
from mambacl.tuning.lora import linear_layers
from mambacl.tuning.per_task import PerTask

QKV = "qkv"  # the layer that makes queries, keys and values of attention
PARTS = ("q", "k", "v")  # its thirds
MAMBA = ("x_proj", "x_proj_b", "out_proj")  # the second is Vim's, for the other direction


@dataclass(frozen=True)
class Place:
    """A linear layer, or some of its rows."""

    name: str
    """the layer's, with `.k` or the like for a part of it"""
    layer_name: str
    layer: nn.Linear
    rows: tuple[tuple[int, int], ...]
    """from and to, in ascending order"""

    @property
    def inputs(self) -> int:
        return self.layer.in_features

    @property
    def outputs(self) -> int:
        return sum(stop - start for start, stop in self.rows)


def usual_layers(model: nn.Module, attention: Sequence[str]) -> list[str]:
    """Those of `attention` (of q, k and v) where the model has attention, and x_proj and out_proj where it has Mamba
    blocks."""
    last = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return [*(attention if QKV in last else ()), *(name for name in MAMBA if name in last)]


def places_of(model: nn.Module, names: Sequence[str], together: bool = False) -> list[Place]:
    """The layers with these names; q, k and v are the thirds of a layer named qkv. `together`: one place per layer,
    with all its chosen rows."""
    if len(set(names)) < len(names) or (QKV in names and set(names) & set(PARTS)):
        raise UserError(f"options.layers names the same layer twice ({', '.join(names)}): name each once.")
    thirds, found = [part for part in PARTS if part in names], list[Place]()
    layers: dict[str, nn.Linear] = {}
    for wanted in dict.fromkeys(QKV if name in PARTS else name for name in names):
        layers |= linear_layers(model, [wanted])
    for name, layer in layers.items():
        if not thirds or name.rpartition(".")[2] != QKV:
            found.append(Place(name, name, layer, ((0, layer.out_features),)))
            continue
        size = layer.out_features // 3
        starts = {part: size * PARTS.index(part) for part in thirds}
        if together:
            found.append(Place(name, name, layer, tuple((start, start + size) for start in starts.values())))
        else:
            found += [Place(f"{name}.{part}", name, layer, ((start, start + size),)) for part, start in starts.items()]
    return found


def check_rank(places: Sequence[Place], rank: int, option: str) -> None:
    """`option` names the rank in the error."""
    for place in places:
        if rank > (most := min(place.inputs, place.outputs)):
            raise UserError(
                f"{option} {rank} is too large for {place.name} with {place.inputs} inputs and {place.outputs} "
                f"outputs: set it to {most} or less, or leave the layer out of options.layers."
            )


Make = Callable[[Place, int, torch.Generator], nn.Module]


class TaskChanges(nn.Module):
    """One change per place and task."""

    def __init__(self, places: Sequence[Place], make: Make) -> None:
        """`make` gets the place, the index of the task, and a generator for random values."""
        super().__init__()
        self.places, self.make, self.generator = list(places), make, torch.Generator()
        self.tasks = PerTask(self._new)
        self.factors: Callable[[int], Tensor | None] = lambda place: None
        """of a place by its index: the factors of the changes that count; None for 1"""
        self.only: int | None = None
        """the task whose change alone counts; None for the sum over all"""
        by_layer: dict[nn.Linear, list[int]] = {}
        for index, place in enumerate(self.places):
            by_layer.setdefault(place.layer, []).append(index)
        self._handles = [layer.register_forward_hook(partial(self._add, own)) for layer, own in by_layer.items()]

    def _new(self) -> nn.Module:
        task = len(self.tasks)
        return nn.ModuleList(self.make(place, task, self.generator) for place in self.places)

    def add(self, seed: int) -> None:
        """Adds the changes of a new task; the earlier ones are fixed from now on."""
        self.generator.manual_seed(seed)
        self.tasks.add()

    def at(self, place: int) -> list[Any]:
        """The changes of a place that count, by task."""
        return [self.tasks[task][place] for task in (range(len(self.tasks)) if self.only is None else (self.only,))]

    def matrices(self, place: int) -> list[Tensor]:
        """The sum of those, as matrices that multiply the layer's input in turn."""
        changes = self.at(place)
        found: list[Tensor] = changes[0].matrices(changes, self.factors(place))
        return found

    def weight(self, place: int) -> Tensor:
        """The sum of those as one matrix (outputs, inputs)."""
        first, *others = self.matrices(place)
        for matrix in others:
            first = matrix @ first
        return first

    @contextmanager
    def times(self, factors: Sequence[float]) -> Iterator[None]:
        """Within it, each task's changes count with its factor."""
        before, like = self.factors, self.tasks.like
        given = torch.tensor(factors, device=like.device, dtype=like.dtype)
        self.factors = lambda place: given
        try:
            yield
        finally:
            self.factors = before

    def _add(self, indices: Sequence[int], _: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not len(self.tasks):
            return output
        spans: dict[tuple[int, int], Tensor] = {}
        for index in indices:
            change = arguments[0]
            for matrix in self.matrices(index):
                change = F.linear(change, matrix)
            rows = self.places[index].rows
            sizes = [stop - start for start, stop in rows]
            spans |= zip(rows, change.to(output.dtype).split(sizes, dim=-1), strict=True)
        parts, at = [], 0
        for (start, stop), change in sorted(spans.items(), key=lambda item: item[0]):
            parts += [output[..., at:start], output[..., start:stop] + change]
            at = stop
        return torch.cat([*(part for part in parts if part.shape[-1]), output[..., at:]], dim=-1)

    @torch.no_grad()
    def merge(self) -> None:
        """Adds the sums to the model's own weights for good, and removes the hooks."""
        self.remove()
        for index, place in enumerate(self.places):
            sizes = [stop - start for start, stop in place.rows]
            for (start, stop), change in zip(place.rows, self.weight(index).split(sizes), strict=True):
                place.layer.weight[start:stop] += change

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
