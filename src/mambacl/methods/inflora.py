"""InfLoRA (Liang and Li, *InfLoRA: Interference-Free Low-Rank Adaptation for Continual Learning*, CVPR 2024): a
low-rank change B A per task. A is fixed: the leading directions of the task's inputs that earlier tasks' inputs do not
need.

Before a task, one pass over its images gives the second moment of each layer's inputs. What it has outside of the
memory of earlier tasks gives A. After the task, another pass grows the memory (DualGPM, `nullspace/subspaces.py`).

Its recipe: Adam, rate 5e-4 for everything, no weight decay, batches of 128, the schedule coda-cosine; CIFAR-100 20
passes, ImageNet-R 50.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from mambacl.methods.registry import METHODS
from mambacl.methods.task_changes import ChangesLayers, LayersOptions
from mambacl.nullspace.subspaces import Subspace, descending, dual_grown, nothing, squared
from mambacl.options import at_least, between
from mambacl.tuning import Tuning
from mambacl.tuning.lora import LowRank
from mambacl.tuning.task_lora import Place, check_rank

MEMORY = "memory/"  # prefix of the memory in a task's state
RETAIN = "/retain"  # suffix of the entry that says which space a basis spans


@dataclass(frozen=True)
class InfLoraOptions(LayersOptions):
    """Options of InfLoRA."""

    variant: Literal["paper", "public-code"] = "paper"
    """paper: the memory holds a share of the inputs' squared length; public-code: of the sum of squared eigenvalues of
    their second moment, which needs far fewer directions, and in the first task one direction less than that share"""
    rank: Annotated[int, at_least(1)] = 10
    """rows of A"""
    share: Annotated[float, between(0, 1)] = 0.98
    """what the memory holds after the first task; later more, up to 1 after the last. 0.95 for CIFAR-100 and
    DomainNet, 0.98 for ImageNet-R"""


class InfLora(ChangesLayers):
    name = "inflora"
    summary = "a low-rank change per task, orthogonal to earlier tasks' inputs (InfLoRA)"
    options_class: ClassVar[type] = InfLoraOptions
    one_per_layer: ClassVar[bool] = True

    def make_tuning(self) -> Tuning:
        self.memory: dict[str, Subspace] = {}
        """of the finished tasks' inputs, by layer"""
        return super().make_tuning()

    def check_places(self, places: list[Place]) -> None:
        check_rank(places, self.options.rank, "inflora: options.rank")

    def new_change(self, place: Place, task: int, generator: torch.Generator) -> nn.Module:
        return LowRank(place.inputs, place.outputs, self.options.rank, generator, fixed=True)

    def energies(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        """The moments whose eigenvalues the memory's share counts, by layer."""
        found = self.moments(batches)
        return found if self.options.variant == "paper" else {name: squared(one) for name, one in found.items()}

    def start_epoch(self, epoch: int, batches: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> None:
        if epoch == 0:
            self.design(batches())

    @torch.no_grad()
    def design(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Sets A of the current task."""
        energies = self.energies(batches)
        for place, change in zip(self.changes.places, self.changes.tasks[-1], strict=True):
            memory = self.memory.get(place.name, nothing(place.inputs, energies[place.name]))
            left = memory.outside(memory.outside(energies[place.name]).mT)
            leading = descending(left)[1][:, : self.options.rank].mT
            change.A.copy_(memory.outside(leading) / 3**0.5)  # 0 if no direction is free

    @torch.no_grad()
    def finish_task(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        started, public = time.perf_counter(), self.options.variant == "public-code"
        energies = self.energies(batches)
        gathered = time.perf_counter()
        share = self.options.share + (1 - self.options.share) * self.task / (self.setup.tasks or 10)
        for name, moment in energies.items():
            memory = self.memory.get(name, nothing(len(moment), moment))
            self.memory[name] = dual_grown(memory, moment, min(share, 1.0), below_at_first=public, at_least=1)
        return {"covariance": gathered - started, "decomposition": time.perf_counter() - gathered}

    def free(self) -> dict[str, float]:
        return {name: 1 - memory.protected / len(memory.basis) for name, memory in self.memory.items()}

    def task_state_dict(self) -> dict[str, Tensor]:
        own = {MEMORY + name: memory.basis for name, memory in self.memory.items()}
        own |= {MEMORY + name + RETAIN: torch.tensor(memory.retain) for name, memory in self.memory.items()}
        return {**super().task_state_dict(), **own}

    def load_task_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_task_state_dict(state)
        own = {name.removeprefix(MEMORY): tensor for name, tensor in state.items() if name.startswith(MEMORY)}
        self.memory = {
            name: Subspace(basis.to(self.device), bool(own[name + RETAIN]))
            for name, basis in own.items()
            if not name.endswith(RETAIN)
        }

    def for_answers(
        self, state: Mapping[str, Tensor], task_state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """All but the memory."""
        state, task_state = super().for_answers(state, task_state)
        return state, {name: tensor for name, tensor in task_state.items() if not name.startswith(MEMORY)}


METHODS.add(InfLora.name, InfLora)
