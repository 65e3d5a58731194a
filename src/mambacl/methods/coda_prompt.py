"""CODA-Prompt (Smith et al., CVPR 2023): prefix prompts that are weighted sums of components, with new ones per task.

The weights are cosines between keys and the gated query, the feature of the fixed model without prompts: two forward
passes per image. Components of earlier tasks stay in the sum and are fixed.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

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
class CodaPromptOptions(Options):
    """Options of CODA-Prompt."""

    variant: Literal["paper", "public-code"] = "paper"
    """paper: all components start orthogonal to each other, and a penalty keeps them so; public-code: those of a task
    start orthogonal to the earlier ones as they are after training, without penalty"""
    pool: Annotated[int, at_least(1)] = 100
    """components of all tasks together; each task gets an equal share"""
    length: Annotated[int, Must("be even and at least 2", lambda n: n >= 2 and n % 2 == 0)] = 8
    """rows per component: one half for keys, one for values"""
    blocks: list[int] = field(default_factory=lambda: [0, 1, 2, 3, 4])
    """blocks with prompts"""
    penalty: Annotated[float | None, finite_from(0)] = None
    """weight of the orthogonality penalty: 0.1 (paper) or 0 (public-code) if null"""


class CodaPrompt(Method):
    name = "coda-prompt"
    summary = "prefix prompts as weighted sums of components, with new ones per task (CODA-Prompt)"
    options_class: ClassVar[type] = CodaPromptOptions
    needs_attention: ClassVar[bool] = True

    def make_tuning(self) -> Tuning:
        options: CodaPromptOptions = self.options
        self.attention_heads = with_attention(self.model, self.name).config.num_heads
        if self.setup.tasks > options.pool:
            raise UserError(
                f"coda-prompt: a pool of {options.pool} components is too small for {self.setup.tasks} tasks: set "
                f"options.pool to {self.setup.tasks} or more."
            )
        blocks = checked_blocks(self.model, options.blocks, "coda-prompt: options.blocks")
        check_length(self.model, options.length // 2, "coda-prompt: half of options.length")
        self.pool = GrowingPool(blocks, options.pool, options.length, self.num_features)
        default = 0.1 if options.variant == "paper" else 0.0
        self.penalty = default if options.penalty is None else options.penalty
        return AddedModules(self.model, pool=self.pool)

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        learned = self.pool.stop - self.pool.start  # by an earlier task
        count = learned or self.options.pool // (self.setup.tasks or 10)
        self.pool.grow(count, task.seed, afresh=self.options.variant == "public-code")

    def features(self, images: Tensor) -> Tensor:
        query = frozen_query(self.model, images)

        def change(block: BlockInput) -> Change | None:
            rows = self.pool.prompt(block.index, query)
            return None if rows is None else Change(prefix=split_rows(rows, self.attention_heads))

        return run_blocks(self.model, images, change).feature()

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss, correct = super().loss(images, labels)
        return (loss + self.penalty * self.pool.penalty() if self.penalty else loss), correct


METHODS.add(CodaPrompt.name, CodaPrompt)
