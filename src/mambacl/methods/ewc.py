"""EWC, Elastic Weight Consolidation (Kirkpatrick et al., PNAS 2017): moving a parameter costs as much as it matters for
earlier tasks, by the diagonal of the Fisher matrix at the end of each.

One pass per image, and one over a task's images when it ends. The options cover PyCIL, mammoth, Avalanche and FACIL.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.classifiers.base import Classifier
from mambacl.classifiers.joint import JointHeads
from mambacl.errors import UserError
from mambacl.methods.base import Phase, Task
from mambacl.methods.fine_tuned import FineTuned, FineTunedOptions
from mambacl.methods.registry import METHODS
from mambacl.ops.precision import at_least_float32, full_precision
from mambacl.options import Must, between, finite_from
from mambacl.tuning import AddedModules, Tuning
from mambacl.tuning.importance import Importance, Terms, mean_squared_gradients
from mambacl.tuning.rows_ahead import RowsAhead
from mambacl.tuning.together import Together

IMPORTANCE, AHEAD = "importance/", "prompts.ahead."


@dataclass(frozen=True)
class EWCOptions(FineTunedOptions):
    """Options of EWC. The defaults are PyCIL's."""

    strength: Annotated[float, finite_from(0)] = 1000.0
    """lambda; the penalty is lambda / 2 times the sum of F (w - w*)^2"""
    terms: Terms = "mean"
    """separate: each task keeps its F and w*; online: F <- old F + new F; mean: F <- old F + (1 - old) new F"""
    old: Annotated[float | None, between(0, 1)] = None
    """factor of the earlier F; null: 1 for online, for mean the share of classes that were known"""
    gradients: Literal["batch", "image", "weighted-image"] = "batch"
    """F is the mean squared gradient of batches (training.covariance_batch_size), or of images, which takes a backward
    for each; weighted-image: times the probability of its label"""
    labels: Literal["true", "predicted"] = "true"
    """labels of these gradients"""
    clip: Annotated[float | None, Must("be positive", lambda x: x > 0)] = 1e-4
    """largest value of a task's F; null for any"""
    over: Literal["task", "seen", "all"] = "task"
    """classes of the training loss: of the current task, of all tasks so far, or of the whole run, whose later classes
    then have weights from the start. F is over the classes so far, or over all"""


class EWC(FineTuned):
    name = "ewc"
    summary = "fine-tuning with a penalty on what matters for earlier tasks (EWC)"
    options_class: ClassVar[type] = EWCOptions

    def make_tuning(self) -> Tuning:
        self.importance = Importance()
        self.ahead: RowsAhead | None = None  # the weights of classes to come
        own = self.fine_tuned()
        if self.options.over != "all":
            return own
        self.ahead = RowsAhead(self.num_features)
        return Together(AddedModules(self.model, ahead=self.ahead), own)

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        if self.ahead is not None and task.index == 0:
            self.ahead.draw(max(0, self.setup.classes - task.classes), task.seed + 1)
        elif self.ahead is not None:
            self.ahead.give(self.heads.heads[-1])
            self._split()

    def make_classifier(self) -> Classifier:
        found = super().make_classifier()
        if self.ahead is not None and found.trains and not isinstance(found, JointHeads):
            raise UserError(f"ewc: options.over = all does not go with the classifier '{found.name}': set it to seen.")
        return found

    def _split(self) -> None:
        """Importances of rows that the current task has taken go with them."""
        for kind in ("weight", "bias") if self.ahead is not None else ():
            self.importance.split(AHEAD + kind, f"heads.{self.task}.{kind}", self.heads.widths[-1])

    def named_parameters(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        roles = super().named_parameters()
        ahead = [pair for pair in roles["backbone"] if pair[0].startswith(AHEAD)]
        own = [pair for pair in roles["backbone"] if not pair[0].startswith(AHEAD)]
        return {"backbone": own, "classifier": roles["classifier"] + ahead}

    def logits(self, images: Tensor) -> Tensor:
        """Of the classes so far, and with `over: all` of those to come."""
        features = at_least_float32(self.features(images))
        logits = self.heads.scores(features)
        if self.ahead is None:
            return logits
        with full_precision(features):
            return torch.cat((logits, self.ahead(features)), dim=1)

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss, correct = self.classify(self.logits(images), labels, self.known if self.options.over == "task" else 0)
        return loss + self.penalty(), correct

    def penalised(self) -> dict[str, nn.Parameter]:
        return {name: parameter for named in self.named_parameters().values() for name, parameter in named}

    def penalty(self) -> Tensor | float:
        return self.options.strength * self.importance.penalty(self.penalised())

    def finish_task(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        started, options = time.perf_counter(), self.options
        self.enter(Phase())  # all parameters have gradients
        parameters = self.penalised()
        fisher = mean_squared_gradients(self._losses(batches), parameters)
        fisher = {name: values.clamp(max=options.clip or torch.inf) for name, values in fisher.items()}
        default = self.known / max(1, self.heads.classes) if options.terms == "mean" else 1.0
        self.importance.add(fisher, parameters, options.terms, default if options.old is None else options.old)
        return {"importance": time.perf_counter() - started}

    def _losses(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor | float]]:
        """Of each batch or image, and the factor of its squared gradient."""
        for images, labels in batches:
            size = len(images) if self.options.gradients == "batch" else 1
            for some, own in zip(images.to(self.device).split(size), labels.to(self.device).split(size), strict=True):
                logits = self.logits(some)
                loss = F.cross_entropy(logits, own if self.options.labels == "true" else logits.argmax(1))
                yield loss, (-loss.detach()).exp() if self.options.gradients == "weighted-image" else 1.0

    def task_state_dict(self) -> dict[str, Tensor]:
        own = {IMPORTANCE + name: tensor for name, tensor in self.importance.state_dict().items()}
        return {**super().task_state_dict(), **own}

    def load_task_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_task_state_dict(state)
        own = {name.removeprefix(IMPORTANCE): t for name, t in state.items() if name.startswith(IMPORTANCE)}
        self.importance.load_state_dict(own, self.device)
        self._split()

    def for_answers(
        self, state: Mapping[str, Tensor], task_state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """All but the importances and the rows of classes to come."""
        kept = {name: tensor for name, tensor in task_state.items() if not name.startswith(IMPORTANCE)}
        state, kept = super().for_answers(state, kept)
        return {name: t[:0] if name.startswith(AHEAD) else t for name, t in state.items()}, kept


METHODS.add(EWC.name, EWC)
