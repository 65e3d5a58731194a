"""OS-Prompt and OS-Prompt++ (Kim et al., ECCV 2024): CODA-Prompt's weighted components, with one pass at test.

The query of a block is the class token that enters it, in the same prompted pass, in place of the feature of a pass
without prompts. OS-Prompt++ makes that second pass in training only: a penalty compares what both queries select.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mambacl.errors import UserError
from mambacl.methods.base import Method, Task
from mambacl.methods.registry import METHODS
from mambacl.options import Must, Options, at_least, finite_from
from mambacl.tuning import AddedModules, Tuning
from mambacl.tuning.growing_pool import GrowingPool
from mambacl.tuning.passes import BlockInput, Change, check_length, checked_blocks, run_blocks, with_attention
from mambacl.tuning.prefix_prompts import split_rows
from mambacl.tuning.query import frozen_query


@dataclass(frozen=True)
class OSPromptOptions(Options):
    """Options of OS-Prompt."""

    variant: Literal["paper", "public-code"] = "paper"
    """paper: the penalty compares the softmax of the cosines with the keys, for both queries; public-code: it compares
    the queries themselves, entry by entry"""
    reference: Annotated[float, finite_from(0)] = 1e-4
    """weight of the penalty of OS-Prompt++; 0 for OS-Prompt, whose training steps have one pass"""
    pool: Annotated[int, at_least(1)] = 100
    """components of all tasks together; each task gets an equal share"""
    length: Annotated[int, Must("be even and at least 2", lambda n: n >= 2 and n % 2 == 0)] = 8
    """rows per component: one half for keys, one for values"""
    blocks: list[int] = field(default_factory=lambda: [0, 1, 2, 3, 4])
    """blocks with prompts"""


class OSPrompt(Method):
    name = "os-prompt"
    summary = "weighted prefix prompts in a single pass, with a reference pass in training (OS-Prompt++)"
    options_class: ClassVar[type] = OSPromptOptions
    needs_attention: ClassVar[bool] = True

    def make_tuning(self) -> Tuning:
        options: OSPromptOptions = self.options
        self.attention_heads = with_attention(self.model, self.name).config.num_heads
        if self.setup.tasks > options.pool:
            raise UserError(
                f"os-prompt: a pool of {options.pool} components is too small for {self.setup.tasks} tasks: set "
                f"options.pool to {self.setup.tasks} or more."
            )
        blocks = checked_blocks(self.model, options.blocks, "os-prompt: options.blocks")
        check_length(self.model, options.length // 2, "os-prompt: half of options.length")
        self.pool = GrowingPool(blocks, options.pool, options.length, self.num_features, gates=False)
        return AddedModules(self.model, pool=self.pool)

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        learned = self.pool.stop - self.pool.start  # by an earlier task
        self.pool.grow(learned or self.options.pool // (self.setup.tasks or 10), task.seed)

    def prompted(self, images: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """The feature (b, d), and the query of each block with prompts."""
        queries: dict[int, Tensor] = {}

        def change(block: BlockInput) -> Change | None:
            if block.index not in self.pool.places:
                return None
            queries[block.index] = block.class_token
            rows = self.pool.prompt(block.index, block.class_token)
            assert rows is not None
            return Change(prefix=split_rows(rows, self.attention_heads))

        return run_blocks(self.model, images, change).feature(), queries

    def features(self, images: Tensor) -> Tensor:
        return self.prompted(images)[0]

    def penalty(self, queries: dict[int, Tensor], reference: Tensor) -> Tensor:
        """How far the queries of the blocks are from the reference, summed over the blocks."""
        if self.options.variant == "public-code":
            return torch.stack([F.mse_loss(query, reference) for query in queries.values()]).sum()
        apart = [
            F.softmax(self.pool.weights(block, query), dim=1) - F.softmax(self.pool.weights(block, reference), dim=1)
            for block, query in queries.items()
        ]
        return torch.stack([part.square().sum(1).mean() for part in apart]).sum()

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        feature, queries = self.prompted(images)
        loss, correct = self.task_loss(feature, labels)
        if self.options.reference:
            loss = loss + self.options.reference * self.penalty(queries, frozen_query(self.model, images))
        return loss, correct


METHODS.add(OSPrompt.name, OSPrompt)
