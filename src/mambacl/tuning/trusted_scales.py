"""Scales within the input subspaces of earlier tasks (TRGP): what a layer does there changes for a new task, while its
weight stays.

For a task that trusts earlier ones with bases S_j, a layer's weight W acts as W + sum_j W S_j (Q_j - I) S_j^T. Only the
square matrices Q_j train; they start at the identity. The model's own weights stay as they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from mambacl.tuning.base import Tuning
from mambacl.tuning.effective_weights import use_weight

PREFIX = "scales."
SLOTS = 2  # earlier tasks that a layer can trust at a time


def scaled(weight: Tensor, basis: Tensor, scale: Tensor) -> Tensor:
    """W S (Q - I) S^T: what a trusted task adds to the weight."""
    inside = weight @ basis
    return (inside @ scale - inside) @ basis.T


def trusted(gradient: Tensor, bases: Sequence[Tensor], threshold: float) -> list[int]:
    """The indices of up to `SLOTS` bases with the largest share |G S| / |G| of a weight's gradient G (out, d), of those
    whose share is above the threshold."""
    norm = gradient.norm().clamp(min=torch.finfo(gradient.dtype).tiny)
    shares = [float((gradient @ basis.to(gradient)).norm() / norm) for basis in bases]
    return sorted((j for j, share in enumerate(shares) if share > threshold), key=lambda j: -shares[j])[:SLOTS]


class TrustedScales:
    """For linear layers by name: a basis per finished task, and scales per task from the second on."""

    def __init__(self, layers: Mapping[str, nn.Linear]) -> None:
        self.layers = dict(layers)
        self.bases: dict[int, dict[str, Tensor]] = {}
        self.scales: dict[int, dict[str, list[nn.Parameter]]] = {}
        self.trusts: dict[int, dict[str, Tensor]] = {}
        """by task and layer: the trusted task of each slot, -1 for none"""
        self.active: int | None = None
        """the task whose scales are in effect"""
        for name, layer in self.layers.items():
            use_weight(layer, partial(self._weight, name))

    def _weight(self, name: str) -> Tensor | None:
        """What a layer uses, if it trusts any task."""
        own = self.layers[name].weight
        terms = [scaled(own, S, Q) for S, Q in self._used(name)]
        return own + torch.stack(terms).sum(0) if terms else None

    def _used(self, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        task = self.active
        if task is None or task not in self.scales:
            return
        for number, scale in zip(self.trusts[task][name].tolist(), self.scales[task][name], strict=True):
            if number >= 0:
                basis = self.bases[number][name].to(scale)
                size = basis.shape[1]
                yield basis, scale[:size, :size]

    @contextmanager
    def using(self, task: int | None) -> Iterator[None]:
        """The scales of a task, or none, while open."""
        before, self.active = self.active, task
        try:
            yield
        finally:
            self.active = before

    def add_task(self, task: int) -> None:
        """A task starts: scales at the identity, large enough for the basis of any earlier task. Until `trust` says
        otherwise, it trusts the latest ones."""
        self.active = task
        for earlier in self.scales.values():
            for parameters in earlier.values():
                for parameter in parameters:
                    parameter.requires_grad_(False)
        if not self.bases:
            return
        latest = sorted(self.bases)[::-1][:SLOTS]
        self.scales[task], self.trusts[task] = {}, {}
        for name, layer in self.layers.items():
            size = max(bases[name].shape[1] for bases in self.bases.values())
            self.scales[task][name] = [nn.Parameter(torch.eye(size).to(layer.weight)) for _ in latest]
            self.trusts[task][name] = torch.tensor(latest)

    def trust(self, task: int, name: str, earlier: Sequence[int]) -> None:
        self.trusts[task][name].fill_(-1)
        self.trusts[task][name][: len(earlier)] = torch.tensor(list(earlier))

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """Those of the active task."""
        own = self.scales.get(-1 if self.active is None else self.active, {})
        return [(f"{PREFIX}{self.active}.{slot}.{name}", p) for name, ps in own.items() for slot, p in enumerate(ps)]

    def state_dict(self, task: int | None = None) -> dict[str, Tensor]:
        """Scales and trusts of a task; of all of them, and the bases, without one."""
        state: dict[str, Tensor] = {}
        for number in self.scales if task is None else self.scales.keys() & {task}:
            for name, parameters in self.scales[number].items():
                state |= {f"{PREFIX}{number}.{slot}.{name}": p.detach() for slot, p in enumerate(parameters)}
                state[f"{PREFIX}{number}.trusts.{name}"] = self.trusts[number][name]
        if task is None:
            state |= {f"{PREFIX}{n}.basis.{name}": b for n, own in self.bases.items() for name, b in own.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Adds what a state holds. Raises KeyError for another model's."""
        for key in sorted(state):
            number, word, name = key.removeprefix(PREFIX).split(".", 2)
            like, task = self.layers[name].weight, int(number)
            if word == "basis":
                self.bases.setdefault(task, {})[name] = state[key].to(like.device)
            elif word == "trusts":
                self.trusts.setdefault(task, {})[name] = state[key].clone().cpu()
            else:
                own = self.scales.setdefault(task, {}).setdefault(name, [])
                own[int(word) :] = [nn.Parameter(state[key].to(like).clone())]


class WithScales:
    """A `Tuning`: parameters of the model, and the scales of the current task."""

    def __init__(self, own: Tuning, scales: TrustedScales) -> None:
        self.own, self.scales = own, scales

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        return [*self.own.trained(), *self.scales.trained()]

    def state_dict(self) -> dict[str, Tensor]:
        task = self.scales.active
        return {**self.own.state_dict(), **({} if task is None else self.scales.state_dict(task))}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        scales = {name: tensor for name, tensor in state.items() if name.startswith(PREFIX)}
        self.own.load_state_dict({name: tensor for name, tensor in state.items() if name not in scales})
        self.scales.load_state_dict(scales)
