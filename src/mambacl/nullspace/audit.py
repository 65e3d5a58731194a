"""The consistency audit: how far what the method wants to keep has moved since it was recorded.

The paper's conditions are about delta, exp(delta A), delta B and C of each block, and so about its output. `record`
notes them for some images, `drift` compares two records. How much of each update fell into protected directions needs
no images: `NullSpace.update_energy`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mambacl.nullspace.blocks import Block
from mambacl.nullspace.statistics import Features, evaluating, run_batches, value, watching

QUANTITIES = {
    "delta": "delta",
    "decay": "exp(delta A)",
    "input": "delta B",
    "C": "C",
    "output": "output",
}
NOTED = ("delta", "A", "B", "C")  # of each direction; exp(delta A) and delta B, which are large, follow from them

Drift = dict[str, dict[str, float]]  # by block and quantity: |now - then| / |then|


def record(
    model: nn.Module, blocks: Sequence[Block], images: Any, forward: Callable[..., Any] | None = None
) -> dict[str, Tensor]:
    """What the selective SSMs make of a batch of images, by block/direction/name."""
    noted: dict[str, Tensor] = {}
    directions = {
        block.name: [{word: part.inputs.get(word, word) for word in NOTED} for part in block.parts if part.kind == "A"]
        for block in blocks
        if block.selective
    }

    @torch.inference_mode(False)
    @torch.no_grad()
    def show(block: Block, features: Features) -> None:
        if "output" in features:
            noted[f"{block.name}/output"] = value(features, "output").detach().clone()
        for number, names in enumerate(directions[block.name]):
            if all(name in features for name in names.values()):
                for word, name in names.items():
                    noted[f"{block.name}/{number}/{word}"] = value(features, name).detach().clone()

    watched = [block for block in blocks if block.selective]
    with torch.inference_mode(False), watching(watched, show), evaluating(model), torch.no_grad():
        run_batches([images], model if forward is None else forward, next(model.parameters()).device)
    return noted


def drift(then: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> Drift:
    """How far each quantity of each block has moved, relative to its norm; directions are taken together."""
    sums: dict[str, dict[str, list[float]]] = {}

    def add(block: str, quantity: str, old: Tensor, new: Tensor) -> None:
        both = sums.setdefault(block, {}).setdefault(quantity, [0.0, 0.0])
        both[0] += (new - old).square().sum().item()
        both[1] += old.square().sum().item()

    for name in now:  # in the model's order, whatever a file's is
        if name.endswith("/output"):
            add(name.removesuffix("/output"), "output", then[name].double(), now[name].double())
        elif name.endswith("/delta"):
            prefix = name.removesuffix("delta")
            block = prefix.rstrip("/").rpartition("/")[0]
            old, new = ({word: record[prefix + word].double() for word in NOTED} for record in (then, now))
            add(block, "delta", old["delta"], new["delta"])
            add(block, "C", old["C"], new["C"])
            for image in range(len(old["delta"])):  # one at a time: these have a state axis more
                add(block, "decay", _decay(old, image), _decay(new, image))
                add(block, "input", _input(old, image), _input(new, image))
    return {
        block: {q: (found[q][0] / found[q][1]) ** 0.5 if found[q][1] else 0.0 for q in QUANTITIES if q in found}
        for block, found in sums.items()
    }


def _decay(noted: Mapping[str, Tensor], image: int) -> Tensor:
    delta, A = noted["delta"][image], -noted["A"].exp()
    return torch.exp(delta[..., None] * A) if A.dim() == 2 else torch.exp(delta * A)  # a number per head in Mamba-2


def _input(noted: Mapping[str, Tensor], image: int) -> Tensor:
    return noted["delta"][image][..., None] * noted["B"][image][:, None, :]


def shares(energy: Any) -> tuple[float, float]:
    """From a row of `NullSpace.update_energy`: the shares, in squared norm, of the optimizer's update and of the one
    applied that lay in protected directions."""
    asked, asked_protected, applied, applied_protected = (float(value) for value in energy)
    return (asked_protected / asked if asked else 0.0, applied_protected / applied if applied else 0.0)
