"""DualPrompt (Wang et al., ECCV 2022): prompts shared by all tasks in the first blocks, one task's prompts after them.

Both stand in front of keys and values. In training an image gets its task's prompts; at test those whose key is nearest
to its query, the feature of the fixed model without prompts. Two forward passes per image.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from mambacl.errors import UserError
from mambacl.methods.base import Method, Task
from mambacl.methods.registry import METHODS
from mambacl.options import Options, at_least, finite_from
from mambacl.tuning import AddedModules, Tuning
from mambacl.tuning.passes import BlockInput, Change, check_length, checked_blocks, run_blocks, with_attention
from mambacl.tuning.prefix_prompts import PrefixPrompts
from mambacl.tuning.prompt_pool import PromptPool, cosines, majority, nearest
from mambacl.tuning.query import frozen_query


@dataclass(frozen=True)
class DualPromptOptions(Options):
    """Options of DualPrompt."""

    variant: Literal["paper", "public-code", "coda"] = "paper"
    """paper: as the authors' JAX code, but only keys of tasks learned so far are candidates; public-code: the PyTorch
    port, which confuses keys with values and images with each other, so that answers depend on the batch; coda: the
    version in CODA-Prompt's code, with keys for each block, a pull term summed over the batch, and prompts that do not
    start from the previous task's"""
    shared_blocks: list[int] = field(default_factory=lambda: [0, 1])
    """blocks with the prompts of all tasks"""
    task_blocks: list[int] = field(default_factory=lambda: [2, 3, 4])
    """blocks with the prompts of one task"""
    shared_length: Annotated[int, at_least(1)] = 5
    """prompts of all tasks, for keys and for values each"""
    task_length: Annotated[int, at_least(1)] = 20
    """prompts of one task, for keys and for values each: 5 for CIFAR-100 in the PyTorch port"""
    pool: Annotated[int, at_least(1)] = 10
    """tasks that there is room for"""
    pull: Annotated[float, finite_from(0)] = 1.0
    """weight of the cosines between queries and the task's key in the loss"""
    by_majority: bool = False
    """at test, use the prompts that most images of a batch select for all of them, as the published CIFAR-100 figures
    do; answers then depend on which images are asked about together"""


class DualPrompt(Method):
    name = "dualprompt"
    summary = "prefix prompts, shared and per task, selected by keys (DualPrompt)"
    options_class: ClassVar[type] = DualPromptOptions
    needs_attention: ClassVar[bool] = True

    def make_tuning(self) -> Tuning:
        options: DualPromptOptions = self.options
        heads = with_attention(self.model, self.name).config.num_heads
        if self.setup.tasks > options.pool:
            raise UserError(
                f"{self.name}: a pool of {options.pool} is too small for {self.setup.tasks} tasks: set options.pool to "
                f"{self.setup.tasks} or more."
            )
        shared = checked_blocks(self.model, options.shared_blocks, f"{self.name}: options.shared_blocks")
        own = checked_blocks(self.model, options.task_blocks, f"{self.name}: options.task_blocks")
        if both := set(shared) & set(own):
            raise UserError(f"{self.name}: block {min(both)} is in options.shared_blocks and options.task_blocks.")
        for name in ("shared_length", "task_length"):
            check_length(self.model, getattr(options, name), f"{self.name}: options.{name}")
        width, seed = self.num_features, self.setup.seed
        self.splits &= options.variant == "paper"  # others sum over images, or mix their prompts
        low = 0.0 if options.variant == "coda" else -1.0
        self.shared = PrefixPrompts(shared, options.shared_length, width, heads, seed, low)
        # One pool for all blocks, or one per block with keys of its own.
        groups = [[block] for block in own] if options.variant == "coda" else [own]
        shape = (2, options.task_length, heads, width // heads)
        pools = [PromptPool(options.pool, width, (len(g), *shape), seed + 1 + i, low) for i, g in enumerate(groups)]
        self.pools, self.groups = nn.ModuleList(pools), groups
        return AddedModules(self.model, shared=self.shared, pools=self.pools)

    def start_task(self, task: Task) -> None:
        if task.index >= self.options.pool:
            raise UserError(
                f"{self.name}: the pool has room for {self.options.pool} tasks: train with a larger options.pool."
            )
        super().start_task(task)
        if task.index and self.options.variant != "coda":
            for pool in self.pools:
                pool.copy(task.index - 1, task.index)  # type: ignore[operator]

    def prompted(self, images: Tensor, task: int | None = None) -> tuple[Tensor, Tensor]:
        """The feature (b, d) with the prompts of a task, or of the nearest key, and the term that pulls keys."""
        query, options = frozen_query(self.model, images), self.options
        prefixes: dict[int, Tensor] = {}
        pull = query.new_zeros(())
        for pool, group in zip(self.pools, self.groups, strict=True):
            assert isinstance(pool, PromptPool)
            similarity = cosines(query, pool.keys)  # (b, pool)
            if task is None:
                candidates = self.task + 1 if options.variant == "paper" else options.pool
                selected = nearest(similarity[:, :candidates], 1)
                selected = majority(selected, options.pool) if options.by_majority else selected
            else:
                selected = torch.full((len(images), 1), task, device=query.device)
            near = similarity.gather(1, selected)[:, 0]
            pull = pull + ((near - 1).sum() if options.variant == "coda" else near.mean())
            prefix = pool.values[selected[:, 0]]  # (b, blocks, 2, n, heads, d)
            for place, block in enumerate(group):
                own = prefix[:, place]
                prefixes[block] = mixed(own) if options.variant == "public-code" else own

        def change(block: BlockInput) -> Change | None:
            prefix = self.shared.prefix(block.index)
            prefix = prefixes.get(block.index) if prefix is None else prefix
            return None if prefix is None else Change(prefix=prefix)

        return run_blocks(self.model, images, change).feature(), pull

    def features(self, images: Tensor) -> Tensor:
        return self.prompted(images)[0]

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        feature, pull = self.prompted(images, self.task)
        loss, correct = self.task_loss(feature, labels)
        return loss - self.options.pull * pull, correct


def mixed(prefix: Tensor) -> Tensor:
    """What the port makes of prefixes (b, 2, ...): it reshapes (2, b, ...) in memory instead of exchanging the axes."""
    return prefix.transpose(0, 1).reshape(prefix.shape)


METHODS.add(DualPrompt.name, DualPrompt)
