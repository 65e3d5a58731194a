"""CPrompt (Gao et al., *Consistent Prompting for Rehearsal-Free Continual Learning*, CVPR 2024): prompt tokens for each
task, chosen by class keys, and heads that train with the prompts of any task.

A task's prompts join the sequence before the first block and again in the middle. Four losses: an auxiliary head on the
task's own prompts; keys, one per class, on the query, the fixed model's class token; the task's head on the prompts of
a task drawn at random for each image; and earlier heads' answers, which become smoother. Class tokens are taken before
the last norm. Three forward passes per training image (two in the first task), two per test image.

Its recipe: SGD, rate 0.01 for everything, weight decay 5e-4, cosine, batches of 16; 18 passes for CIFAR-100, 10 for
ImageNet-R, 15 for DomainNet.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.errors import UserError
from mambacl.methods.base import Method, Task
from mambacl.methods.registry import METHODS
from mambacl.ops.precision import at_least_float32, full_precision
from mambacl.options import Must, Options, at_least, finite_from
from mambacl.tuning import AddedModules, Tuning
from mambacl.tuning.draws import Draws
from mambacl.tuning.growing_rows import GrowingRows, fits_any_count
from mambacl.tuning.passes import BlockInput, Change, Tokens, check_length, run_blocks, with_class_token
from mambacl.tuning.prompt_pool import cosines
from mambacl.tuning.query import frozen_query
from mambacl.tuning.token_prompts import place_of_prompts


@dataclass(frozen=True)
class CPromptOptions(Options):
    """Options of CPrompt."""

    variant: Literal["paper", "public-code"] = "paper"
    """paper: a task starts with new keys of its classes, and those of others stay; public-code: the keys of all classes
    exist from the start, and weight decay shortens all of them in every task"""
    length: Annotated[int, at_least(1)] = 50
    """prompt tokens of a task at each of the two places"""
    second_block: Annotated[int | None, at_least(1)] = None
    """the block before which the second prompts join; null: 5, or the middle of a model with fewer than 6 blocks"""
    temperature: Annotated[float, Must("be positive and finite", lambda t: 0 < t < float("inf"))] = 1.2
    """smooths earlier heads' answers: 1.2 for CIFAR-100, 1.15 for ImageNet-R, 1.02 for DomainNet"""
    margin: Annotated[float, finite_from(0)] = 0.0
    """an earlier head is smoothed unless the current head's largest logit is larger by more than this: 0 for CIFAR-100,
    0.1 for ImageNet-R, 0.05 for DomainNet"""
    smoothing: Annotated[float, finite_from(0)] = 1.0
    """weight of the loss that smooths earlier heads' answers"""


