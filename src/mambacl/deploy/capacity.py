"""How much room a model has left for further tasks, in numbers and in words."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from mambacl.methods import Method

LITTLE = 0.05  # share of free directions below which a layer hardly learns


@dataclass(frozen=True)
class Capacity:
    free: dict[str, float]
    """by protected part, the share of directions in which it can still move; empty if nothing is protected"""
    classes: int
    """that the model knows"""
    expected_classes: int | None = None
    """that the size of its state was planned for; None if it was not"""

    def describe(self) -> str:
        """One or two sentences."""
        if self.free:
            least = min(self.free, key=self.free.__getitem__)
            full = sum(share < LITTLE for share in self.free.values())
            words = (
                f"On average {fmean(self.free.values()):.0%} of the directions of the {len(self.free)} protected parts "
                f"are still free; the fewest are free in {least}, {self.free[least]:.0%}."
            )
            return f"{words} {full} of them have less than {LITTLE:.0%}." if full else words
        if self.expected_classes is not None:
            past = self.classes > self.expected_classes
            more = ", so that its state grows beyond its limit" if past else ""
            return f"Its size was planned for {self.expected_classes} classes{more}."
        return "No task takes room from the next: nothing is protected, and the state grows only with the classes."


def capacity_of(method: Method, classes: int) -> Capacity:
    """`classes`: after the task that is to be learned."""
    options = getattr(method.classifier, "options", None)
    limited = getattr(options, "state_limit", None)
    expected = getattr(options, "expected_classes", None) if limited else None
    return Capacity(method.free(), classes, expected)
