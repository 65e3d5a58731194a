"""ESN, Isolation and Impartial Aggregation (Wang et al., AAAI 2023): a class-attention block and head for each task.

One prompt serves all tasks, and every task's block reads the same tokens: one forward pass per image. The loss draws
each head's energy to one anchor, so that at test the head with the largest energy has the image's task. Several
temperatures vote; after each task the one joins that finds most of its training images.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from mambacl.backbones.vit import ViT
from mambacl.errors import UserError
from mambacl.methods.base import Method, Task
from mambacl.methods.registry import METHODS
from mambacl.ops.precision import at_least_float32, full_precision
from mambacl.options import Options, at_least, finite_from
from mambacl.tuning import AddedModules, Tuning
from mambacl.tuning.class_attention import ClassAttention
from mambacl.tuning.passes import BlockInput, Change, check_length, run_blocks
from mambacl.tuning.per_task import PerTask
from mambacl.tuning.token_prompts import TokenPrompts

TEMPERATURES = [0.001, 0.01, *(step / 10 for step in range(1, 11))]


@dataclass(frozen=True)
class ESNOptions(Options):
    """Options of ESN."""

    variant: Literal["paper", "public-code"] = "paper"
    """paper: the prompt trains in the first task only, and the loss has the energy -logsumexp(logits), as at test;
    public-code: the prompt keeps training, and the energy in the loss is -logsumexp(-logits)"""
    length: Annotated[int, at_least(1)] = 100
    """prompt tokens"""
    anchor: float = -10.0
    """the energy that every head is drawn to"""
    energy: Annotated[float, finite_from(0)] = 0.1
    """weight of the squared distance from the anchor"""


class Voters(nn.Module):
    """Which of the temperatures vote (1) or not (0)."""

    chosen: Tensor

    def __init__(self) -> None:
        super().__init__()
        first = torch.tensor([float(i == 0) for i in range(len(TEMPERATURES))])  # there is nothing to compare with yet
        self.register_buffer("chosen", first)


class ESN(Method):
    name = "esn"
    summary = "a class-attention block and a head per task, compared by their energies (ESN)"
    options_class: ClassVar[type] = ESNOptions
    own_answer: ClassVar[bool] = True

    def make_tuning(self) -> Tuning:
        if self.setup.known_classifier is not None:
            raise UserError("esn has features of its own for each task: set known_classes to false.")
        check_length(self.model, self.options.length, "esn: options.length")
        bound = self.num_features**-0.5
        self.prompt = TokenPrompts(self.model, [0], self.options.length, self.setup.seed, -bound, bound, kept="always")
        width = self.num_features
        heads = self.model.config.num_heads if isinstance(self.model, ViT) else width // 64 if width % 64 == 0 else 1
        self.blocks = PerTask(lambda: ClassAttention(width, heads, 0.5))
        self.voters = Voters()
        self.added = AddedModules(self.model, prompt=self.prompt, blocks=self.blocks, voters=self.voters)
        return self.added

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        token: Tensor = self.model.cls_token.detach().flatten()  # type: ignore[operator]
        self.blocks.add().reset(torch.Generator().manual_seed(task.seed ^ 1), token)

    def named_parameters(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        trains = self.task == 0 or self.options.variant == "public-code"
        self.prompt.requires_grad_(trains)
        self.added.trains = lambda name: trains or not name.startswith("prompt.")
        return super().named_parameters()

    def tokens(self, images: Tensor) -> Tensor:
        """All tokens before the last norm."""

        def change(block: BlockInput) -> Change | None:
            tokens = self.prompt.tokens(block.index)
            return None if tokens is None else Change(tokens=tokens)

        return run_blocks(self.model, images, change).tokens

    def features(self, images: Tensor) -> Tensor:
        return self.blocks[self.task](self.tokens(images))

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.heads.task_logits(features := self.features(images))
        loss, correct = self.task_loss(features, labels)
        energy = -logits.logsumexp(1) if self.options.variant == "paper" else -(-logits).logsumexp(1)
        return loss + self.options.energy * (energy - self.options.anchor).square().mean(), correct

    def logits(self, images: Tensor) -> list[Tensor]:
        """Of each task's head, on its own feature."""
        tokens = self.tokens(images)
        found = [at_least_float32(block(tokens)) for block in self.blocks.tasks]
        with full_precision(found[0]):
            return [head(feature) for head, feature in zip(self.heads.heads, found, strict=True)]

    @torch.no_grad()
    def finish_task(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Chooses the temperature that assigns most of the task's images to it; the lowest if several do."""
        started = time.perf_counter()
        if self.task > 0:
            right = torch.zeros(len(TEMPERATURES), dtype=torch.int64, device=self.device)
            for images, _ in batches:
                right += (nominated(self.logits(images.to(self.device))) == self.task).sum(0)
            self.voters.chosen[right.tolist().index(int(right.max()))] = 1
        return {"temperatures": time.perf_counter() - started}

    def predict(self, images: Tensor) -> Tensor:
        """Probabilities within each task, and 1 more for the classes of the task with most votes."""
        logits = self.logits(images)
        tasks = torch.arange(len(logits), device=images.device)
        votes = nominated(logits)[..., None] == tasks  # (b, temperatures, tasks)
        counts = (votes * self.voters.chosen[:, None]).sum(1)
        elected = (counts - tasks / (2 * len(tasks))).argmax(1)  # of equal tasks the earliest
        return torch.cat([own.softmax(1) + (elected == task)[:, None] for task, own in enumerate(logits)], dim=1)


def nominated(logits: list[Tensor]) -> Tensor:
    """For each temperature the task with the largest energy logsumexp(logits / temperature): (b, temperatures)."""
    by_temperature = [torch.stack([(own / t).logsumexp(1) for own in logits], dim=1) for t in TEMPERATURES]
    return torch.stack(by_temperature, dim=1).argmax(2)


METHODS.add(ESN.name, ESN)
