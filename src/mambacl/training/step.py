"""One training step: loss, gradients, optimizer.

On a GPU, a step consists of a few hundred small kernels, and Python takes longer to launch them than the GPU takes to
run them. So the first steps of a task run normally, then one is recorded as a CUDA graph, and later steps replay it:
the same kernels and results with a single launch. Batches of another size run normally.

With several processes, each has a part of every batch, and their gradients are added up: the step is that of the whole
batch. A recorded step is then two graphs, up to the gradients and from there on, with one exchange between them
(`training.exchange`). If the gradients are many or a step cannot be recorded, PyTorch's `DistributedDataParallel`
exchanges them during the backward pass, which hides most of it.
"""

import gc
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mambacl import processes
from mambacl.log import logger
from mambacl.nullspace.sharing import is_cut
from mambacl.training.clipping import clip_gradients
from mambacl.training.exchange import Exchange

WARM_UP = 2  # steps of a task before recording: they compile kernels and create the optimizer's state
SHARE = 0.3  # of the GPU's memory: a graph holds the memory of its step, in addition to that of other steps
SENT = 1 << 26  # bytes of gradients. At 50 GB/s this many take 2.7 ms between GPUs, about as long as a step's launches


def autocast(device: torch.device, bf16: bool) -> AbstractContextManager[Any]:
    """The forward pass of a run: under autocast with bf16, else unchanged."""
    return torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()


class Loss(Protocol):
    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]: ...


