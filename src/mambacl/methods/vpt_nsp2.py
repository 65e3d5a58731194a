"""VPT-NSP2 (Lu et al., *Visual Prompt Tuning in Null Space for Continual Learning*, NeurIPS 2024): one set of prompt
tokens in every block, each update projected so that attention on earlier tasks' images hardly changes.

The finished Adam update of a block's prompts is multiplied from both sides (`nullspace/prompts.py`). A loss keeps the
mean and the deviation of each prompt, which enter through the norm. One forward pass per image.

Its recipe: Adam, rate 0.01 for everything, weight decay 5e-5, batches of 256, 100 passes, 10 at a time; rates times 0.1
after 50 and 80 (public code: 40 and 70, and `heads: warm-second`).
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mambacl.methods.base import Method
from mambacl.methods.registry import METHODS
from mambacl.nullspace.prompts import PromptSpace, attention_on_last, key_rows
from mambacl.options import Must, Options, at_least
from mambacl.tuning import AddedModules, Tuning
from mambacl.tuning.passes import BlockInput, Change, check_length, run_blocks, with_attention
from mambacl.tuning.token_prompts import TokenPrompts

SPACE = "space/"  # prefix of the null spaces in a task's state
BEFORE = "before"  # name of the prompts as the last task has left them
Eta = Annotated[float, Must("be from 0 to 1", lambda eta: 0 <= eta <= 1)]


@dataclass(frozen=True)
class VptNsp2Options(Options):
    """Options of VPT-NSP2."""

    variant: Literal["paper", "public-code"] = "paper"
    """paper: all images of earlier tasks count alike; public-code: their batches do, also a smaller last one"""
    length: Annotated[int, at_least(1)] = 4
    """prompt tokens in each block"""
    eta_rows: Eta = 0.95
    """strength of the projection by q W_k: 0.97 for CIFAR-100 in 10 tasks, 0.95 in 20, 0.94 for ImageNet-R, 0.95 for
    DomainNet"""
    eta_attention: Eta = 0.95
    """strength of the projection by attention: the same values"""
    temperature: Annotated[float, Must("be positive and finite", lambda t: 0 < t < float("inf"))] = 30.0
    """divides the logits in training: 28 for CIFAR-100 in 10 tasks, 25 in 20, 30 otherwise"""


class VptNsp2(Method):
    name = "vpt-nsp2"
    summary = "prompt tokens in every block, updated in the null space of earlier attention (VPT-NSP2)"
    options_class: ClassVar[type] = VptNsp2Options
    needs_attention: ClassVar[bool] = True

    def make_tuning(self) -> Tuning:
        options: VptNsp2Options = self.options
        depth = len(with_attention(self.model, self.name).blocks)
        check_length(self.model, options.length, "vpt-nsp2: options.length")
        blocks = range(depth)
        self.prompts = TokenPrompts(self.model, blocks, options.length, self.setup.seed, kept="attention", at="end")
        tuning = AddedModules(self.model, prompts=self.prompts)
        etas = {"rows": options.eta_rows, "attention": options.eta_attention}
        self.space = PromptSpace(self.prompts.values, etas)
        self.before: Tensor | None = None
        """the prompts as the last task has left them"""
        return tuning

    def prompted(self, images: Tensor, seen: dict[int, tuple[Tensor, Tensor]] | None = None) -> Tensor:
        """The feature (b, d). `seen` gets each block's queries of image tokens (b, heads, l, d) and attention on its
        prompts (b, heads, l, n)."""

        def change(block: BlockInput) -> Change:
            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                assert seen is not None
                image = q[:, :, : q.shape[2] - self.options.length]
                seen[block.index] = image, attention_on_last(image, k, self.options.length)
                return F.scaled_dot_product_attention(q, k, v)

            return Change(self.prompts.tokens(block.index), attend=None if seen is None else attend)

        return run_blocks(self.model, images, change).feature()

    def features(self, images: Tensor) -> Tensor:
        return self.prompted(images)

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.heads.task_logits(self.features(images))
        labels = labels - (self.heads.classes - logits.shape[1])
        loss = F.cross_entropy(logits / self.options.temperature, labels)
        if self.before is not None:
            loss = loss + moved(self.prompts.values, self.before)
        return loss, (logits.argmax(1) == labels).sum()

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        self.space.wrap(optimizer)
        return optimizer

    @torch.no_grad()
    def finish_task(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        started, vit = time.perf_counter(), with_attention(self.model, self.name)
        for images, _ in batches:
            seen: dict[int, tuple[Tensor, Tensor]] = {}
            self.prompted(images.to(self.device), seen)
            rows = [key_rows(block.attn, seen[index][0]) for index, block in enumerate(vit.blocks)]
            attention = [seen[index][1] for index in range(len(rows))]
            self.space.add(rows, attention, mean=self.options.variant == "public-code")
        gathered = time.perf_counter()
        self.space.project()
        self.before = self.prompts.values.detach().clone()
        return {"covariance": gathered - started, "decomposition": time.perf_counter() - gathered}

    def free(self) -> dict[str, float]:
        named = {f"{name}.{b}": one for name, own in self.space.spaces.items() for b, one in enumerate(own)}
        return {name: one.rank / one.spectrum.numel() for name, one in named.items()}

    def task_state_dict(self) -> dict[str, Tensor]:
        own = {} if self.before is None else {**self.space.statistics, BEFORE: self.before}
        return {**super().task_state_dict(), **{SPACE + name: tensor for name, tensor in own.items()}}

    def load_task_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_task_state_dict(state)
        if own := {name.removeprefix(SPACE): t for name, t in state.items() if name.startswith(SPACE)}:
            self.before = own.pop(BEFORE).to(self.device)
            self.space.load(own)

    def for_answers(
        self, state: Mapping[str, Tensor], task_state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """All but the null spaces."""
        state, task_state = super().for_answers(state, task_state)
        return state, {name: tensor for name, tensor in task_state.items() if not name.startswith(SPACE)}


def moved(prompts: Tensor, before: Tensor) -> Tensor:
    """The sum over blocks of the mean change of the prompts' (blocks, n, c) means and deviations over channels."""
    means = (prompts.mean(2) - before.mean(2)).abs()
    deviations = (prompts.std(2, correction=0) - before.std(2, correction=0)).abs()
    return (means + deviations).mean(1).sum()


METHODS.add(VptNsp2.name, VptNsp2)
