"""Mamba-FSCIL (Li et al., *Dynamic Adaptation with Selective State Space Model for Few-Shot Class-Incremental
Learning*, 2024): a Mamba neck on the backbone's feature map, trained towards the fixed vertices of a simplex.

In the first task one branch trains. Then it is fixed, and another learns all later tasks: it must say little about base
classes and read them with other dt, B and C than new ones. The mean map of each old class is kept, to train on again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.classifiers.base import Classifier
from mambacl.classifiers.etf import EtfHeads
from mambacl.classifiers.nearest_mean import NearestMean
from mambacl.errors import UserError
from mambacl.methods.base import Method, Task
from mambacl.methods.registry import METHODS
from mambacl.ops.precision import at_least_float32, full_precision
from mambacl.options import Options, at_least, between, finite_from
from mambacl.tuning import AddedModules, Tuning
from mambacl.tuning.mamba_neck import DualNeck, class_sensitive

MEMORY, VERTICES = "memory/", "vertices"  # names in a task's state
Weight = Annotated[float, finite_from(0)]


@dataclass(frozen=True)
class MambaFSCILOptions(Options):
    """Options of Mamba-FSCIL."""

    variant: Literal["paper", "public-code"] = "paper"
    """what suppression acts on: the new branch's output, or (public-code) its gates before their SiLU"""
    side: Annotated[int, at_least(1)] = 2
    """rows and columns that the backbone's map is pooled to"""
    hidden: Annotated[int, at_least(1)] | None = None
    """channels inside the neck's convolutions; twice those of the map if null"""
    states: Annotated[int, at_least(1)] = 256
    """states per channel of the neck's SSM"""
    rank: Annotated[int, at_least(1)] = 256
    """rank of its delta"""
    classes: Annotated[int, at_least(2)] | None = None
    """vertices of the simplex; the classes of the stream if null"""
    head: Weight = 10.0
    """weight of the distance from the vertices"""
    suppress: Weight = 100.0
    """weight of what the new branch says about base classes"""
    encourage: Weight = 1e-5
    """weight of what it says about other classes, which is subtracted"""
    separate: Weight = 1e-3
    """weight of the separation of dt, B and C between base classes and others"""
    balance: bool = True
    """whether all classes of a step count alike after the first task, however many of its images they have"""
    mix: Annotated[float, between(0, 1)] = 0.75
    """share of steps after the first task in which each feature is averaged with another one"""


class MambaFSCIL(Method):
    name = "mamba-fscil"
    summary = "a Mamba neck with a branch for base classes and one for new ones, towards fixed vertices (Mamba-FSCIL)"
    options_class: ClassVar[type] = MambaFSCILOptions
    splits = False  # stored maps join each batch
    own_answer: ClassVar[bool] = True
    heads: EtfHeads

    def make_tuning(self) -> Tuning:
        if self.setup.known_classifier is not None:
            raise UserError("mamba-fscil has fixed heads and features of its own: set known_classes to false.")
        if not hasattr(self.model, "forward_intermediates"):
            raise UserError(f"{type(self.model).__name__} shows no feature map, which mamba-fscil needs.")
        o, width = self.options, self.num_features
        self.memory = NearestMean(width * o.side**2).to(self.device)
        """the mean map of each old class"""
        self._read_memory()
        self.neck = DualNeck(width, o.side, o.hidden or 2 * width, o.states, o.rank, self.setup.seed)
        self.added = AddedModules(self.model, neck=self.neck)
        return self.added

    def make_classifier(self) -> Classifier:
        if self.setup.classifier != "auto" or self.reader.indices:
            raise UserError("mamba-fscil predicts by its fixed vertices: leave classifier and features.depths at auto.")
        return EtfHeads(self.num_features, self.options.classes or self.setup.classes, self.setup.seed)

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        self.heads.to(self.device, next(self.model.parameters()).dtype)

    def named_parameters(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        branch = "neck.base." if self.task == 0 else "neck.new."
        self.added.trains = lambda name: name.startswith(branch)
        return super().named_parameters()

    @torch.no_grad()
    def maps(self, images: Tensor) -> Tensor:
        """The backbone's last map, (b, c, side, side)."""
        model: Any = self.model
        [image] = model.forward_intermediates(images, 1, norm=True, intermediates_only=True)
        return F.adaptive_avg_pool2d(image, self.options.side)

    def features(self, images: Tensor) -> Tensor:
        return self.neck(self.maps(images), self.task > 0)[0]

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Old classes' maps come first, so base classes are the first rows."""
        maps, (kept, known), o = self.maps(images), self.kept_maps, self.options
        features, seen = self.neck(torch.cat((kept.to(maps.dtype), maps)), later := self.task > 0)
        features = at_least_float32(features)
        with full_precision(features):
            every = torch.cat((known, labels))
            loss = o.head * self.heads.regression(features, every, later and o.balance, o.mix * later)
            if seen is not None and len(known):
                weights = o.suppress, o.encourage, o.separate
                loss = loss + class_sensitive(seen, o.variant == "public-code", self.base_rows, *weights)
            correct = (self.heads.scores(features[len(known) :]).argmax(1) == labels).sum()
        return loss, correct

    def finish_task(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Adds the mean map of each of the task's classes."""
        for images, labels in batches:
            self.memory.update(self.maps(images.to(self.device)).flatten(1), labels.to(self.device))
        self._read_memory()
        return {}

    def _read_memory(self) -> None:
        known = self.memory.counts.nonzero()[:, 0]
        self.kept_maps = self.memory.means()[known].unflatten(1, (-1, *[self.options.side] * 2)), known
        self.base_rows = int((known < self.heads.widths[0]).sum()) if len(known) else 0

    def task_state_dict(self) -> dict[str, Tensor]:
        own = {MEMORY + name: tensor for name, tensor in self.memory.state_dict().items()}
        return {**super().task_state_dict(), **own, VERTICES: self.heads.vertices}

    def load_task_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_task_state_dict(state)
        own = {name.removeprefix(MEMORY): tensor for name, tensor in state.items() if name.startswith(MEMORY)}
        self.memory.load_state_dict(own)
        self.memory.to(self.device)
        self.heads.vertices = state[VERTICES].cpu()
        self._read_memory()

    def for_answers(
        self, state: Mapping[str, Tensor], task_state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """All but the memory."""
        return dict(state), {}


METHODS.add(MambaFSCIL.name, MambaFSCIL)
