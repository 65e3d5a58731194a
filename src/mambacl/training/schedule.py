"""Learning rates as a pure function of the passes done: no state to save or to get out of step."""

import math

from mambacl.training.recipe import Recipe


def lr_factor(recipe: Recipe, done: float) -> float:
    """The factor of the learning rates after `done` passes over the task's images."""
    if recipe.schedule == "constant":
        return 1.0
    if recipe.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done / recipe.passes))
    return recipe.decay_rate ** sum(done >= milestone for milestone in recipe.decay_after)
