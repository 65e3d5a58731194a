"""Views of parts of parameters, and their addresses for kernels, cached from step to step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mambacl.nullspace.blocks import Part

MOST_ADDRESSES = 16  # cached per `PartViews`: optimizers can keep copies of their parameters
Tensors = Mapping[str, Tensor]  # parameters by name
Placement = tuple[tuple[int, torch.dtype, tuple[int, ...]], ...]  # addresses, dtypes and strides


@dataclass(frozen=True)
class Addresses:
    """The addresses of matrices, on their device, and the strides of their rows and columns."""

    addresses: Tensor
    strides: tuple[int, int]


class PartViews:
    """Views of parts of parameters, cached until the parameters are different tensors."""

    def __init__(self, parts: Sequence[Part], view: Callable[[Part, Tensor], Tensor]) -> None:
        self.parts, self.view = parts, view
        self._of: Placement = ()
        self._views: list[Tensor] = []
        self._addresses: dict[Placement, Addresses] = {}
        self._recorded: list[Addresses] = []  # kept alive: a CUDA graph reads them

    def __call__(self, tensors: Tensors, present: Sequence[int] | None = None) -> list[Tensor]:
        """The views of all parts, or of those with an index in `present`."""
        if present is not None and len(present) < len(self.parts):
            some = [self.parts[i] for i in present]
            return [self.view(part, tensors[part.parameter].detach()) for part in some]
        given = [tensors[part.parameter] for part in self.parts]
        placement = tuple((tensor.data_ptr(), tensor.dtype, tensor.stride()) for tensor in given)
        if placement != self._of:
            views = [self.view(part, tensor.detach()) for part, tensor in zip(self.parts, given, strict=True)]
            if not all(map(_shares_memory, views, given)):  # `matrix` copies a weight that is not contiguous
                return views
            self._of, self._views = placement, views
        return self._views

    def addresses(self, tensors: Tensors) -> Addresses | None:
        """One address per group of the views (groups, n, D); None if they are copies, not float32, or differ in their
        strides."""
        views = self(tensors)
        if views is not self._views:
            return None
        found = self._addresses.get(self._of)
        if found is None:
            strides = {view.stride() for view in views}
            if len(strides) > 1 or any(v.dtype != torch.float32 or v.device != views[0].device for v in views):
                return None
            group, row, column = strides.pop()
            size = views[0].element_size()
            places = [view.data_ptr() + size * group * g for view in views for g in range(len(view))]
            found = Addresses(torch.tensor(places, device=views[0].device), (row, column))
            if len(self._addresses) >= MOST_ADDRESSES:
                del self._addresses[next(iter(self._addresses))]
            self._addresses[self._of] = found
        if _recording(found.addresses):
            self._recorded.append(found)
        return found


def _recording(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured on the tensor's device."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
