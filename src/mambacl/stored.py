"""Images of earlier tasks that a method keeps. The training loop hands them from the method, which knows no data set,
to the stream, which knows no method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class StoredImages:
    """Image k is number `positions[k]` of the training images of task `tasks[k]`, in the order of the data set."""

    labels: Tensor
    """(n,), over all classes"""
    tasks: Tensor
    positions: Tensor
    pixels: tuple[Tensor, ...] | None = None
    """uint8 (3, h, w) each; None: to be read from the data set"""

    def __len__(self) -> int:
        return len(self.labels)
