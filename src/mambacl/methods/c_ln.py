"""C-LN, continual LayerNorm tuning (De Min et al., ICCV Workshops 2023): each task has scales and shifts of all norms.

A task trains its own set with an auxiliary head; then its real head trains on what test-time selection makes of the
images. In two stages, a key per task selects the set by the feature of the fixed model: two passes per test image. In a
single stage every norm selects by the class token that enters it: one pass.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.methods.base import Method, Phase, Task
from mambacl.methods.registry import METHODS
from mambacl.ops.precision import at_least_float32, full_precision
from mambacl.options import Options
from mambacl.tuning import AddedModules, Tuning
from mambacl.tuning.passes import BlockInput, Change, run_blocks, with_attention
from mambacl.tuning.query import frozen_query
from mambacl.tuning.task_norms import TaskNorms

AUXILIARY = "auxiliary."


@dataclass(frozen=True)
class CLNOptions(Options):
    """Options of C-LN."""

    stages: Literal["two", "single"] = "two"
    """two: one key per task, compared with the feature of the fixed model; single: keys and gates at every norm,
    compared with the class token there"""


class CLN(Method):
    name = "c-ln"
    summary = "scales and shifts of all layer norms per task, selected by keys (C-LN)"
    options_class: ClassVar[type] = CLNOptions
    needs_attention: ClassVar[bool] = True

    def make_tuning(self) -> Tuning:
        self.two = self.options.stages == "two"
        self.norms = TaskNorms(with_attention(self.model, self.name), not self.two, self.setup.seed)
        self.auxiliary: nn.Linear | None = None
        return AddedModules(self.model, norms=self.norms)

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        self.norms.add()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(task.seed + 1)
            self._set_auxiliary(task.classes)

    def _set_auxiliary(self, classes: int) -> None:
        like = next(self.model.parameters())
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.auxiliary = nn.Linear(self.num_features, classes).to(like.device, dtype)

    def named_parameters(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        roles = super().named_parameters()
        assert self.auxiliary is not None
        roles["backbone"] += [(AUXILIARY + name, p) for name, p in self.auxiliary.named_parameters()]
        return roles

    def phase(self, epoch: int, epochs: int) -> Phase:
        """Equal shares for the keys (in two stages only), the norms and the head; fewer epochs train all at once."""
        stages = ["keys", "norms", "head"] if self.two else ["norms", "head"]
        share = epochs // len(stages)
        if not share:
            return Phase()
        stage = stages[min(epoch // share, len(stages) - 1)]
        return Phase(stage, roles=("classifier",) if stage == "head" else ("backbone",))

    def run(self, images: Tensor, task: int | None, query: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """The feature with the norms of a task, or with those that the keys select, and the cosines (b, tasks) at each
        place with keys."""
        norms, found = self.norms, []
        selected: Tensor | int | None = task
        if self.two and task is None:
            assert query is not None
            selected = norms.similarity(query).argmax(1)

        def norm(place: int) -> Callable[[Tensor], Tensor]:
            def apply(x: Tensor) -> Tensor:
                own = selected
                if not self.two:
                    found.append(norms.similarity(x[:, 0] if x.dim() == 3 else x, place))
                    own = found[-1].argmax(1) if task is None else task
                assert own is not None
                return norms.norm(x, place, own)

            return apply

        def change(block: BlockInput) -> Change:
            return Change(norm1=norm(2 * block.index), norm2=norm(2 * block.index + 1))

        return run_blocks(self.model, images, change, norm(len(norms.norms) - 1)).feature(), found

    def features(self, images: Tensor) -> Tensor:
        return self.run(images, None, frozen_query(self.model, images) if self.two else None)[0]

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        stage, loss = self.current.name, torch.zeros((), device=images.device)
        correct = torch.zeros((), dtype=torch.int64, device=images.device)
        if self.two and stage in ("", "keys"):
            cosines = self.norms.similarity(frozen_query(self.model, images))
            loss, correct = loss - cosines[:, self.task].mean(), (cosines.argmax(1) == self.task).sum()
        if stage in ("", "norms"):
            feature, cosines_by_norm = self.run(images, self.task)
            own = labels - sum(self.heads.widths[:-1])
            assert self.auxiliary is not None
            with full_precision(feature):
                logits = self.auxiliary(at_least_float32(feature))
            loss, correct = loss + F.cross_entropy(logits, own), (logits.argmax(1) == own).sum()
            if cosines_by_norm:
                loss = loss - torch.stack([found[:, self.task].mean() for found in cosines_by_norm]).mean()
        if stage in ("", "head"):
            with torch.no_grad():
                feature = self.features(images)
            of_head, correct = self.task_loss(feature, labels)
            loss = loss + of_head
        return loss, correct

    def state_dict(self) -> dict[str, Tensor]:
        own = {} if self.auxiliary is None else self.auxiliary.state_dict()
        return {**super().state_dict(), **{AUXILIARY + name: tensor for name, tensor in own.items()}}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        own = {name.removeprefix(AUXILIARY): tensor for name, tensor in state.items() if name.startswith(AUXILIARY)}
        super().load_state_dict({name: tensor for name, tensor in state.items() if not name.startswith(AUXILIARY)})
        if own:
            self._set_auxiliary(len(own["bias"]))
            assert self.auxiliary is not None
            self.auxiliary.load_state_dict(own)


METHODS.add(CLN.name, CLN)
