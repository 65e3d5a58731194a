"""C-ADA, Beyond Prompt Learning: Continual Adapter (Gao et al., ECCV 2024): adapters that grow with each task.

They stand beside attention and MLP of the first blocks; channels of earlier tasks stay and are fixed. A factor and an
offset per channel, trained in the first task, bridge the gap to the new domain. One forward pass per image.

There is no released code. The paper gives: parallel adapters that grow, fixed old weights, scale and shift, and a loss
that keeps new weights orthogonal to old ones. Chosen here: blocks 0 to 4, input after the norm, 8 channels per task,
output times 0.1, the start by QR, the squared overlap as the loss with weight 1, and one linear head per task.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from torch import Tensor, nn

from mambacl.methods.base import Method, Task
from mambacl.methods.registry import METHODS
from mambacl.options import Must, Options, at_least, finite_from
from mambacl.tuning import AddedModules, Tuning
from mambacl.tuning.growing_adapters import GrowingAdapters, ScaleShift
from mambacl.tuning.passes import BlockInput, Change, checked_blocks, run_blocks


@dataclass(frozen=True)
class CADAOptions(Options):
    """Options of C-ADA."""

    channels: Annotated[int, at_least(1)] = 8
    """channels that a task adds to each bottleneck"""
    scale: Annotated[float, Must("be positive and finite", lambda x: 0 < x < float("inf"))] = 0.1
    """factor of the adapters' output"""
    blocks: list[int] = field(default_factory=lambda: [0, 1, 2, 3, 4])
    """blocks with adapters, beside attention and beside the MLP"""
    orthogonality: Annotated[float, finite_from(0)] = 1.0
    """weight of the overlap between new and old weights in the loss"""


class CADA(Method):
    name = "c-ada"
    summary = "adapters that grow with each task, new channels orthogonal to old ones (C-ADA)"
    options_class: ClassVar[type] = CADAOptions
    needs_attention: ClassVar[bool] = True

    def make_tuning(self) -> Tuning:
        blocks = checked_blocks(self.model, self.options.blocks, "c-ada: options.blocks")
        self.at = {block: index for index, block in enumerate(blocks)}
        places = 2 * len(blocks)  # beside attention, then beside the MLP of each block
        self.adapters = GrowingAdapters(places, self.options.channels, self.num_features)
        self.bridge = ScaleShift(places, self.num_features)
        self.added = AddedModules(self.model, adapters=self.adapters, bridge=self.bridge)
        return self.added

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        self.adapters.add(task.seed)
        if task.index < self.known_tasks:  # nothing trains, and its features are those of the backbone
            nn.init.zeros_(self.adapters.shares[task.index].up)

    def named_parameters(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        trains = self.task == 0
        self.bridge.requires_grad_(trains)
        self.added.trains = lambda name: trains or not name.startswith("bridge.")
        return super().named_parameters()

    def features(self, images: Tensor) -> Tensor:
        def adapted(place: int, h: Tensor, y: Tensor) -> Tensor:
            return y + self.options.scale * self.adapters(self.bridge(h, place), place).to(y.dtype)

        def change(block: BlockInput) -> Change | None:
            if (at := self.at.get(block.index)) is None:
                return None
            return Change(
                attention=lambda x, h, y: adapted(2 * at, h, y), mlp=lambda x, h, y: adapted(2 * at + 1, h, y)
            )

        return run_blocks(self.model, images, change).feature()

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss, correct = super().loss(images, labels)
        return loss + self.options.orthogonality * self.adapters.overlap(), correct


METHODS.add(CADA.name, CADA)
