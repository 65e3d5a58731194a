"""EvoPrompt (Kurniawan et al., *Evolving Parameterized Prompt Memory for Continual Learning*, AAAI 2024): a small
network per block makes prompt tokens of the query; when a task ends, its weights are aligned with those before the task
by optimal transport and averaged with them.

The query is the fixed model's class token before the last norm. Prompts stand in front of the sequence and stay in it.
A weight moves by half of its change, more where the task uses its unit more than earlier tasks did. New classes start
from earlier classes' rows, by the similarity of their mean features. Two forward passes per image.

Its recipe: Adam, rate 0.005 for everything, no decay, constant, clip 1, batches of 64; 20 passes for CIFAR-100, 50 for
ImageNet-R. Different here: transport plans have an entropy of 0.01, the released code solves the linear program; means
of new classes are of augmented images.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from mambacl.classifiers.composition import ClassMeans, composed
from mambacl.errors import UserError
from mambacl.methods.base import Method
from mambacl.methods.registry import METHODS
from mambacl.options import Must, Options, at_least
from mambacl.tuning import AddedModules, Tuning
from mambacl.tuning.passes import Change, Tokens, check_length, run_blocks, with_class_token
from mambacl.tuning.prompt_mlp import PromptMLP
from mambacl.tuning.query import frozen_query
from mambacl.tuning.token_prompts import place_of_prompts
from mambacl.tuning.transport import alignment

MEMORY = "memory/"  # prefix of what the next task needs in a task's state
Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class EvoPromptOptions(Options):
    """Options of EvoPrompt."""

    length: Annotated[int, at_least(1)] = 5
    """prompt tokens that join in each block"""
    hidden: Annotated[int, at_least(1)] = 16
    """hidden units of each block's network"""
    fusion: Annotated[float, Must("be from 0 to 1", lambda share: 0 <= share <= 1)] = 0.5
    """share of a task's change that is kept"""
    slice_size: Annotated[int, at_least(1)] = 4
    """channels that are compared together when new classes start"""
    temperature: Annotated[float, Must("be positive and finite", lambda t: 0 < t < float("inf"))] = 0.05
    """of the similarities with earlier classes"""


class EvoPrompt(Method):
    name = "evoprompt"
    summary = "prompts from a small network per block, aligned and averaged after each task (EvoPrompt)"
    options_class: ClassVar[type] = EvoPromptOptions

    def make_tuning(self) -> Tuning:
        options: EvoPromptOptions = self.options
        depth = len(with_class_token(self.model).feature_info)
        check_length(self.model, depth * options.length, "evoprompt: options.length times the blocks")
        if self.num_features % options.slice_size:
            raise UserError(f"evoprompt: options.slice_size must divide the model's {self.num_features} channels.")
        self.mlp = PromptMLP(depth, options.length, self.num_features, options.hidden, self.setup.seed)
        self.memory: dict[str, Tensor] = {}
        """when a task has ended: weights `first`, `second`; use of units `hidden`, `output`; `means` of classes"""
        return AddedModules(self.model, mlp=self.mlp)

    def features(self, images: Tensor) -> Tensor:
        prompts = self.mlp.prompts(frozen_query(self.model, images, normed=False))
        place = place_of_prompts(self.model)
        at = 0 if isinstance(place, int) else place
        return run_blocks(self.model, images, lambda block: Change(Tokens(prompts[block.index], at))).feature()

    def new_means(self) -> ClassMeans:
        count = self.heads.widths[-1]
        return ClassMeans(self.heads.classes - count, count, self.num_features, self.device)

    @torch.no_grad()
    def start_epoch(self, epoch: int, batches: Callable[[], Batches]) -> None:
        """Starts the head of a new task from the earlier heads' rows."""
        weights: list[Tensor] = [head.weight for head in self.heads.heads]  # type: ignore[misc]
        if epoch or not self.memory or any(weight.shape[1] != self.num_features for weight in weights):
            return
        means = self.new_means()
        for images, labels in batches():
            means.add(frozen_query(self.model, images.to(self.device)), labels.to(self.device))
        earlier, options = torch.cat(weights[:-1]), self.options
        rows = composed(means.means(), self.memory["means"], earlier, options.slice_size, options.temperature)
        weights[-1].copy_(rows)

    @torch.no_grad()
    def finish_task(self, batches: Batches) -> dict[str, float]:
        use = {
            "hidden": torch.zeros_like(self.mlp.first[:, :, 0]),
            "output": torch.zeros_like(self.mlp.second[:, :, 0]),
        }
        means, right = self.new_means(), use["hidden"].new_zeros(())
        for images, labels in batches:
            images, labels = images.to(self.device), labels.to(self.device)
            fixed = run_blocks(self.model, images)
            means.add(fixed.feature(), labels)
            chosen = (self.heads(self.features(images)).argmax(1) == labels).to(right)
            right += chosen.sum()
            for total, unit in zip(use.values(), self.mlp.units(fixed.feature(normed=False)), strict=True):
                total += (unit.relu() * chosen[:, None]).sum(1)
        use, found = {name: total / right.clamp(min=1) for name, total in use.items()}, means.means()
        if self.memory:
            self.fuse(use)
            use = {name: torch.maximum(self.memory[name], own) for name, own in use.items()}
            found = torch.cat((self.memory["means"], found))
        weights = {name: weight.detach().clone() for name, weight in self.mlp.named_parameters()}
        self.memory = {**weights, **use, "means": found}
        return {}

    @torch.no_grad()
    def fuse(self, use: dict[str, Tensor]) -> None:
        """Aligns weights and their use with those before the task, in place, and moves between the two."""
        for block, (first, second) in enumerate(zip(self.mlp.first.detach(), self.mlp.second.detach(), strict=True)):
            old = {name: self.memory[name][block] for name in ("first", "second", "hidden", "output")}
            T1 = alignment(first, old["first"])
            T2 = alignment(second @ T1, old["second"])
            aligned = {"first": T1.T @ first, "second": T2.T @ second @ T1}
            for name, unit, T in (("first", "hidden", T1), ("second", "output", T2)):
                use[unit][block] = T.T @ use[unit][block]
                share = self.options.fusion * (1 + scaled(use[unit][block]) - scaled(old[unit]))
                moved = old[name] + share[:, None] * (aligned[name] - old[name])
                getattr(self.mlp, name)[block].copy_(moved)

    def task_state_dict(self) -> dict[str, Tensor]:
        return {**super().task_state_dict(), **{MEMORY + name: tensor for name, tensor in self.memory.items()}}

    def load_task_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_task_state_dict(state)
        own = {name: tensor for name, tensor in state.items() if name.startswith(MEMORY)}
        self.memory = {name.removeprefix(MEMORY): tensor.to(self.device) for name, tensor in own.items()}

    def for_answers(
        self, state: Mapping[str, Tensor], task_state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        state, task_state = super().for_answers(state, task_state)
        return state, {name: tensor for name, tensor in task_state.items() if not name.startswith(MEMORY)}


def scaled(values: Tensor) -> Tensor:
    """From 0 for the smallest to 1 for the largest."""
    return (values - values.min()) / (values.max() - values.min()).clamp(min=1e-9)


METHODS.add(EvoPrompt.name, EvoPrompt)