class LossModule(nn.Module):
    """A method's loss as a module with the parameters that train, as `DistributedDataParallel` wants it."""

    def __init__(self, method: Loss, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.compute, self.trained = method.loss, nn.ParameterList(parameters)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self.compute(images, labels)


def loss_over_ranks(method: Loss, trained: Iterable[nn.Parameter]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The method's loss. With several processes, its gradients are averaged over them in the backward pass; FSDP2 does
    that for parameters that it has cut. Parameters are equal everywhere already, and a batch need not use all."""
    whole = [parameter for parameter in trained if not is_cut(parameter)]
    if processes.count() == 1 or not whole:
        return method.loss
    return DistributedDataParallel(LossModule(method, whole), init_sync=False, find_unused_parameters=True)


class Replayed(Protocol):
    def replay(self) -> None: ...


class Records(Protocol):
    def record(self, work: Callable[[], object], needed: int) -> Replayed: ...


class Recorder:
    """Records CUDA graphs that share the same memory, which stays reserved across tasks.

    All are recorded on one stream, because streams do not share freed memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._first: torch.cuda.CUDAGraph | None = None
        self._stream: torch.cuda.Stream | None = None

    def record(self, work: Callable[[], object], needed: int) -> torch.cuda.CUDAGraph:
        """`needed`: approximate bytes of memory. Does what `torch.cuda.graph` does, but empties PyTorch's cache only if
        the GPU is short of memory: allocating it again takes longer than recording."""
        if torch.cuda.mem_get_info(self.device)[0] < 2 * needed:
            torch.cuda.empty_cache()
        if self._first is None:  # it holds the memory
            first = torch.cuda.CUDAGraph()
            self._capture(first, lambda: torch.zeros(1, device=self.device), None)
            self._first = first
        graph = torch.cuda.CUDAGraph()
        try:
            self._capture(graph, work, self._first.pool())
        except RuntimeError:
            self._end_failed_capture()
            raise
        return graph

    def _end_failed_capture(self) -> None:
        """A capture that succeeds. Without it, PyTorch takes the random generator for one that is being captured, and
        refuses to draw from it."""
        with suppress(RuntimeError):  # the first error says more
            self._capture(torch.cuda.CUDAGraph(), lambda: torch.zeros(1, device=self.device), None)

    def _capture(self, graph: torch.cuda.CUDAGraph, work: Callable[[], object], pool: Any) -> None:
        self._stream = self._stream or torch.cuda.Stream(self.device)
        here, stream = torch.cuda.current_stream(self.device), self._stream
        collecting = gc.isenabled()
        torch.cuda.synchronize(self.device)
        gc.disable()  # freeing a CUDA object would break the capture
        stream.wait_stream(here)
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(stream):
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        here.wait_stream(stream)


Kind = tuple[int, torch.Size]  # of a batch: images in all processes (0: there is only one), and the shape of its own


@dataclass(frozen=True)
class Recording:
    """A step that can be taken again, of batches of one kind."""

    kind: Kind
    images: Tensor
    labels: Tensor
    parts: list[Callable[[], None]]

    def replay(self, images: Tensor, labels: Tensor) -> None:
        self.images.copy_(images)
        self.labels.copy_(labels)
        for part in self.parts:
            part()


class TrainingStep:
    """Takes the steps of one optimizer. Keeps the sums of losses and correct answers on the device until asked."""

    def __init__(
        self,
        method: Loss,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        bf16: bool,
        graphs: bool,
        recorder: Records | None = None,
        clip: float = 0.0,
        accumulate: int = 1,
    ) -> None:
        """`graphs`: whether to record steps if possible; `clip`: the largest norm of the gradient, 0 for any;
        `accumulate`: pieces of a batch that go through the model one after another."""
        self.clip, self.accumulate = clip, accumulate
        self.recorder = recorder or Recorder(device)
        self.method, self.optimizer, self.device, self.bf16 = method, optimizer, device, bf16
        self.loss_sum = torch.zeros((), device=device)
        self.right = torch.zeros((), dtype=torch.int64, device=device)
        self.images_seen = 0
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        on_gpu = device.type == "cuda" or not isinstance(self.recorder, Recorder)
        whole = not any(is_cut(parameter) for parameter in trained)
        self.sharded = not whole
        quick = processes.count() == 1 or sum(parameter.nbytes for parameter in trained) <= SENT
        self.graphs = graphs and on_gpu and whole and quick and bool(trained) and rates_are_tensors(optimizer)
        self.exchange = Exchange(trained) if self.graphs and processes.count() > 1 else None
        self.loss = method.loss if self.exchange else loss_over_ranks(method, trained)
        self.factor: float | None = None
        self._taken = 0
        self._kinds: set[Kind] = set()  # of the batches so far
        self._recorded: Recording | None = None

    def __call__(self, images: Tensor, labels: Tensor, factor: float, of: int = 0) -> None:
        """Takes a step, with the learning rates multiplied by `factor`. `of`: images in the whole batch, if this is one
        process's part of it; an image of which no part is left for this process counts nothing."""
        self._set_rates(factor)
        images, labels = images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
        self.images_seen += _length(processes.part(of)) if of else len(images)
        kind = of, images.shape  # all processes decide alike
        if self._recorded is None and self.graphs and self._taken >= WARM_UP and kind in self._kinds:
            self._record(images, labels, of)  # never the last, smaller batch of an epoch
        if self._recorded is not None and self._recorded.kind == kind:
            self._recorded.replay(images, labels)
        else:
            self._run(images, labels, of)
        self._taken += 1
        self._kinds.add(kind)

    def means(self) -> tuple[float, float]:
        """The mean loss and the accuracy of this process's images since the last call of `take_sums`."""
        seen = max(1, self.images_seen)
        return float(self.loss_sum) / seen, int(self.right) / seen

    def take_sums(self) -> tuple[float, int, int]:
        """The sum of the images' losses, the number of correct images and the number of images since the last call, of
        all processes."""
        seen = torch.tensor(self.images_seen, device=self.device)
        processes.sum_([self.loss_sum, self.right, seen])
        sums = float(self.loss_sum), int(self.right), int(seen)
        self.loss_sum.zero_()
        self.right.zero_()
        self.images_seen = 0
        return sums

    def _run(self, images: Tensor, labels: Tensor, of: int = 0) -> None:
        self._compute_gradients(images, labels, of)
        if self.exchange is not None:
            buffers = self.exchange.buffers()
            buffers.collect()
            buffers.send()
            buffers.hand_out()
        self._update()

    def _compute_gradients(self, images: Tensor, labels: Tensor, of: int) -> None:
        """The gradients of all pieces and all processes add up to that of the whole batch, because the loss is a mean
        over images."""
        pieces = self._pieces(len(images), of)
        for number, (cut, count) in enumerate(pieces):
            share = count * processes.count() / of if of else count / len(images)
            with self._exchanging(number == len(pieces) - 1):
                with autocast(self.device, self.bf16):
                    loss, correct = self.loss(images[cut], labels[cut])
                if number == 0:  # here, because a method's loss may use the gradients for work of its own
                    self.optimizer.zero_grad(set_to_none=True)
                (loss if share == 1 else loss * share).backward()
            if count:
                self.loss_sum += loss.detach() * count
                self.right += correct

    def _pieces(self, images: int, of: int) -> list[tuple[slice, int]]:
        """The pieces of this process's part of a batch, and how many images of each count: none of an image that stands
        in for an empty part. With weights that are cut, all processes have to run the model equally often."""
        own = _length(processes.part(of)) if of else images
        cuts = [processes.part(images, self.accumulate, piece) for piece in range(self.accumulate)]
        pieces = [(cut, min(own, cut.stop - cut.start)) for cut in cuts if cut.start < cut.stop]
        most = min(self.accumulate, -(-of // processes.count())) if self.sharded else 0
        return pieces + [(slice(0, 1), 0)] * (most - len(pieces))

    def _update(self) -> None:
        if self.clip:
            trained = [p for group in self.optimizer.param_groups for p in group["params"]]
            clip_gradients(trained, self.clip)
        self.optimizer.step()

    def _exchanging(self, last: bool) -> AbstractContextManager[Any]:
        """Only the last piece of a batch sends the sum of its gradients round."""
        loss = self.loss
        return loss.no_sync() if isinstance(loss, DistributedDataParallel) and not last else nullcontext()

    def _set_rates(self, factor: float) -> None:
        if factor == self.factor:
            return
        self.factor = factor
        for group in self.optimizer.param_groups:
            rate = group["base_lr"] * factor
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _record(self, images: Tensor, labels: Tensor, of: int) -> None:
        """Records a step without taking it. If that fails in any process, all steps run normally in all of them."""
        self.graphs = False  # try only once
        own_images, own_labels = images.clone(), labels.clone()
        recording: Recording | None = None
        try:
            recording = Recording((of, images.shape), own_images, own_labels, self._parts(own_images, own_labels, of))
        except RuntimeError as error:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            logger.info("Steps cannot be recorded as a CUDA graph (%s).", str(error).splitlines()[0])
        if all(processes.together(recording is not None)):
            self._recorded = recording
        elif self.exchange is not None:
            self.loss, self.exchange = loss_over_ranks(self.method, self.exchange.parameters), None

    def _parts(self, images: Tensor, labels: Tensor, of: int) -> list[Callable[[], None]]:
        """What a replay does, in order."""
        needed = _memory_of_a_step(self.device)
        if self.exchange is None:
            return [self.recorder.record(lambda: self._run(images, labels, of), needed).replay]
        buffers = self.exchange.latest  # of the steps before, which had the same gradients

        def gradients() -> None:
            self._compute_gradients(images, labels, of)
            buffers.collect()

        def update() -> None:
            buffers.hand_out()
            self._update()

        first = self.recorder.record(gradients, needed)
        return [first.replay, buffers.send, self.recorder.record(update, needed).replay]


def _memory_of_a_step(device: torch.device) -> int:
    """Bytes. Raises a RuntimeError if a graph may not hold as many."""
    if device.type != "cuda":
        return 0
    needed = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    if needed > SHARE * torch.cuda.get_device_properties(device).total_memory:
        raise RuntimeError("it needs too much memory")
    return needed


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length


def rates_are_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a recorded step can follow later changes of the learning rates."""
    return all(isinstance(group["lr"], Tensor) for group in optimizer.param_groups)
