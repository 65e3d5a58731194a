"""BiLoRA (Zhu et al., *BiLoRA: Almost-Orthogonal Parameter Spaces for Continual Learning*, CVPR 2025): each task learns
some values of the two-dimensional Fourier transform of a weight's change, at random frequencies (`tuning/fourier.py`).

The frequencies of two tasks hardly overlap, so their changes are almost orthogonal. All tasks' changes are summed.

Its recipe: Adam, rate 5e-4 for everything, no weight decay, batches of 128, the schedule coda-cosine; CIFAR-100 20
passes (40 in the first task), ImageNet-R 50.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import nn

from mambacl.errors import UserError
from mambacl.methods.registry import METHODS
from mambacl.methods.task_changes import ChangesLayers, LayersOptions
from mambacl.options import Must, at_least
from mambacl.tuning.fourier import FourierChange, random_positions
from mambacl.tuning.task_lora import Place

SHARE = 3000 / 768**2  # of all frequencies, as published for a ViT-B


@dataclass(frozen=True)
class BiLoraOptions(LayersOptions):
    """Options of BiLoRA."""

    frequencies: Annotated[int | None, at_least(1)] = None
    """learned values per layer and task; if null 0.51% of the layer's weights, which is 3000 for keys of a ViT-B"""
    alpha: Annotated[float, Must("be positive and finite", lambda alpha: 0 < alpha < math.inf)] = 300.0
    """factor of the change; divided by the number of the layer's weights, by the inverse transform"""


class BiLora(ChangesLayers):
    name = "bilora"
    summary = "learned frequencies of weight changes, at random places for each task (BiLoRA)"
    options_class: ClassVar[type] = BiLoraOptions

    def check_places(self, places: list[Place]) -> None:
        for place in places:
            if (wanted := self.options.frequencies or 1) > (most := place.inputs * place.outputs):
                raise UserError(
                    f"bilora: options.frequencies {wanted} is more than {place.name} has weights: set it to {most} or "
                    "less."
                )

    def new_change(self, place: Place, task: int, generator: torch.Generator) -> nn.Module:
        size = place.inputs * place.outputs
        count = self.options.frequencies or max(1, round(SHARE * size))
        positions = random_positions(size, count, seed=777 + 10 * task)  # as in the released code
        return FourierChange(place.inputs, place.outputs, positions, self.options.alpha)


METHODS.add(BiLora.name, BiLora)
