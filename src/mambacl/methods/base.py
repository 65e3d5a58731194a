"""What a continual-learning method is. The training loop calls these and knows no method by name.

A method is one file in this folder, or in another package that names it in the entry point group `mambacl.methods`. It
derives from `Method`, or from `HeadPerTask` when it has the paper's classifier, and calls `METHODS.add`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.classifiers import SeparateHeads
from mambacl.methods.registry import METHODS
from mambacl.nullspace import Setting
from mambacl.ops.precision import at_least_float32, full_precision
from mambacl.options import build_config

__all__ = ["METHODS", "HeadPerTask", "Method", "NoOptions", "Setup", "Task"]


@dataclass(frozen=True)
class Setup:
    """What the configuration says to a method."""

    setting: Setting = field(default_factory=Setting)
    warm_second_head: bool = False
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    classifier: nn.Linear | None = None
    """of the first task's classes, where the model knows them already"""
    folder: Path | None = None
    """where large things may be put"""


@dataclass(frozen=True)
class Task:
    index: int
    classes: int
    first_label: int
    seed: int  # of its own, for what the method draws


@dataclass(frozen=True)
class NoOptions:
    """A method without options of its own."""


class Method(ABC):
    """State is in two parts: `state_dict` changes with each step, `task_state_dict` only at the end of a task."""

    name: ClassVar[str]
    summary: ClassVar[str]
    options_class: ClassVar[type] = NoOptions
    recordable: ClassVar[bool] = False
    """whether a CUDA graph can replay its steps: `loss` never waits for the GPU, and does the same for every batch"""
    needs_task_state: ClassVar[bool] = False
    """whether `predict` needs what `task_state_dict` holds"""

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        self.model, self.setup = model, setup
        self.known_tasks = int(setup.classifier is not None)  # in these nothing is trained
        self.options = build_config(self.options_class, setup.options, self.name)

    @abstractmethod
    def start_task(self, task: Task) -> None:
        """Before the first step of a task."""

    @abstractmethod
    def named_parameters(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """What the current task trains, by role: "backbone" and "classifier" have their own learning rates."""

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer of each task passes through here."""
        return optimizer

    @abstractmethod
    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of a batch of the current task, and the number of its images that are right."""

    def finish_task(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """After the last step of a task, with its training images as in evaluation. Returns seconds by phase."""
        return {}

    def moved(self) -> list[dict[str, Tensor]]:
        """For each finished task, how much of its updates was protected: see `NullSpace.update_energy`."""
        return []

    @abstractmethod
    def predict(self, images: Tensor) -> Tensor:
        """Logits over all classes seen so far, by label."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]: ...

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...

    def task_state_dict(self) -> dict[str, Tensor]:
        return {}

    def task_text(self) -> dict[str, str]:
        """What a reader of the task's state should know about it."""
        return {}

    def load_task_state_dict(self, state: Mapping[str, Tensor]) -> None:
        return


class HeadPerTask(Method):
    """One linear classifier a task, cross-entropy over the current task's classes; evaluation mode throughout.

    A subclass says which of the backbone's parameters train, by name.
    """

    recordable = True

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        super().__init__(model, setup)
        self.heads = SeparateHeads(model.num_features)  # type: ignore[arg-type]
        model.eval()
        trained = set(self.trained_names())
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)

    def trained_names(self) -> list[str]:
        """Names of the backbone's parameters that train."""
        return []

    def start_task(self, task: Task) -> None:
        if task.index < self.known_tasks:
            assert self.setup.classifier is not None
            self.heads.take_over(self.setup.classifier)
        else:
            warm = self.setup.warm_second_head and task.index == 1
            self.heads.add(task.classes, task.seed, warm)
        self.heads.to(next(self.model.parameters()).device)

    def named_parameters(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        named = dict(self.model.named_parameters())
        current = len(self.heads.heads) - 1
        head = [(f"heads.{current}.{name}", p) for name, p in self.heads.heads[current].named_parameters()]
        return {"backbone": [(name, named[name]) for name in self.trained_names()], "classifier": head}

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self._classify(self.heads.last, self.model(images))
        labels = labels - sum(self.heads.widths[:-1])  # the current head counts from 0
        return F.cross_entropy(logits, labels), (logits.argmax(dim=1) == labels).sum()

    def predict(self, images: Tensor) -> Tensor:
        return self._classify(self.heads, self.model(images))

    def _classify(self, heads: Callable[[Tensor], Tensor], features: Tensor) -> Tensor:
        """Logits in full precision under autocast, too: rounded ones tie, and ties go to the older class."""
        with full_precision(features):
            return heads(at_least_float32(features))

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._named_state())

    def _named_state(self) -> Iterator[tuple[str, Tensor]]:
        named = dict(self.model.named_parameters())
        for name in self.trained_names():
            yield f"model.{name}", named[name].detach()
        for name, tensor in self.heads.state_dict().items():
            yield name, tensor

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        named = dict(self.model.named_parameters())
        for name in self.trained_names():
            named[name].copy_(state[f"model.{name}"])
        self.heads.restore({name: tensor for name, tensor in state.items() if not name.startswith("model.")})
        self.heads.to(next(self.model.parameters()).device)
