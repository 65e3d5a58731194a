"""Low-rank changes of two kinds, as CL-LoRA has them: the first blocks share theirs over all tasks, the others have one
per task, times a learned weight per block.

Rows of A are orthonormal. The shared ones stay as drawn, and only B trains. The shared changes from before the task
are kept beside those that train.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.backbones.layers import Backbone
from mambacl.errors import UserError
from mambacl.tuning.lora import LowRank
from mambacl.tuning.per_task import PerTask
from mambacl.tuning.task_lora import PARTS, Place, TaskChanges

BEFORE, NOW = 0, 1  # the shared changes before the task, and those that train
SHORT = 1e-8  # is added to the lengths of weights that are compared


class BlockWeights(nn.Module):
    """(rows, blocks): what the changes of a block are multiplied with."""

    def __init__(self, rows: int, blocks: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.ones(rows, blocks))

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        self.values.copy_(torch.empty(self.values.shape).uniform_(0.5, 1.5, generator=generator))


class SharedAndOwn(nn.Module):
    def __init__(self, model: nn.Module, places: Sequence[Place], rank: int, shared: int | None, each_layer: bool,
                 seed: int) -> None:  # fmt: skip
        """`shared`: the number of blocks with shared changes, half of all if None; `each_layer`: whether every layer of
        a block has a weight, among them one for keys even if they do not change, or all have the same."""
        super().__init__()
        depth = len(model.feature_info) if isinstance(model, Backbone) and not model.hierarchical else 0
        self.split = depth // 2 if shared is None else shared
        if not 0 < self.split < depth:
            raise UserError(
                f"options.shared ({self.split}) must be at least 1 and below the number of blocks ({depth}), which "
                "have to be equally wide: use a vit, De-focus Mamba or Vim backbone."
            )
        self.backbone, self.rank = [model], rank  # in a list, so that the model is no part of the state
        blocks = in_blocks(model, places)
        first = [place for place, block in zip(places, blocks, strict=True) if block < self.split]
        own = [(place, block) for place, block in zip(places, blocks, strict=True) if block >= self.split]
        if not first or not own:
            raise UserError(
                "options.layers names no layer in the first blocks, or none in the others: name some in both."
            )
        self.shared = TaskChanges(first, lambda place, _, generator: self.new(place, generator, fixed=True))
        self.own = TaskChanges([p for p, _ in own], lambda place, _, generator: self.new(place, generator, fixed=False))
        for self.shared.only in (BEFORE, NOW):
            self.shared.add(seed)
        kinds = [place.name.rpartition(".")[2] for place, _ in own]
        rows = list(dict.fromkeys([*(PARTS if set(kinds) & set(PARTS) else ()), *kinds])) if each_layer else kinds[:1]
        self.weights = PerTask(lambda: BlockWeights(len(rows), depth - self.split))
        where = [(rows.index(kind) if each_layer else 0, block - self.split)
                 for kind, (_, block) in zip(kinds, own, strict=True)]  # fmt: skip
        self.own.factors = lambda place: self.weights[self.own.only].values[where[place]][None]  # type: ignore[index]

    def new(self, place: Place, generator: torch.Generator, fixed: bool) -> LowRank:
        change = LowRank(place.inputs, place.outputs, self.rank, generator, fixed=fixed)
        with torch.no_grad():
            change.A.copy_(torch.linalg.qr(change.A.T).Q.T)
        return change

    def add(self, seed: int) -> None:
        """Starts a task: keeps the shared changes, and adds own ones and their weights."""
        self.shared.tasks[BEFORE].load_state_dict(self.shared.tasks[NOW].state_dict())
        self.own.add(seed ^ 1)  # a head with the same seed draws other numbers
        self.weights.add().reset(torch.Generator().manual_seed(seed ^ 2))

    def early(self, images: Tensor, changes: int = NOW) -> Tensor:
        """The tokens after the blocks with shared changes, (b, l, c)."""
        model: Any = self.backbone[0]
        self.shared.only, x = changes, model.embed(images)
        for block in range(self.split):
            x = model.run_depth(block, x)
        return x

    def late(self, x: Tensor, task: int) -> Tensor:
        """The feature (b, d) that a task's own changes make of those tokens."""
        model: Any = self.backbone[0]
        self.own.only = task  # until after the backward, which can recompute blocks
        for block in range(self.split, len(model.feature_info)):
            x = model.run_depth(block, x)
        return self.pooled(x)

    def pooled(self, x: Tensor) -> Tensor:
        """The feature of tokens after any block, (b, d)."""
        model: Any = self.backbone[0]
        return model.forward_head(model.final_norm(x), pre_logits=True)

    def reassign(self) -> None:
        """Multiplies the gradient of each row of the shared B by the row's length before the task, divided by the mean
        length: rows that have learned much move more. Without lengths it stays as it is."""
        for now, before in zip(self.shared.tasks[NOW], self.shared.tasks[BEFORE], strict=True):
            lengths = before.B.norm(dim=1, keepdim=True)
            mean = lengths.mean()
            now.B.grad.mul_(torch.where(mean > 0, lengths / mean, 1.0))

    def overlap(self) -> Tensor:
        """The mean absolute cosine between the task's weights and those of each earlier task; 0 in the first."""
        *earlier, now = (self.weights[task].values.flatten() for task in range(len(self.weights)))
        if not earlier:
            return 0.0 * now.sum()
        lengths = torch.stack([other.norm() + SHORT for other in earlier]) * (now.norm() + SHORT)
        return (torch.stack(earlier) @ now / lengths).abs().mean()


def in_blocks(model: Any, places: Sequence[Place]) -> list[int]:
    """The block of each place."""
    names = [f"{info['module']}." for info in model.feature_info]
    return [next(i for i, name in enumerate(names) if place.name.startswith(name)) for place in places]


def soft_cross_entropy(scores: Tensor, wanted: Tensor, temperature: float) -> Tensor:
    """Between the probabilities of two rows of scores (b, classes), both divided by a temperature."""
    return -(F.softmax(wanted / temperature, dim=1) * F.log_softmax(scores / temperature, dim=1)).sum(1).mean()
