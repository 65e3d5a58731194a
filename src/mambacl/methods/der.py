"""DER, Dynamically Expandable Representation (Yan et al., CVPR 2021; not Dark Experience Replay): each task adds a copy
of what trains in the backbone; the features of all copies, side by side, go to one linear layer.

A copy starts from the one before, which then stays. An auxiliary head tells the new classes from each other and from
all old ones, on the newest feature alone. A reference: it stores training images of earlier tasks. As many forward
passes per image as tasks so far, in training and at test. The paper's masks and its second, balanced training of the
classifier are left out, as in the toolboxes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.classifiers.base import Classifier, TaskHeads
from mambacl.classifiers.exemplars import MemoryOptions
from mambacl.classifiers.joint import WideningHeads
from mambacl.methods.base import Task
from mambacl.methods.fine_tuned import FineTuned, FineTunedOptions
from mambacl.methods.registry import METHODS
from mambacl.methods.rehearsing import Rehearsing
from mambacl.ops.precision import at_least_float32, full_precision
from mambacl.tuning import Tuning
from mambacl.tuning.snapshots import output_with, snapshot

AUXILIARY, COPY = "auxiliary.", "copy/"


@dataclass(frozen=True)
class DEROptions(MemoryOptions, FineTunedOptions):
    """Options of DER."""

    variant: Literal["paper", "public-code"] = "paper"
    """paper: the head stays as it was trained; public-code: when a task ends, the new classes' weights are scaled to
    the mean norm of the old ones, as in PyCIL"""


class DER(Rehearsing, FineTuned):
    name = "der"
    summary = "stores images; one copy of the trained parameters per task, all features joined (DER)"
    options_class: ClassVar[type] = DEROptions
    stores_images: ClassVar[bool] = True
    answers_from_statistics = False

    def make_tuning(self) -> Tuning:
        self.copies: list[dict[str, Tensor]] = []  # of earlier tasks
        self.auxiliary: nn.Linear | None = None
        return super().make_tuning()

    def make_heads(self) -> TaskHeads:
        return WideningHeads(self.num_features)

    def make_classifier(self) -> Classifier:
        super().make_classifier()  # refuses what does not fit
        return self.make_heads()

    def start_task(self, task: Task) -> None:
        if task.index > len(self.copies):
            self.copies.append(snapshot(self.tuning.trained()))
        assert isinstance(self.heads, WideningHeads)
        self.heads.widen(self.num_features * (task.index + 1), task.seed + 1)
        super().start_task(task)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(task.seed ^ 1)
            self._set_auxiliary(task.classes + 1)

    def _set_auxiliary(self, classes: int) -> None:
        like = next(self.model.parameters())
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.auxiliary = nn.Linear(self.num_features, classes).to(like.device, dtype)

    def named_parameters(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        roles = super().named_parameters()
        assert self.auxiliary is not None
        roles["classifier"] += [(AUXILIARY + name, p) for name, p in self.auxiliary.named_parameters()]
        return roles

    def features(self, images: Tensor) -> Tensor:
        """Of the copies of earlier tasks, then of the current one: (b, tasks * d)."""
        earlier = [output_with(self.model, values, images) for values in self.copies[: self.task]]
        return torch.cat((*earlier, self.model(images)), dim=1)

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss, own, correct = self.losses(images, labels)
        return loss + own, correct

    def losses(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | float, Tensor]:
        """Over all classes; of the auxiliary head, for which old classes are 0; and the number of correct images."""
        features = self.features(images)
        loss, correct = self.classify(self.heads.scores(features), labels, 0)
        if not self.task:
            return loss, 0.0, correct
        assert self.auxiliary is not None
        with full_precision(features):
            logits = self.auxiliary(at_least_float32(features[:, -self.num_features :]))
        return loss, F.cross_entropy(logits, (labels - self.known + 1).clamp(min=0)), correct

    @torch.no_grad()
    def finish_task(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        if self.task and self.options.variant == "public-code":
            *old, new = [head.weight for head in self.heads.heads]
            new *= torch.cat(old).norm(dim=1).mean() / new.norm(dim=1).mean()  # type: ignore[arg-type, operator]
        return super().finish_task(batches)

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

    def task_state_dict(self) -> dict[str, Tensor]:
        """The current copy is that of an earlier task for the next one."""
        copies = [*self.copies[: self.task], {name: p.detach() for name, p in self.tuning.trained()}]
        own = {f"{COPY}{task}/{name}": tensor for task, values in enumerate(copies) for name, tensor in values.items()}
        return {**super().task_state_dict(), **own}

    def load_task_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_task_state_dict(state)
        self.copies = []
        for path, tensor in state.items():
            if path.startswith(COPY):
                task, name = path.removeprefix(COPY).split("/", 1)
                self.copies += [{} for _ in range(len(self.copies), int(task) + 1)]
                self.copies[int(task)][name] = tensor.to(self.device)

    def for_answers(
        self, state: Mapping[str, Tensor], task_state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """All but the auxiliary head and the copy that the model itself has."""
        state, task_state = super().for_answers(state, task_state)
        current = f"{COPY}{sum(name.endswith('.weight') and name.startswith('heads.') for name in state) - 1}/"
        kept = {name: tensor for name, tensor in task_state.items() if not name.startswith(current)}
        return {name: tensor for name, tensor in state.items() if not name.startswith(AUXILIARY)}, kept


METHODS.add(DER.name, DER)
