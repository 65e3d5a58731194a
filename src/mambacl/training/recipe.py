"""The options for training one task, and the named recipes.

A recipe is independent of the null space's setting: any recipe works with any setting.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Literal

from mambacl.options import OptionError, Options, at_least, finite_from
from mambacl.registry import unknown

Count = Annotated[int, at_least(1)]
Rate = Annotated[float, finite_from(0)]


@dataclass(frozen=True)
class Recipe(Options):
    """How one task is trained. The defaults are the paper's."""

    passes: Count = 50
    """passes over a task's images"""
    passes_per_epoch: Count = 1
    """passes that are shuffled together; a checkpoint is written after each epoch"""
    batch_size: Count = 200
    """images per training batch"""
    accumulate: Count = 1
    """a step's batch goes through the model in this many pieces, one after another: same gradient, less memory"""
    recompute: bool = False
    """gradient checkpointing: keeps only the input of each block and computes the block again in the backward pass.
    Same gradient, far less memory; a step takes up to 45% longer"""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """adam adds L2 decay to the gradient, adamw decouples it, sgd has a momentum of 0.9"""
    lr: Rate = 2e-4
    """learning rate of the backbone"""
    head_lr: Rate = 1e-2
    """learning rate of the classifier"""
    weight_decay: Rate = 5e-5
    """weight decay of all trained parameters"""
    schedule: Literal["multistep", "cosine", "epoch-cosine", "coda-cosine", "constant"] = "multistep"
    """how the learning rates decay within a task; cosine changes them with each step, epoch-cosine with each epoch,
    coda-cosine as CODA-Prompt's code does: one epoch late, and to a tenth or less instead of 0"""
    clip: Rate = 0.0
    """largest norm of the gradient of everything that trains; 0 for no limit"""
    decay_after: list[int] = dataclasses.field(default_factory=lambda: [25, 40])
    """multistep: passes after which the learning rates are multiplied by decay_rate"""
    decay_rate: Rate = 0.1
    """multistep: factor of the learning rates"""
    heads: Literal["new", "warm-second"] = "new"
    """new: each task starts with a new classifier; warm-second: the second task starts with the first's if it has as
    many classes, as in the released code"""
    headline: Literal["tasks", "images"] = "tasks"
    """whether printed accuracies are means over tasks or over images"""
    covariance_batch_size: Count = 100
    """images per batch when gathering covariances"""
    eval_batch_size: Count = 100
    """images per batch in evaluation"""
    workers: Annotated[int, at_least(0)] = 0
    """processes that load images; 0 loads them in the main process"""

    def check(self) -> None:
        if self.passes % self.passes_per_epoch:
            raise OptionError(
                f"{{group}}passes ({self.passes}) must be a multiple of passes_per_epoch ({self.passes_per_epoch})."
            )

    @property
    def epochs(self) -> int:
        return self.passes // self.passes_per_epoch

    def lr_factor(self, done: float) -> float:
        """The factor of the learning rates after `done` passes over the task's images."""
        if self.schedule == "constant":
            return 1.0
        if self.schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * done / self.passes))
        epoch = int(done // self.passes_per_epoch)
        if self.schedule == "epoch-cosine":
            return 0.5 * (1 + math.cos(math.pi * epoch / self.epochs))
        if self.schedule == "coda-cosine":
            return math.cos(99 * math.pi * max(epoch - 1, 0) / (200 * max(self.epochs - 1, 1)))
        return self.decay_rate ** sum(done >= milestone for milestone in self.decay_after)


RECIPES: dict[str, Recipe] = {
    "paper": Recipe(),
    "public-code": Recipe(passes_per_epoch=5, decay_after=[20, 35], heads="warm-second", headline="images"),
}


def recipe_named(name: str) -> Recipe:
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]