class CPrompt(Method):
    name = "cprompt"
    summary = "prompt tokens per task, chosen by class keys; heads train with any task's (CPrompt)"
    options_class: ClassVar[type] = CPromptOptions

    def make_tuning(self) -> Tuning:
        options: CPromptOptions = self.options
        depth = len(with_class_token(self.model).feature_info)
        self.second = options.second_block or (5 if depth > 5 else depth // 2)
        if not 1 <= self.second < depth:
            raise UserError(f"{self.name}: options.second_block must be from 1 to {depth - 1}, got {self.second}.")
        if self.known_tasks:
            raise UserError(f"{self.name} learns a key for each class from its images: leave out known_classes.")
        check_length(self.model, options.length, f"{self.name}: options.length")
        width = self.num_features
        self.prompts, self.keys = GrowingRows(2, options.length, width), GrowingRows(width)
        self.aux = nn.Linear(width, 1)
        fits_any_count(self.aux)
        self.draws = Draws(self.device)
        self.owners = torch.empty(0)  # the task of each class
        return AddedModules(self.model, tasks=self.prompts, class_keys=self.keys, aux=self.aux)

    def start_task(self, task: Task) -> None:
        generator, bound = torch.Generator().manual_seed(task.seed ^ 2), self.num_features**-0.5  # as a linear layer
        first = torch.empty(1, *self.prompts.current.shape[1:]).uniform_(-bound, bound, generator=generator)
        self.prompts.start(self.prompts.current if task.index else first)
        seen, public = task.first_label + task.classes, self.options.variant == "public-code"
        new = max(seen, self.setup.classes) - len(self.keys.current) if public else task.classes
        if new > 0:
            keys = nn.init.orthogonal_(torch.empty(new, self.num_features), generator=generator)
            (self.keys.extend if public else self.keys.start)(keys)
        for name, own in list(self.aux.named_parameters()):
            values = torch.empty(task.classes, *own.shape[1:]).uniform_(-bound, bound, generator=generator)
            setattr(self.aux, name, nn.Parameter(values.to(own)))
        super().start_task(task)
        self.start_epoch(0)

    def start_epoch(self, epoch: int, batches: Callable[[], Iterable[tuple[Tensor, Tensor]]] | None = None) -> None:
        self.draws.restart(self.setup.seed, self.task, epoch)

    def prompted(self, images: Tensor, prompts: Tensor) -> Tensor:
        """The feature (b, d) with prompts (b, 2, n, d), or 1 in place of b."""
        at = place_of_prompts(self.model)
        behind = at + prompts.shape[2] if isinstance(at, int) else at
        joining = {0: Tokens(prompts[:, 0], at), self.second: Tokens(prompts[:, 1], behind)}

        def change(block: BlockInput) -> Change | None:
            return Change(joining[block.index]) if block.index in joining else None

        return run_blocks(self.model, images, change).feature(normed=False)

    def key_cosines(self, images: Tensor) -> Tensor:
        """Of queries with the keys of all classes so far; only the current task's keys get a gradient."""
        query = frozen_query(self.model, images, normed=False)
        with full_precision(query):
            keys, old = self.keys.rows()[: self.heads.classes], sum(self.heads.widths[:-1])
            return cosines(at_least_float32(query), at_least_float32(torch.cat((keys[:old].detach(), keys[old:]))))

    def features(self, images: Tensor) -> Tensor:
        if len(self.owners) != self.heads.classes:
            owners = [torch.full((classes,), task) for task, classes in enumerate(self.heads.widths)]
            self.owners = torch.cat(owners).to(self.device)
        tasks = self.owners[self.key_cosines(images).argmax(1)]
        return self.prompted(images, self.prompts.rows()[tasks])

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        own = self.prompted(images, self.prompts.current)
        tasks = self.draws.below(self.task + 1, len(images))
        drawn = self.prompted(images, self.prompts.rows()[tasks]) if self.task else own
        loss, correct = self.task_loss(drawn, labels)
        cosine = self.key_cosines(images)
        with full_precision(own):
            own = at_least_float32(own)
            own_labels = labels - sum(self.heads.widths[:-1])
            loss = loss + F.cross_entropy(self.aux(own), own_labels) + F.cross_entropy(cosine, labels)
            return (loss + self.options.smoothing * self.rough(own) if self.task else loss), correct

    def rough(self, features: Tensor) -> Tensor:
        """The mean over earlier heads of the cross-entropy between their answers and the same, smoothed."""
        *earlier, current = [head(features) for head in self.heads.heads]
        newest, losses = current.max(1, keepdim=True).values, []
        for logits in earlier:
            sure = newest > logits.max(1, keepdim=True).values + self.options.margin
            target = (logits / torch.where(sure, 1.0, self.options.temperature)).softmax(1).detach()
            losses.append(F.cross_entropy(logits, target))
        return torch.stack(losses).mean()

    def for_answers(
        self, state: Mapping[str, Tensor], task_state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """All but the auxiliary head."""
        state, task_state = super().for_answers(state, task_state)
        return {name: t[:0] if name.startswith("prompts.aux.") else t for name, t in state.items()}, task_state


METHODS.add(CPrompt.name, CPrompt)
