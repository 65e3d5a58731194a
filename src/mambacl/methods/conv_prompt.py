"""ConvPrompt (Roy et al., CVPR 2024): convolutions of a shared prompt, mixed by similarity, with new ones per task.

The query of a block is the class token that enters it, so an image needs one pass. The paper gives a task fewer new
generators if a text model finds its classes similar to those learned. No text model is used here: every task gets the
same number, unless you give the similarities.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from torch import Tensor, nn

from mambacl.classifiers.base import Classifier, TaskHeads
from mambacl.classifiers.normed import NormedHeads
from mambacl.errors import UserError
from mambacl.methods.base import Method, Task
from mambacl.methods.registry import METHODS
from mambacl.options import Options, at_least, finite_from
from mambacl.tuning import AddedModules, ModelParameters, Tuning
from mambacl.tuning.conv_prompts import ConvPrompts
from mambacl.tuning.passes import BlockInput, Change, check_length, checked_blocks, run_blocks, with_attention
from mambacl.tuning.together import Together


@dataclass(frozen=True)
class ConvPromptOptions(Options):
    """Options of ConvPrompt."""

    variant: Literal["paper", "public-code"] = "paper"
    """paper: the generators' keys train, the backbone is fixed; public-code: keys stay as they start, and all layer
    norms of the backbone train, after the first task with a lower rate"""
    blocks: list[int] | None = None
    """blocks with prompts; null: 0 to 6, or all if the model has fewer"""
    length: Annotated[int, at_least(1)] = 20
    """prompts, for keys and for values each"""
    kernel: Annotated[int, at_least(1)] = 17
    """rows and columns of a kernel"""
    generators: Annotated[int, at_least(1)] = 5
    """generators of the first task, and the most that a later one adds"""
    similarities: list[float] | None = None
    """for each task after the first, how similar a text model finds its classes to those learned, 0 to 1: it adds
    ceil((1 - similarity) * generators), at least 1; null: every task adds as many as the first"""
    drift: Annotated[float, finite_from(0)] = 0.01
    """weight of the absolute change of the shared prompt and the query network since the task began"""
    norm_rate: Annotated[float, finite_from(0)] = 0.005
    """public-code: factor of the learning rate of the backbone's layer norms after the first task"""


class ConvPrompt(Method):
    name = "conv-prompt"
    summary = "prefix prompts by convolutions of a shared prompt, with new ones per task (ConvPrompt)"
    options_class: ClassVar[type] = ConvPromptOptions
    needs_attention: ClassVar[bool] = True

    def make_tuning(self) -> Tuning:
        options: ConvPromptOptions = self.options
        vit = with_attention(self.model, self.name)
        default = list(range(min(7, len(vit.feature_info))))
        wanted = default if options.blocks is None else options.blocks
        blocks = checked_blocks(self.model, wanted, "conv-prompt: options.blocks")
        check_length(self.model, options.length, "conv-prompt: options.length")
        if options.similarities is not None:
            if any(not 0 <= value <= 1 for value in options.similarities):
                raise UserError(f"conv-prompt: options.similarities must be from 0 to 1, got {options.similarities}.")
            if self.setup.tasks - 1 > len(options.similarities):
                raise UserError(
                    f"conv-prompt: options.similarities has {len(options.similarities)} values for "
                    f"{self.setup.tasks - 1} tasks after the first: give one for each."
                )
        self.prompts = ConvPrompts(
            blocks, options.length, options.kernel, self.num_features, vit.config.num_heads, self.setup.seed
        )
        added = AddedModules(self.model, prompts=self.prompts)
        added.trains = self._trains
        added.fit = lambda state: self.prompts.fit({name.removeprefix("prompts."): t for name, t in state.items()})
        self.added, self.norms = added, ModelParameters(self.model, self._norms())
        return Together(added, self.norms) if self.norms.parameters else added

    def _norms(self) -> list[str]:
        """Names of the backbone's parameters that train."""
        if self.options.variant == "paper":
            return []
        norms = [name for name, module in self.model.named_modules() if isinstance(module, nn.LayerNorm)]
        return [f"{name}.{part}" for name in norms for part in ("weight", "bias")]

    def _trains(self, name: str) -> bool:
        if name.endswith(".keys") and self.options.variant == "public-code":
            return False
        current = f"prompts.generators.{len(self.prompts.generators) - 1}."
        return name.startswith(("prompts.matcher.", current)) or name == "prompts.shared"

    def make_classifier(self) -> Classifier:
        return self.make_heads() if self.setup.classifier == "auto" else super().make_classifier()

    def make_heads(self) -> TaskHeads:
        return NormedHeads(self.num_features)

    def new_generators(self, task: int) -> int:
        """How many a task adds."""
        most, similarities = self.options.generators, self.options.similarities
        if task == 0 or similarities is None:
            return int(most)
        if task > len(similarities):
            raise UserError(f"conv-prompt: options.similarities ends before task {task + 1}: give one more value.")
        return max(1, math.ceil((1 - similarities[task - 1]) * most - 1e-9))  # 1e-9: 0.4 is not exact

    def start_task(self, task: Task) -> None:
        self.prompts.remember()
        self.prompts.grow(self.new_generators(task.index), task.seed)
        self.added.place()
        super().start_task(task)

    def named_parameters(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        norms = {"norms": self.norms.trained()} if self.norms.parameters else {}
        return {"backbone": self.added.trained(), **norms, "classifier": self.heads.trained()}

    def rate_factors(self) -> dict[str, float]:
        return {"norms": self.options.norm_rate if self.task else 1.0} if self.norms.parameters else {}

    def features(self, images: Tensor) -> Tensor:
        before: list[Tensor] = []  # what the last block with prompts has generated

        def change(block: BlockInput) -> Change | None:
            if block.index not in self.prompts.places:
                return None
            before.append(self.prompts.generated(block.index, block.class_token))
            return Change(prefix=sum(before[-2:]))  # type: ignore[arg-type]

        return run_blocks(self.model, images, change).feature()

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss, correct = super().loss(images, labels)
        return (loss + self.options.drift * self.prompts.drift() if self.task else loss), correct


METHODS.add(ConvPrompt.name, ConvPrompt)
