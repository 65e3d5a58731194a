"""The consistency audit: how much the protected quantities of each block have changed since they were recorded.

The paper's conditions keep delta, exp(delta A), delta B and C of each block, and with them its output. `record` stores
them for some images, `drift` compares two records. `NullSpace.update_energy` says, without images, how much of each
update lay in protected directions.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mambacl.nullspace.blocks import Block
from mambacl.nullspace.statistics import Features, evaluating, run_batches, value, watching

QUANTITIES = {"delta": "delta", "decay": "exp(delta A)", "input": "delta B", "C": "C", "output": "output"}
RECORDED = ("delta", "A", "B", "C")  # per direction; exp(delta A) and delta B are large and computed from these

Drift = dict[str, dict[str, float]]  # by block and quantity: |now - then| / |then|


def record(
    model: nn.Module, blocks: Sequence[Block], images: Any, forward: Callable[..., Any] | None = None
) -> dict[str, Tensor]:
    """The quantities of each selective SSM for a batch of images, by block/direction/name."""
    recorded: dict[str, Tensor] = {}
    directions = {
        block.name: [{key: part.inputs.get(key, key) for key in RECORDED} for part in block.parts if part.kind == "A"]
        for block in blocks
        if block.selective
    }

    @torch.inference_mode(False)
    @torch.no_grad()
    def show(block: Block, features: Features) -> None:
        if "output" in features:
            recorded[f"{block.name}/output"] = value(features, "output").detach().clone()
        for number, names in enumerate(directions[block.name]):
            if all(name in features for name in names.values()):
                for word, name in names.items():
                    recorded[f"{block.name}/{number}/{word}"] = value(features, name).detach().clone()

    watched = [block for block in blocks if block.selective]
    with torch.inference_mode(False), watching(watched, show), evaluating(model), torch.no_grad():
        run_batches([images], model if forward is None else forward, next(model.parameters()).device)
    return recorded


def drift(then: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> Drift:
    """The change of each quantity of each block, relative to its norm, over all directions."""
    sums: dict[str, dict[str, list[float]]] = {}

    def add(block: str, quantity: str, old: Tensor, new: Tensor) -> None:
        both = sums.setdefault(block, {}).setdefault(quantity, [0.0, 0.0])
        both[0] += (new - old).square().sum().item()
        both[1] += old.square().sum().item()

    for name in now:  # the model's order; a file can have another
        if name.endswith("/output"):
            add(name.removesuffix("/output"), "output", then[name].double(), now[name].double())
        elif name.endswith("/delta"):
            prefix = name.removesuffix("delta")
            block = prefix.rstrip("/").rpartition("/")[0]
            old, new = ({word: record[prefix + word].double() for word in RECORDED} for record in (then, now))
            add(block, "delta", old["delta"], new["delta"])
            add(block, "C", old["C"], new["C"])
            for image in range(len(old["delta"])):  # one at a time: these tensors are larger by the state axis
                add(block, "decay", _decay(old, image), _decay(new, image))
                add(block, "input", _input(old, image), _input(new, image))
    return {
        block: {q: (found[q][0] / found[q][1]) ** 0.5 if found[q][1] else 0.0 for q in QUANTITIES if q in found}
        for block, found in sums.items()
    }


def _decay(recorded: Mapping[str, Tensor], image: int) -> Tensor:
    delta, A = recorded["delta"][image], -recorded["A"].exp()
    return torch.exp(delta[..., None] * A) if A.dim() == 2 else torch.exp(delta * A)  # Mamba-2: one number per head


def _input(recorded: Mapping[str, Tensor], image: int) -> Tensor:
    return recorded["delta"][image][..., None] * recorded["B"][image][:, None, :]


def shares(energy: Any) -> tuple[float, float]:
    """From a row of `NullSpace.update_energy`: the share of the optimizer's update that lay in protected directions,
    and the same of the applied update, in squared norm."""
    update, update_protected, applied, applied_protected = (float(value) for value in energy)
    return (update_protected / update if update else 0.0, applied_protected / applied if applied else 0.0)
