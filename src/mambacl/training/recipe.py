"""How one task is trained, as data; the named recipes are values of it.

A recipe is apart from the null space's setting: any of the one goes with any of the other.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from mambacl.errors import UserError
from mambacl.registry import did_you_mean


@dataclass(frozen=True)
class Recipe:
    """How one task is trained. The defaults are the paper's."""

    passes: int = 50
    """passes over a task's images"""
    passes_per_epoch: int = 1
    """passes that are shuffled as one; a checkpoint is written after each epoch"""
    batch_size: int = 200
    """images in a training batch"""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """adam has L2 decay inside the gradient, adamw decoupled decay, sgd a momentum of 0.9"""
    lr: float = 2e-4
    """learning rate of the backbone"""
    head_lr: float = 1e-2
    """learning rate of the classifier"""
    weight_decay: float = 5e-5
    """weight decay of all trained parameters"""
    schedule: Literal["multistep", "cosine", "constant"] = "multistep"
    """how the learning rates fall within a task"""
    decay_after: list[int] = dataclasses.field(default_factory=lambda: [25, 40])
    """multistep: passes after which the learning rates are multiplied by decay_rate"""
    decay_rate: float = 0.1
    """multistep: that factor"""
    heads: Literal["new", "warm-second"] = "new"
    """new: each task starts a new classifier; warm-second: the second continues from the first if as wide, as the
    released code does"""
    headline: Literal["tasks", "images"] = "tasks"
    """printed accuracies: the mean over tasks, or over images"""
    covariance_batch_size: int = 100
    """images in a batch when the covariances are gathered"""
    eval_batch_size: int = 100
    """images in a batch at evaluation"""
    workers: int = 0
    """processes that prepare images; 0 prepares them in the main one"""

    def __post_init__(self) -> None:
        for name in ("passes", "passes_per_epoch", "batch_size", "covariance_batch_size", "eval_batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"training.{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("lr", "head_lr", "weight_decay", "decay_rate", "workers"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"training.{name} must be a number from 0 on, got {getattr(self, name)}.")
        if self.passes % self.passes_per_epoch:
            raise UserError(
                f"training.passes ({self.passes}) must be a multiple of passes_per_epoch ({self.passes_per_epoch})."
            )

    @property
    def epochs(self) -> int:
        return self.passes // self.passes_per_epoch


RECIPES: dict[str, Recipe] = {
    "paper": Recipe(),
    "public-code": Recipe(passes_per_epoch=5, decay_after=[20, 35], heads="warm-second", headline="images"),
}


def recipe_named(name: str) -> Recipe:
    if name not in RECIPES:
        raise UserError(f"There is no recipe '{name}'.{did_you_mean(name, RECIPES)} Known: {', '.join(RECIPES)}.")
    return RECIPES[name]
