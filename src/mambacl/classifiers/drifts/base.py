"""What the kinds of drift correction share. A kind is fitted to the new task's images, with features x from before the
task and y from after it, and says where the statistics of old classes have gone."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mambacl.classifiers.base import NoOptions
from mambacl.classifiers.sampling import draw, root
from mambacl.options import build_config


@dataclass(frozen=True)
class Move:
    """Features x of class c have become x A + b_c, up to a residual with covariance R."""

    matrix: Tensor | None = None  # A (d, d); None: the identity
    offset: Tensor | None = None  # b (d,), or (classes, d)
    residual: Tensor | None = None  # R (d, d)
    covariances: Tensor | None = None  # (classes, d, d): the new covariances, in place of what A and R give
    choice: float = math.inf
    """the ridge or s^2 that was chosen, in units of the data; infinite if none was"""


@dataclass(frozen=True)
class TaskEnd:
    """What some kinds need beside the features of the new images."""

    seed: int = 0
    """for kinds that train a map or draw samples"""
    heads: Callable[[Tensor], Tensor] | None = None
    """the logits of all classes for features (b, d), with gradients"""
    images: Callable[[], Iterable[Tensor]] | None = None
    """the new images in batches, in the order of their features"""
    features: Callable[[Tensor], Tensor] | None = None
    """the features of images, with gradients"""
    before: Callable[[], AbstractContextManager[None]] | None = None
    """within it, `features` are those from before the task"""


class Drift(ABC):
    """Fitted to the new task's images."""

    name: ClassVar[str]
    options_class: ClassVar[type] = NoOptions
    needs_covariances: ClassVar[bool] = False
    """whether it reads the classes' covariances"""
    needs_features: ClassVar[bool] = False
    """whether it works only with statistics of the features themselves, not of lifted ones"""
    keeps_matrix: ClassVar[bool] = False
    """whether it keeps a matrix (d, d) from one task to the next"""

    def __init__(self, options: Any = None, end: TaskEnd | None = None) -> None:
        """`options`: a mapping of options of `options_class`, or none for the defaults."""
        self.options = build_config(self.options_class, options or {}, f"drift {self.name}")
        self.end = end or TaskEnd()
        self.matrix: Tensor | None = None
        """with `keeps_matrix`: that of the task before; after `move`, that of this task"""

    @abstractmethod
    def update(self, old: Tensor, new: Tensor, labels: Tensor) -> None:
        """Adds images: their features (b, d) before and after the task, in float64."""

    @abstractmethod
    def move(self, means: Tensor, covariances: Tensor | None = None) -> Move:
        """What happened to old classes with these means (classes, d) and, with `needs_covariances`, covariances
        (classes, d, d)."""


class WithPairs(Drift):
    """Keeps the features of the new images until the task's end, in float32: 8 d bytes per image."""

    def __init__(self, options: Any = None, end: TaskEnd | None = None) -> None:
        super().__init__(options, end)
        self._parts: list[tuple[Tensor, Tensor]] = []

    def update(self, old: Tensor, new: Tensor, labels: Tensor) -> None:
        self._parts.append((old.float(), new.float()))

    def pairs(self) -> tuple[Tensor, Tensor]:
        old, new = zip(*self._parts, strict=True)
        return torch.cat(old), torch.cat(new)


def shuffled(
    pairs: tuple[Tensor, Tensor], batch: int, epochs: int, generator: torch.Generator, full: bool = False
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The batches of each epoch. `full` leaves out an incomplete one, unless it is the only one."""
    x, y = pairs
    for _ in range(epochs):
        order = torch.randperm(len(x), generator=generator).to(x.device)
        parts = order.split(batch)
        parts = parts[:-1] if full and len(parts) > 1 and len(parts[-1]) < batch else parts
        yield [(x[part], y[part]) for part in parts]


@torch.no_grad()
def pushed(samples: Tensor, mapping: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The mean and covariance (divisor n - 1) of samples (n, d) after a map."""
    moved = mapping(samples)
    return moved.mean(0), moved.T.cov()


@torch.no_grad()
def resampled(
    means: Tensor,
    covariances: Tensor,
    count: int,
    mapping: Callable[[Tensor], Tensor],
    generator: torch.Generator,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Means and covariances of the classes' Gaussians after a map, each from `count` samples. The map gets `dtype`."""
    found = []
    for mean, covariance in zip(means[:, None], covariances[:, None], strict=True):
        samples = draw(mean, root(covariance), count, generator)[0]
        found.append(pushed(samples, lambda x: mapping(x.to(dtype)).to(means)))
    return torch.stack([mean for mean, _ in found]), torch.stack([covariance for _, covariance in found])
