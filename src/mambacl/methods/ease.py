"""EASE (Zhou et al., CVPR 2024) on a Mamba backbone: a set of adapters, and so a feature space, for each task.

A task trains its own set with a cosine classifier of its own. Then each of its classes gets a prototype in every
subspace, its mean feature there; the classes of earlier tasks get one in the new subspace from those of the new
classes, by similarity. An image is classified by its cosines with the prototypes, a class's own subspace first.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.classifiers.cosine import CosineHead
from mambacl.classifiers.subspaces import class_sums, completed, completed_by_later, ensemble, weights_of_subspaces
from mambacl.errors import UserError
from mambacl.methods.base import METHODS, Method, Setup, Task
from mambacl.methods.bottleneck import AdapterOptions, AdapterSets
from mambacl.ops.precision import at_least_float32, full_precision


@dataclass(frozen=True)
class EaseOptions(AdapterOptions):
    """Options of EASE."""

    alpha: float = 0.1
    """weight of the subspaces that are not a class's own"""
    others: Literal["sum", "mean"] = "sum"
    """whether alpha counts for each of them, as in EASE's paper, or for all together, as in its public code"""
    mapped_by: Literal["new", "later"] = "new"
    """an old class's prototype in a subspace comes from the classes of that subspace's own task, once, as in EASE's
    paper; or, anew after each task, from all classes since, as in its public code (`recalc_sim`)"""
    cosine_scale: float = 1.0
    """what the classifiers' learned scale starts from; 1 in EASE's public code"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha < float("inf"):
            raise UserError(f"options.alpha must not be negative, got {self.alpha}.")
        if self.others not in ("sum", "mean"):
            raise UserError(f"options.others is 'sum' or 'mean', got {self.others!r}.")
        if self.mapped_by not in ("new", "later"):
            raise UserError(f"options.mapped_by is 'new' or 'later', got {self.mapped_by!r}.")
        if not 0 < self.cosine_scale < float("inf"):
            raise UserError(f"options.cosine_scale must be positive, got {self.cosine_scale}.")


class Ease(Method):
    name = "ease"
    summary = "adapters and prototypes for each task, joined by similarity (EASE-Mamba)"
    options_class: ClassVar[type] = EaseOptions
    recordable = True
    needs_task_state = True

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        super().__init__(model, setup)
        self.width: int = model.num_features  # type: ignore[assignment]
        self.device = next(model.parameters()).device
        model.eval().requires_grad_(False)
        self.adapters = AdapterSets(model, self.options)
        self.heads = nn.ModuleList()
        self.prototypes = torch.zeros(0, 0, self.width, device=self.device)
        """of the classes of finished tasks: see `classifiers.subspaces`"""
        self.training: dict[str, Tensor] = {}
        """of a checkpoint: the part of the task that was under way"""

    @property
    def widths(self) -> list[int]:
        return [len(head.weight) for head in self.heads]  # type: ignore[arg-type]

    def start_task(self, task: Task) -> None:
        self.adapters.add(task.seed)
        self._add_head(task.classes, task.seed)
        if task.index < self.known_tasks:  # nothing is trained: its subspace is that of the backbone
            assert self.setup.classifier is not None
            with torch.no_grad():
                self.heads[-1].weight.copy_(self.setup.classifier.weight)  # type: ignore[operator]

    def _add_head(self, classes: int, seed: int) -> None:
        self.heads.requires_grad_(False)
        self.heads.append(CosineHead(self.width, classes, seed, self.options.cosine_scale).to(self.device))

    def named_parameters(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        last = len(self.heads) - 1
        head = [(f"heads.{last}.{name}", p) for name, p in self.heads[last].named_parameters()]
        return {"backbone": self.adapters.trained(), "classifier": head}

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        self.adapters.current = len(self.adapters) - 1  # until after the backward, which may compute blocks again
        features = self.model(images)
        with full_precision(features):
            logits = self.heads[-1](at_least_float32(features))
        labels = labels - sum(self.widths[:-1])
        return F.cross_entropy(logits, labels), (logits.argmax(dim=1) == labels).sum()

    @torch.no_grad()
    def finish_task(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        started = time.perf_counter()
        widths, spaces = self.widths, range(len(self.adapters))
        first, classes = sum(widths[:-1]), widths[-1]
        sums = torch.zeros(classes, len(spaces), self.width, dtype=torch.float64, device=self.device)
        counts = torch.zeros(classes, dtype=torch.float64, device=self.device)
        for images, labels in batches:
            labels = labels.to(self.device) - first
            for k, features in enumerate(self._features(images.to(self.device))):
                of_batch, of_class = class_sums(features, labels, classes)
                sums[:, k] += of_batch
            counts += of_class
        means = (sums / counts.clamp(min=1)[:, None, None]).to(self.prototypes.dtype)
        before = F.pad(self.prototypes, (0, 0, 0, 1))  # a subspace more
        fill = completed if self.options.mapped_by == "new" else completed_by_later
        self.prototypes = fill(torch.cat((before, means)), widths)
        self.adapters.current = None  # between tasks the model is the backbone
        return {"prototypes": time.perf_counter() - started}

    def predict(self, images: Tensor) -> Tensor:
        """Before the end of a task its classes have no prototypes; its own classifier's weights stand in for them."""
        widths, done = self.widths, len(self.prototypes)
        prototypes = F.pad(self.prototypes, (0, 0, 0, len(widths) - self.prototypes.shape[1], 0, sum(widths) - done))
        first = 0
        for task, width in enumerate(widths):
            if first >= done:
                prototypes[first : first + width, task] = self.heads[task].weight.detach()  # type: ignore[operator]
            first += width
        weights = weights_of_subspaces(widths, self.options.alpha, self.options.others == "mean").to(self.device)
        features = self._features(images)
        with full_precision(prototypes):
            return ensemble(features, prototypes, weights)

    def _features(self, images: Tensor) -> list[Tensor]:
        """One (b, d) a subspace."""
        features = []
        for k in range(len(self.adapters)):
            with self.adapters.using(k):
                features.append(at_least_float32(self.model(images)))
        return features

    # What finished tasks have left never changes: it is kept once a task, and what trains each epoch.

    @property
    def finished(self) -> int:
        """Tasks with prototypes."""
        return self.prototypes.shape[1]

    def state_dict(self) -> dict[str, Tensor]:
        return {**self._state(range(self.finished, len(self.heads))), "finished": torch.tensor(self.finished)}

    def task_state_dict(self) -> dict[str, Tensor]:
        return {**self._state(range(self.finished)), "prototypes": self.prototypes}

    def _state(self, tasks: range) -> dict[str, Tensor]:
        heads = {f"heads.{i}.{name}": tensor for i in tasks for name, tensor in self.heads[i].state_dict().items()}
        return {**self.adapters.state(tasks), **heads}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.training = {name: tensor for name, tensor in state.items() if name != "finished"}
        if int(state["finished"]) == 0:  # else the other tasks' state comes first
            self._restore(self.training)

    def load_task_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.prototypes = state["prototypes"].to(self.device)
        self._restore({**state, **self.training})

    def _restore(self, state: Mapping[str, Tensor]) -> None:
        self.adapters.restore(state)
        self.heads = nn.ModuleList()
        while (weight := state.get(f"heads.{len(self.heads)}.weight")) is not None:
            self._add_head(len(weight), seed=0)
        own = {name.removeprefix("heads."): tensor for name, tensor in state.items() if name.startswith("heads.")}
        self.heads.load_state_dict(own)


METHODS.add(Ease.name, Ease)
