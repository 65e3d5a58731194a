"""Scales and shifts of a ViT's layer norms, one set per task, and keys that select a set for each image.

With one key per set, a query of the whole image selects it. With a key and a gate per norm, each norm selects on its
own, by the class token that enters it. Tied to a ViT, whose norms `passes` can replace.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.backbones.vit import ViT
from mambacl.tuning.growing_pool import orthogonal_rows
from mambacl.tuning.passes import with_affine
from mambacl.tuning.per_task import PerTask


class NormSet(nn.Module):
    """`weight`, `bias` (norms, c), `keys` (1 or norms, c) and, with `per_norm`, `gates` (norms, c)."""

    gates: nn.Parameter | None

    def __init__(self, norms: int, width: int, per_norm: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(norms, width)), nn.Parameter(torch.zeros(norms, width))
        self.keys = nn.Parameter(torch.zeros(norms if per_norm else 1, width))
        self.gates = nn.Parameter(torch.ones(norms, width)) if per_norm else None


class TaskNorms(nn.Module):
    """The sets of all tasks. The first starts as the model's own norms, each later one as the one before. Per norm, its
    keys and gates are copied too; a key for the whole image is new, orthogonal to what the earlier ones started as."""

    def __init__(self, model: ViT, per_norm: bool, seed: int) -> None:
        super().__init__()
        self.per_norm, self.seed = per_norm, seed
        self.norms: list[Any] = [norm for block in model.blocks for norm in (block.norm1, block.norm2)]
        self.norms.append(model.norm)
        count, width = len(self.norms), model.num_features
        self.sets = PerTask(lambda: NormSet(count, width, per_norm))

    @torch.no_grad()
    def add(self) -> None:
        """Starts the set of a new task."""
        task, new = len(self.sets), self.sets.add()
        generator, width = torch.Generator().manual_seed(self.seed), new.weight.shape[1]
        if task and self.per_norm:
            new.load_state_dict(self.sets[task - 1].state_dict())
            return
        before = self.sets[task - 1] if task else None
        for name in ("weight", "bias"):
            own = torch.stack([getattr(norm, name) for norm in self.norms])
            getattr(new, name).copy_(own if before is None else getattr(before, name))
        if self.per_norm:
            for rows in (new.keys, new.gates):
                rows.copy_(F.normalize(torch.randn(rows.shape, generator=generator), dim=1))
        else:
            draws = torch.randn(task + 1, width, generator=generator)
            rows = orthogonal_rows(draws[:0], draws) if task < width else F.normalize(draws, dim=1)
            new.keys.copy_(rows[-1:])

    def similarity(self, query: Tensor, place: int = 0) -> Tensor:
        """Cosines (b, tasks) between queries (b, c), gated if per norm, and keys."""
        sets: Any = self.sets.tasks
        keys = torch.stack([own.keys[place] for own in sets])  # (tasks, c)
        if self.per_norm:
            query = query[:, None] * torch.stack([own.gates[place] for own in sets])
        else:
            query = query[:, None]
        return F.cosine_similarity(query, keys[None], dim=2)

    def norm(self, x: Tensor, place: int, task: Tensor | int) -> Tensor:
        """One norm of tokens x with a task's scale and shift, or with each image's own (b,)."""
        sets: Any = self.sets.tasks
        if isinstance(task, int):
            return with_affine(self.norms[place], sets[task].weight[place], sets[task].bias[place])(x)
        weights, biases = (torch.stack([getattr(own, name)[place] for own in sets]) for name in ("weight", "bias"))
        return with_affine(self.norms[place], weights[task], biases[task])(x)
