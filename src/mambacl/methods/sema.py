"""SEMA (Wang et al., *Self-Expansion of Pre-trained Models with Mixture of Adapters*, CVPR 2025): an adapter beside
each MLP, or each mixer of a Mamba model; the last three blocks get further ones when images look new to them.

An autoencoder per adapter knows its images by the mean token of the block's input. At the start of a task, its images
are scanned. The first block in which their errors are unusual for all autoencoders gets an adapter, a row of the router
and an autoencoder, which train in a round: the adapter with the head, then the autoencoder. Then the scan goes on. A
block grows once per task at most. Without anything new, only the head trains.

A task's epochs are enough for a round per block that can grow; those of rounds that do not happen pass without work.

Its recipe: SGD, a cosine in each part of a round, decay 5e-4, batches of 32, rate 0.005; a round has 5 + 20 passes for
CIFAR-100, 20 + 20 for ImageNet-R.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.classifiers.base import Classifier
from mambacl.classifiers.drift import FollowsDrift
from mambacl.errors import UserError
from mambacl.methods.base import Method, Phase, Task
from mambacl.methods.registry import METHODS
from mambacl.ops.precision import at_least_float32, full_precision
from mambacl.options import at_least, between
from mambacl.tuning import Tuning
from mambacl.tuning.adapters import POSITIVE, PlacedOptions, chosen_place
from mambacl.tuning.routed_adapters import RoutedAdapters


@dataclass(frozen=True)
class SemaOptions(PlacedOptions):
    """Options of SEMA."""

    variant: Literal["paper", "public-code"] = "paper"
    """paper: old heads are fixed, and an autoencoder's record has errors of its own training; public-code: weight decay
    acts on old heads too, and the record also has errors from before, while the adapter trains"""
    scale: Annotated[float, POSITIVE] = 1.0
    """factor of an adapter's output; the public code sets 0.1 and does not apply it"""
    grow: Annotated[int, at_least(1)] = 3
    """number of blocks, the last ones, that can get further adapters"""
    threshold: Annotated[float, POSITIVE] = 2.0
    """how many standard deviations the errors of a batch must be away on average; 1 for ImageNet-A"""
    descriptors: Annotated[float, between(0, 1)] = 0.5
    """share of a round's epochs in which the autoencoder trains; 0.8 for CIFAR-100"""
    descriptor_rate: Annotated[float, POSITIVE] = 2.0
    """factor of training.lr for autoencoders"""
    hidden: Annotated[int, at_least(1)] = 128
    """values that an autoencoder keeps of a mean token"""
    record: Annotated[int, at_least(2)] = 500
    """errors that an autoencoder remembers, the latest ones"""
    scan_batch: Annotated[int, at_least(1)] = 128
    """images that are judged together"""


class Sema(Method):
    name = "sema"
    summary = "adapters in the last blocks, added when images look new to autoencoders, and a router (SEMA)"
    options_class: ClassVar[type] = SemaOptions
    recordable: ClassVar[bool] = False  # errors are recorded in each step
    splits = False  # for the same reason

    def make_tuning(self) -> Tuning:
        model, o = self.model, self.options
        self.adapters = RoutedAdapters(model, o, chosen_place(model, o), self.setup.seed, o.grow, o.hidden, o.record)
        return self.adapters

    def make_classifier(self) -> Classifier:
        made = super().make_classifier()
        if isinstance(made, FollowsDrift) and made.options.drift != "none":
            raise UserError("sema adds adapters within a task, which no drift describes: set the option drift to none.")
        return made

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        self.adapters.begin(first=task.index == self.known_tasks)

    def named_parameters(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        heads = self.heads.trained()
        if self.options.variant == "public-code":
            heads = [(name, p) for name, p in self.heads.named_parameters() if name.startswith("heads.")]
        sets = self.adapters
        return {"backbone": sets.trained(False), "classifier": heads, "descriptors": sets.trained(True)}

    def rate_factors(self) -> dict[str, float]:
        return {"descriptors": self.options.descriptor_rate}

    def round(self, epochs: int) -> tuple[int, int]:
        """The epochs of a round, and how many of them are for the adapter."""
        length = max(1, epochs // max(1, min(len(self.adapters.growing), epochs // 2)))
        return length, max(1, min(length - 1, round((1 - self.options.descriptors) * length)))

    @property
    def rounds(self) -> int:
        """Those of the current task so far."""
        return 1 if self.task == self.known_tasks else self.adapters.grown

    def phase(self, epoch: int, epochs: int) -> Phase:
        length, adapting = self.round(epochs)
        number, within = divmod(epoch, length)
        trains = ("backbone", "classifier")
        if self.rounds == 0 and epoch < adapting:
            return Phase("head", roles=trains, epochs=adapting, new_optimizer=True)
        if number >= self.rounds:
            return Phase("done", roles=(), new_optimizer=True)
        first, last = number * length, length - adapting
        if within < adapting:
            return Phase("adapters", roles=trains, first=first, epochs=adapting, new_optimizer=True)
        return Phase("descriptors", roles=("descriptors",), first=first + adapting, epochs=last, new_optimizer=True)

    @torch.no_grad()
    def start_epoch(self, epoch: int, batches: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> None:
        """Between rounds: scans on from where it has stopped, until a place grows or a whole scan has found nothing."""
        (length, _), o = self.round(self.setup.epochs), self.options
        if self.task == self.known_tasks or epoch != self.rounds * length or epoch + length > self.setup.epochs:
            return
        self.adapters.settle()
        place = self.adapters.search(batches, o.scan_batch, lambda x: self.features(x.to(self.device)), o.threshold)
        if place is not None:
            seed = np.random.SeedSequence([self.setup.seed, self.task, place]).generate_state(1)[0]
            self.adapters.grow(place, int(seed))

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Without a phase, as outside of a run, everything trains at once."""
        part, public = self.current.name, self.options.variant == "public-code"
        with self.adapters.watching(), torch.set_grad_enabled(part != "descriptors"):
            loss, correct = self.task_loss(self.features(images), labels)
        losses = [] if part == "descriptors" else [loss]
        for index, descriptor in self.adapters.newest().items() if part != "adapters" or public else ():
            errors = descriptor(self.adapters.at(index).seen)
            descriptor.keep(errors)
            losses += [] if part == "adapters" else [errors.mean()]
        return torch.stack(losses).sum(), correct

    def task_loss(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if self.options.variant == "paper":
            return super().task_loss(features, labels)
        with full_precision(features):
            logits = self.heads(at_least_float32(features))
        old = torch.arange(logits.shape[1], device=logits.device) < logits.shape[1] - self.heads.widths[-1]
        logits = logits.masked_fill(old, -torch.inf)  # old heads get a gradient of 0, so that weight decay acts on them
        return F.cross_entropy(logits, labels), (logits.argmax(1) == labels).sum()


METHODS.add(Sema.name, Sema)
