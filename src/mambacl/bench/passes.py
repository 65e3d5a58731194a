"""How many forward passes each method makes through the backbone; docs/rivals.md has the same figures.

A method that is not listed makes one per training image, with a backward pass, and one per test image. A phase of a
method that differs from it has its own entry: the method's name and the phase's.
"""

from dataclasses import dataclass, replace

import torch

from mambacl.methods import Method


@dataclass(frozen=True)
class Passes:
    learning: int = 1
    """per training image and step, after the first task"""
    backward: int = 1
    """of these, the ones with a backward pass"""
    answering: int = 1
    """per test image, after the first task"""


QUERY = Passes(2, 1, 2)  # the feature of the fixed model first
HEADS = Passes(1, 0, 1)  # only heads train
PASSES = {
    **dict.fromkeys(("l2p", "l2p-pgp", "dualprompt", "dualprompt-pgp", "coda-prompt", "evoprompt", "lgcl"), QUERY),
    "os-prompt": Passes(2, 1, 1),
    "cprompt": Passes(3, 2, 2),
    "cprompt-kac": Passes(3, 2, 2),
    "lae": Passes(1, 1, 2),
    "lae head": Passes(1, 0, 2),
    "c-ln": Passes(1, 1, 2),
    "c-ln keys": Passes(1, 0, 2),
    "c-ln head": Passes(2, 0, 2),
    "ovor outliers": HEADS,
    "aper": Passes(1, 1, 2),
    "frozen": HEADS,
}


def passes_of(method: Method) -> Passes:
    """The passes of a method in the task and phase that it is in."""
    name = method.name
    found = PASSES.get(f"{name} {method.current.name}", PASSES.get(name, Passes()))
    answering = method.task + 1 if name == "ease" else found.answering  # one per task's adapters
    return replace(found, answering=answering * len(method.views(torch.empty(0, 0, 0, 0))))
