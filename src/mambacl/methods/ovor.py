"""OVOR (Huang et al., ICLR 2024): one prefix prompt for all tasks, and heads that tell features from virtual outliers.

First the prompts and the task's head train. In the last part of a task the prompts are fixed, and the head learns to
give high energies to outliers, points far from the task's features; they are drawn anew in each epoch. One pass per
image. "OVOR-Deep" in comparisons has no definition; the paper's own prompts, in blocks 0 to 4, are taken for it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from mambacl.classifiers.outliers import around_the_boundary, around_the_origin, energies, energy_loss
from mambacl.errors import UserError
from mambacl.methods.base import Method, Phase
from mambacl.methods.registry import METHODS
from mambacl.options import Options, at_least, between, finite_from
from mambacl.tuning import AddedModules, Tuning
from mambacl.tuning.passes import BlockInput, Change, check_length, checked_blocks, run_blocks, with_attention
from mambacl.tuning.prefix_prompts import PrefixPrompts

HEAD_ONLY = Phase("outliers", roles=("classifier",))


@dataclass(frozen=True)
class OvorOptions(Options):
    """Options of OVOR."""

    variant: Literal["paper", "public-code"] = "paper"
    """paper: outliers are scattered around the features with the most distant neighbours; public-code: around the
    origin, because these features are found but not used, and each outlier is used many times"""
    first_blocks: list[int] = field(default_factory=lambda: [0, 1])
    """blocks with short prompts"""
    later_blocks: list[int] = field(default_factory=lambda: [2, 3, 4])
    """blocks with long prompts"""
    first_length: Annotated[int, at_least(1)] = 5
    """length of short prompts, for keys and for values each"""
    later_length: Annotated[int, at_least(1)] = 20
    """length of long prompts, for keys and for values each"""
    outlier_share: Annotated[float, between(0, 1)] = 0.2
    """share of a task's epochs, the last ones, in which only the head trains, with outliers"""
    weight: Annotated[float, finite_from(0)] = 0.1
    """weight of the loss of energies"""
    most: float = -15.0
    """energies of features should not be above it"""
    least: float = -3.0
    """energies of outliers should not be below it"""
    neighbour: Annotated[int, at_least(1)] = 50
    """the distance to this neighbour says how far a point is from the features"""
    boundary: Annotated[int, at_least(1)] = 50
    """features that outliers are scattered around"""
    offsets: Annotated[int, at_least(1)] = 600
    """random offsets"""
    deviation: Annotated[float, finite_from(0)] = 0.1
    """standard deviation of the offsets"""
    per_class: Annotated[int, at_least(1)] = 40
    """outliers per class of the task"""


class Ovor(Method):
    name = "ovor"
    summary = "one prefix prompt for all tasks, heads trained against virtual outliers (OVOR)"
    options_class: ClassVar[type] = OvorOptions
    splits = False  # outliers join each batch
    needs_attention: ClassVar[bool] = True

    def make_tuning(self) -> Tuning:
        options: OvorOptions = self.options
        heads = with_attention(self.model, self.name).config.num_heads
        parts, taken = {}, set[int]()
        for index, name in enumerate(("first", "later")):
            length = getattr(options, f"{name}_length")
            blocks = checked_blocks(self.model, getattr(options, f"{name}_blocks"), f"ovor: options.{name}_blocks")
            check_length(self.model, length, f"ovor: options.{name}_length")
            if both := taken & set(blocks):
                raise UserError(f"ovor: block {min(both)} is in options.first_blocks and options.later_blocks.")
            taken |= set(blocks)
            seed = self.setup.seed + index
            parts[name] = PrefixPrompts(blocks, length, self.num_features, heads, seed, low=0.0)
        self.parts: dict[str, PrefixPrompts] = parts
        self.outliers = torch.empty(0)  # (batches, n, d) of the current epoch
        self.step = torch.zeros(1, dtype=torch.int64, device=self.device)
        return AddedModules(self.model, **parts)

    def features(self, images: Tensor) -> Tensor:
        def change(block: BlockInput) -> Change | None:
            found = [prefix for part in self.parts.values() if (prefix := part.prefix(block.index)) is not None]
            return Change(prefix=found[0]) if found else None

        return run_blocks(self.model, images, change).feature()

    def phase(self, epoch: int, epochs: int) -> Phase:
        return HEAD_ONLY if epoch >= epochs - round(self.options.outlier_share * epochs) else Phase()

    def draw_offsets(self, epoch: int) -> Tensor:
        """Standard normal, (offsets, d)."""
        seed = np.random.SeedSequence([self.setup.seed, self.task, epoch]).generate_state(1)[0]
        generator = torch.Generator().manual_seed(int(seed))
        return torch.randn(self.options.offsets, self.num_features, generator=generator)

    @torch.no_grad()
    def start_epoch(self, epoch: int, batches: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> None:
        """Finds the outliers of an epoch, an equal number for each of its batches."""
        if self.current != HEAD_ONLY:
            return
        options: OvorOptions = self.options
        found = [self.features(images.to(self.device)) for images, _ in batches()]
        features = torch.cat(found).to(self.heads.heads[-1].weight)  # type: ignore[arg-type]
        offsets = options.deviation * self.draw_offsets(epoch).to(features)
        draw = around_the_boundary if options.variant == "paper" else around_the_origin
        count = options.per_class * self.heads.widths[-1]
        drawn = draw(features, offsets, options.neighbour, options.boundary, count)
        each = max(1, len(drawn) // len(found))
        drawn = drawn[torch.arange(each * len(found), device=drawn.device) % len(drawn)].unflatten(0, (-1, each))
        self.step.zero_()
        if self.outliers.shape == drawn.shape:
            self.outliers.copy_(drawn)  # a recorded step reads the same memory in every epoch
        else:
            self.outliers = drawn

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if self.current != HEAD_ONLY:
            return super().loss(images, labels)
        with torch.no_grad():
            features = self.features(images)
        loss, correct = self.task_loss(features, labels)
        outliers = self.outliers.index_select(0, self.step % len(self.outliers))[0]
        self.step += 1
        inside, outside = (energies(self.heads.task_logits(points)) for points in (features, outliers))
        return loss + self.options.weight * energy_loss(inside, outside, self.options.most, self.options.least), correct


METHODS.add(Ovor.name, Ovor)
