"""SD-LoRA (Wu et al., *SD-LoRA: Scalable Decoupled Low-Rank Adaptation for Class Incremental Learning*, ICLR 2025): a
low-rank change per task. The directions of earlier tasks' changes are fixed; their lengths train on.

The change of a layer in task t is m_t B_t A_t + sum_{i<t} m_i B_i A_i / |B_i A_i|, with one number m per change.

Its recipe: SGD, no weight decay, batches of 128, a constant rate for everything: 0.008 for CIFAR-100, 0.01 for
ImageNet-R, 20 passes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from mambacl.methods.base import Task
from mambacl.methods.registry import METHODS
from mambacl.methods.task_changes import ChangesLayers, LayersOptions
from mambacl.options import at_least, finite_from
from mambacl.tuning import AddedModules, Tuning
from mambacl.tuning.lora import LowRank
from mambacl.tuning.task_lora import Place, check_rank

SHORTEST = 1e-12  # length of a change that has not been trained


@dataclass(frozen=True)
class SDLoraOptions(LayersOptions):
    """Options of SD-LoRA."""

    variant: Literal["paper", "public-code"] = "paper"
    """paper: a direction has length 1, each layer has its own numbers m, and a task starts from the lengths that the
    last one has left; public-code: directions are divided by |B| |A|, all layers share the numbers m, and a task starts
    them all from `magnitude`, so features jump"""
    rank: Annotated[int, at_least(1)] = 10
    """rows of A"""
    magnitude: Annotated[float, finite_from(0)] = 0.8
    """where the number m of a new change starts"""


class Magnitudes(nn.Module):
    """The numbers m, (layers or 1, tasks); a state with more tasks makes room."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.empty(rows, 0))
        self.register_load_state_dict_pre_hook(_fit)


def _fit(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    assert isinstance(module, Magnitudes)
    module.values = nn.Parameter(module.values.detach().new_empty(state[f"{prefix}values"].shape))


class SDLora(ChangesLayers):
    name = "sd-lora"
    summary = "a low-rank change per task, whose direction is kept and whose length trains on (SD-LoRA)"
    options_class: ClassVar[type] = SDLoraOptions
    attention_parts: ClassVar[tuple[str, ...]] = ("q", "v")

    def make_tuning(self) -> Tuning:
        super().make_tuning()
        self.magnitudes = Magnitudes(len(self.changes.places) if self.options.variant == "paper" else 1)
        self.lengths = torch.empty(0, len(self.changes.places))
        """of earlier tasks' changes, (tasks, layers)"""
        self.changes.factors = self.factors
        return AddedModules(self.model, changes=self.changes, magnitudes=self.magnitudes)

    def check_places(self, places: list[Place]) -> None:
        check_rank(places, self.options.rank, "sd-lora: options.rank")

    def new_change(self, place: Place, task: int, generator: torch.Generator) -> nn.Module:
        return LowRank(place.inputs, place.outputs, self.options.rank, generator)

    def start_task(self, task: Task) -> None:
        before = self.magnitudes.values.detach()
        super().start_task(task)
        self._measure()
        values = before.new_full((len(before), len(self.changes.tasks)), self.options.magnitude)
        if self.options.variant == "paper" and before.shape[1]:
            values[:, :-2] = before[:, :-1]
            values[:, -2] = before[:, -1] * self.lengths[-1]
        self.magnitudes.values = nn.Parameter(values)
        self.start = {name: tensor.clone() for name, tensor in self._trained().items()}

    @torch.no_grad()
    def _measure(self) -> None:
        """The lengths of all changes but the last task's."""
        earlier = [self.changes.tasks[task] for task in range(len(self.changes.tasks) - 1)]
        found = [[self.length(change) for change in changes] for changes in earlier]
        self.lengths = torch.stack([torch.stack(row) for row in found]) if found else self.lengths[:0]
        self.lengths = self.lengths.to(self.magnitudes.values)

    def length(self, change: LowRank) -> Tensor:
        if self.options.variant == "public-code":
            return (change.A.norm() * change.B.norm()).clamp(min=SHORTEST)
        return (change.B @ change.A).norm().clamp(min=SHORTEST)

    def factors(self, place: int) -> Tensor:
        values = self.magnitudes.values[place if len(self.magnitudes.values) > 1 else 0]
        return torch.cat((values[:-1] / self.lengths[:, place], values[-1:]))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        self._measure()


METHODS.add(SDLora.name, SDLora)
