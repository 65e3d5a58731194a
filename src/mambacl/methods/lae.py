"""LAE, Learning-Accumulation-Ensemble (Gao et al., ICCV 2023): a small part per block learns fast, its average slowly.

The part is an adapter, LoRA on keys and values, or a prefix. The online one trains; from the second task on, an offline
one follows it as an exponential average over steps. At test both predict, and each class keeps its larger probability:
one forward pass per image in training, two at test. While a later task begins, only its head trains.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from mambacl.methods.base import Method, Phase, Task
from mambacl.methods.registry import METHODS
from mambacl.options import Options, at_least, between
from mambacl.tuning import AddedModules, Tuning
from mambacl.tuning.average import averaged_copy, follow
from mambacl.tuning.block_parts import BLOCK_PARTS
from mambacl.tuning.passes import BlockInput, Change, check_length, checked_blocks, run_blocks, with_attention

SIZES = {"adapter": 5, "lora": 5, "prefix": 10}


@dataclass(frozen=True)
class LAEOptions(Options):
    """Options of LAE."""

    part: Literal["adapter", "lora", "prefix"] = "adapter"
    """what trains in a block: an adapter beside attention, LoRA on keys and values, or rows before both"""
    size: Annotated[int | None, at_least(1)] = None
    """channels of the adapter's bottleneck (5 if null), rank of LoRA (5), rows for keys and for values each (10)"""
    blocks: list[int] = field(default_factory=lambda: [0, 1, 2, 3, 4])
    """blocks with a part"""
    decay: Annotated[float, between(0, 1)] = 0.9999
    """share of the offline part that each step keeps"""
    head_first: Annotated[float, between(0, 1)] = 0.6
    """share of a task's epochs in which only the head trains, from the second task on"""


class LAE(Method):
    name = "lae"
    summary = "an adapter, LoRA or a prefix, and its slow average, which answer together (LAE)"
    options_class: ClassVar[type] = LAEOptions
    own_answer: ClassVar[bool] = True
    needs_attention: ClassVar[bool] = True

    def make_tuning(self) -> Tuning:
        options: LAEOptions = self.options
        heads = with_attention(self.model, self.name).config.num_heads
        size = options.size or SIZES[options.part]
        if options.part == "prefix":
            check_length(self.model, size, "lae: options.size")
        generator = torch.Generator().manual_seed(self.setup.seed)
        blocks = checked_blocks(self.model, options.blocks, "lae: options.blocks")
        part = BLOCK_PARTS[options.part]
        self.online = nn.ModuleDict({str(b): part(self.num_features, size, heads, generator) for b in blocks})
        self.offline = averaged_copy(self.online)
        added = AddedModules(self.model, online=self.online, offline=self.offline)
        added.trains = lambda name: name.startswith("online.")
        return added

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        if task.index == 1:
            self.offline.load_state_dict(self.online.state_dict())

    def phase(self, epoch: int, epochs: int) -> Phase:
        waits = self.task > 0 and epoch < int(self.options.head_first * epochs + 1e-9)
        return Phase("head", roles=("classifier",)) if waits else Phase("both")

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        if self.task > 0:
            optimizer.register_step_post_hook(lambda *_: follow(self.offline, self.online, self.options.decay))
        return optimizer

    def features(self, images: Tensor) -> Tensor:
        return self.with_parts(images, self.online)

    def with_parts(self, images: Tensor, parts: nn.Module) -> Tensor:
        """The feature with the online or the offline parts."""
        found = dict(parts.named_children())

        def change(block: BlockInput) -> Change | None:
            part = found.get(str(block.index))
            return None if part is None else part.change()  # type: ignore[operator]

        return run_blocks(self.model, images, change).feature()

    def predict(self, images: Tensor) -> Tensor:
        """Probabilities; of both parts the larger one."""
        found = self.classifier.scores(self.features(images)).softmax(1)
        if self.task < 1:
            return found
        return torch.maximum(found, self.classifier.scores(self.with_parts(images, self.offline)).softmax(1))


METHODS.add(LAE.name, LAE)
