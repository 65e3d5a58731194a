"""Inf-SSM (Lee et al., *Exemplar-Free Continual Learning for State Space Models*, CVPR 2026): on a new task's images,
each selective SSM must keep the behaviour that the model before the task observes (`nullspace/observability.py`).

The loss is cross-entropy over the task's classes plus a weight times the mean distance over blocks and directions. The
model before the task is kept: what trains, once more. Two forward passes per training step, one at test.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.func import functional_call

from mambacl.errors import UserError
from mambacl.methods.base import Method, Phase
from mambacl.methods.registry import METHODS
from mambacl.nullspace.block_readers import find_blocks
from mambacl.nullspace.blocks import Block
from mambacl.nullspace.observability import distance, mean_transition, norm, squashed, trace
from mambacl.nullspace.statistics import Features, value, watching
from mambacl.ops.precision import at_least_float32, full_precision
from mambacl.options import Options, between, finite_from
from mambacl.tuning import ModelParameters, Tuning

OLD = "old/"  # prefix of the old model's tensors in a task's state
SSM = ("x_proj", "dt_proj", "A_", "D")  # how the names of an SSM's parameters begin, in its block

Systems = list[tuple[Tensor, Tensor]]
"""per direction of each block: the transitions and output rows of all tokens, (b, l, n) each"""


@dataclass(frozen=True)
class InfSSMOptions(Options):
    """Options of Inf-SSM."""

    variant: Literal["paper", "public-code"] = "paper"
    """paper: delta as in the scan; public-code: without its bias"""
    tune: Literal["all", "ssm"] = "all"
    """what trains: the whole backbone, or x_proj, dt_proj, A and D of its selective SSMs"""
    size: Literal["trace", "norm"] = "trace"
    """what the distance is relative to: traces, as published, or Frobenius norms, so that no change has no distance"""
    weight: Annotated[float, finite_from(0)] = 3e4
    """weight of the distance; 3e4 for 10 tasks of CIFAR-100, 2e5 for 5; 2.5e5 for 10 tasks of ImageNet-R"""
    rate: Annotated[float, between(0, 1)] = 0.5
    """factor of all learning rates with each further task; 0.5 for CIFAR-100, 0.25 for ImageNet-R"""


class InfSSM(Method):
    name = "inf-ssm"
    summary = "fine-tuning that keeps what the selective SSMs of the model before observe (Inf-SSM)"
    options_class: ClassVar[type] = InfSSMOptions

    def make_tuning(self) -> Tuning:
        self.blocks = [block for block in find_blocks(self.model) if two_dimensional(block)]
        if not self.blocks:
            raise UserError(
                f"inf-ssm compares selective SSMs, but {type(self.model).__name__} has none that it knows: choose a "
                "Mamba backbone."
            )
        if getattr(self.model, "grad_checkpointing", False):
            raise UserError(
                "inf-ssm reads inside the blocks, which gradient checkpointing computes again: set training.recompute "
                "to false."
            )
        self.old: dict[str, Tensor] = {}
        """what trained, when the task before ended"""
        names = [name for name, _ in self.model.named_parameters()]
        if self.options.tune == "ssm":
            starts = tuple(f"{block.name}.{start}" if block.name else start for block in self.blocks for start in SSM)
            names = [name for name in names if name.startswith(starts)]
        return ModelParameters(self.model, names)

    def phase(self, epoch: int, epochs: int) -> Phase:
        return Phase(rate=self.options.rate ** max(0, self.task - self.known_tasks))

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if not self.old or not self.options.weight:
            return super().loss(images, labels)
        features, systems = self.observed(images, self.features)
        with torch.no_grad():
            _, old = self.observed(images, lambda images: functional_call(self.model, self.old, (images,)))
        loss, correct = self.task_loss(features, labels)
        size = trace if self.options.size == "trace" else norm
        with full_precision(features):
            apart = torch.stack([distance(*one, *other, size) for one, other in zip(systems, old, strict=True)])
        return loss + self.options.weight * apart.mean(), correct

    def observed(self, images: Tensor, forward: Callable[[Tensor], Tensor]) -> tuple[Tensor, Systems]:
        """What `forward` returns, and the SSMs that run in it."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        step = "delta" if self.options.variant == "paper" else "unbiased"

        def show(block: Block, features: Features) -> None:
            for part in block.parts:
                delta, A, C = (part.inputs.get(name, name) for name in (step, "A", "C"))
                if part.kind == "A" and delta in features:
                    rows = at_least_float32(value(features, C))
                    with full_precision(rows):
                        a = mean_transition(value(features, delta), at_least_float32(value(features, A)))
                        found[part.name] = squashed(a), squashed(rows)

        with watching(self.blocks, show):
            output = forward(images)
        return output, list(found.values())

    def finish_task(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        self.old = {name: parameter.detach().clone() for name, parameter in self.tuning.trained()}
        return {}

    def task_state_dict(self) -> dict[str, Tensor]:
        return {**super().task_state_dict(), **{OLD + name: tensor for name, tensor in self.old.items()}}

    def load_task_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_task_state_dict(state)
        own = {name.removeprefix(OLD): tensor for name, tensor in state.items() if name.startswith(OLD)}
        self.old = {name: tensor.to(self.device) for name, tensor in own.items()}

    def for_answers(
        self, state: Mapping[str, Tensor], task_state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """All but the old model."""
        state, task_state = super().for_answers(state, task_state)
        return state, {name: tensor for name, tensor in task_state.items() if not name.startswith(OLD)}


def two_dimensional(block: Block) -> bool:
    """Whether it is a Mamba-1 block, in which A has a row per channel."""
    named: Any = dict(block.module.named_parameters())
    inner = [part.parameter.removeprefix(f"{block.name}.") for part in block.parts if part.kind == "A"]
    return bool(inner) and all(named[name].dim() == 2 for name in inner)


METHODS.add(InfSSM.name, InfSSM)
