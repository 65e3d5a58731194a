"""What InfLoRA, SD-LoRA, BiLoRA and LoRA-DRS share: each task adds a change to some linear layers
(`tuning/task_lora.py`) and a linear head; both are fixed when it ends."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from mambacl.errors import UserError
from mambacl.methods.base import Method, Task
from mambacl.nullspace.block_readers import plain_layer
from mambacl.nullspace.covariance import Covariance
from mambacl.nullspace.statistics import gather
from mambacl.options import Options
from mambacl.tuning import AddedModules, Tuning
from mambacl.tuning.task_lora import Place, TaskChanges, places_of, usual_layers


@dataclass(frozen=True)
class LayersOptions(Options):
    """Options of every method that changes linear layers."""

    layers: list[str] | None = None
    """last names of the layers that change; q, k and v are the parts of an attention's qkv. If null: those of the
    paper where there is attention, x_proj and out_proj (in Vim also x_proj_b) of Mamba blocks"""


class ChangesLayers(Method):
    attention_parts: ClassVar[tuple[str, ...]] = ("k", "v")
    """what changes in attention unless the options name layers"""
    one_per_layer: ClassVar[bool] = False
    """whether the parts of a layer share one change"""

    def make_tuning(self) -> Tuning:
        layers = self.options.layers
        layers = usual_layers(self.model, self.attention_parts) if layers is None else layers
        if not layers:
            raise UserError(
                f"{self.name}: options.layers names no layer, or {type(self.model).__name__} has none of the usual "
                "ones: name some of its linear layers."
            )
        places = places_of(self.model, layers, self.one_per_layer)
        self.check_places(places)
        self.changes = TaskChanges(places, self.new_change)
        return AddedModules(self.model, changes=self.changes)

    def check_places(self, places: list[Place]) -> None:
        """Raises `UserError` if the options do not fit the layers."""

    def new_change(self, place: Place, task: int, generator: torch.Generator) -> nn.Module:
        raise NotImplementedError

    def start_task(self, task: Task) -> None:
        self.changes.add(task.seed)
        super().start_task(task)

    def moments(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        """By the name of each layer that changes: the sum of x x^T over its inputs x, (inputs, inputs) in float64."""
        layers = {place.layer_name: place.layer for place in self.changes.places}
        found = {name: Covariance("in", ["in"]) for name in layers}
        sources = {name: plain_layer(layer, name) for name, layer in layers.items()}
        wanted = {source: {"in": found[name]} for name, source in sources.items() if source is not None}
        products = getattr(torch, self.setup.setting.products)
        gather(self.model, wanted, batches, self.features, products, in_parts=False)
        return {name: one.totals["covariance"] for name, one in found.items()}
