"""Inference with CUDA graphs: `mambacl.recorded(model)`.

For a single image, Python takes longer to launch the kernels than the GPU takes to run them. The first call with images
of some shape runs normally, the second is recorded, and later calls replay the recording: the same kernels and results
with a single launch. Calls that cannot be recorded run normally.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor, nn

from mambacl.log import logger
from mambacl.ops import switch
from mambacl.training.step import SHARE, Recorder

MOST = 4  # recorded shapes: each keeps its images and results on the GPU
Kind = tuple[object, ...]  # everything a call depends on except the values


class Graph(Protocol):
    def replay(self) -> None: ...


Record = Callable[[Callable[[], object], Tensor], Graph]  # records work on images


@dataclass(frozen=True)
class Recording:
    graph: Graph
    images: Tensor
    output: Tensor

    def __call__(self, images: Tensor) -> Tensor:
        self.images.copy_(images)
        self.graph.replay()
        return self.output.clone()  # the next replay of any graph overwrites this memory


class Recorded:
    """Records and replays a function from images to a tensor. `tensors` are all other tensors that it reads. Replays
    see values that change in place; if a tensor moves to other memory, everything is recorded again. `ready`: whether
    calls can be replayed now.
    """

    def __init__(
        self,
        call: Callable[[Tensor], Tensor],
        tensors: Callable[[], Iterable[Tensor]],
        ready: Callable[[], bool] = lambda: True,
        record: Record | None = None,
        most: int = MOST,
    ) -> None:
        self.call, self.tensors, self.ready, self.most = call, tensors, ready, most
        self._record = record or CUDAGraphs()
        self._places: list[tuple[int, torch.Size]] = []
        self._known: dict[Kind, Recording | None] = {}  # None: seen once, or cannot be recorded
        self._given_up: set[Kind] = set()

    def __call__(self, images: Tensor) -> Tensor:
        if torch.is_grad_enabled() or not self.ready() or not self._served(images):
            return self.call(images)
        places = [(tensor.data_ptr(), tensor.shape) for tensor in self.tensors()]
        if places != self._places:
            self._places, self._known, self._given_up = places, {}, set()
        kind = _kind(images)
        recording = self._known.get(kind)
        if recording is None and kind in self._known and kind not in self._given_up:
            recording = self._new(kind, images)
        if recording is not None:
            return recording(images)
        if kind not in self._known and len(self._known) < self.most:
            self._known[kind] = None
        return self.call(images)

    def recordings(self) -> int:
        return sum(recording is not None for recording in self._known.values())

    def _served(self, images: Tensor) -> bool:
        return images.is_cuda or not isinstance(self._record, CUDAGraphs)

    def _new(self, kind: Kind, images: Tensor) -> Recording | None:
        """Records a call. After a failure, it is not tried again."""
        found: list[Tensor] = []
        torch.clear_autocast_cache()  # cached casts would not follow the weights
        try:
            with torch.inference_mode(False), torch.no_grad():  # so that it can be replayed in either mode
                own = images.clone()
                graph = self._record(lambda: found.append(self.call(own)), own)
        except RuntimeError as error:
            if images.is_cuda:
                torch.cuda.synchronize(images.device)
            logger.info("Inference cannot be recorded as a CUDA graph (%s).", str(error).splitlines()[0])
            self._given_up.add(kind)
            return None
        finally:
            torch.clear_autocast_cache()
        recording = Recording(graph, own, found[-1])
        self._known[kind] = recording
        return recording


def recorded(model: nn.Module, most: int = MOST) -> Recorded:
    """The model as a function of images, to be called under `torch.no_grad()` or `torch.inference_mode()`. On a GPU, in
    evaluation mode, calls are replayed for up to `most` image shapes. The model's hooks do not run in a replay."""

    def tensors() -> Iterable[Tensor]:
        return chain(model.parameters(), model.buffers())

    return Recorded(model, tensors, lambda: not model.training, most=most)


class CUDAGraphs:
    """Records on a GPU, unless a call needs too much memory."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.recorder = recorder

    def __call__(self, work: Callable[[], object], images: Tensor) -> Graph:
        device = images.device
        if self.recorder is None or self.recorder.device != device:
            self.recorder = Recorder(device)
        needed = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        if needed > SHARE * torch.cuda.get_device_properties(device).total_memory:
            raise RuntimeError("it needs too much memory")
        return self.recorder.record(work, needed)


def _kind(images: Tensor) -> Kind:
    where = images.device.type
    autocast = torch.is_autocast_enabled(where) and torch.get_autocast_dtype(where)
    products = torch.backends.cuda.matmul.fp32_precision
    return (images.shape, images.stride(), images.dtype, images.device, autocast, products, switch.enabled())
