"""The bytes that a forward pass keeps for its backward pass, counted without running it.

Fake tensors have a shape, a type and a device, but no values: a model of any size goes through its forward pass within
seconds, on a machine without a GPU, and takes the same path as on one. `tests/training/test_activations.py` compares
the counts with those of real passes.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mambacl.tuning.recomputing import blocks_of, recompute


@dataclass(frozen=True)
class Kept:
    """Bytes kept by a forward pass of `images` images: all of them, and of the block that keeps the most."""

    images: int
    total: int
    block: int


def kept_for_backward(run: Callable[[], Any], beside: Iterable[Tensor] = (), blocks: Iterable[nn.Module] = ()) -> Kept:
    """What `run` keeps, each memory once and without that of the tensors `beside`, which exists anyway. `blocks`:
    modules of which the largest share is wanted. `images` is 0. Nothing of `run`'s graph stays."""
    other = {tensor.untyped_storage()._cdata for tensor in beside}
    found: dict[int, Tensor] = {}  # tensors, so that their memory is not used again
    total, before, largest = 0, dict[nn.Module, int](), 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal total
        tensor = tensor.detach()  # with its own node it would keep the graph, and that this tensor, for ever
        memory = tensor.untyped_storage()
        if memory._cdata not in other and memory._cdata not in found:
            found[memory._cdata] = tensor
            total += memory.nbytes()
        return tensor

    def enter(module: nn.Module, *_: Any) -> None:
        before[module] = total

    def leave(module: nn.Module, *_: Any) -> None:
        nonlocal largest
        largest = max(largest, total - before[module])

    handles: list[Any] = []
    for block in blocks:
        handles += [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            run()
    finally:
        for handle in handles:
            handle.remove()
    return Kept(0, total, largest)


def planned(
    model: nn.Module, images: int, size: int, device: str = "cuda", bf16: bool = True, again: bool = False
) -> Kept:
    """What a training step of the model, which can be on the meta device, keeps for a batch of square images. Which of
    its parameters train decides it. `again`: with gradient checkpointing."""
    model = deepcopy(model).to("meta")
    if again:
        recompute(model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device=device)
        batch = torch.empty(images, 3, size, size, device=device)
        with _autocast(device) if bf16 else nullcontext():
            kept = kept_for_backward(lambda: model(batch), model.parameters(), blocks_of(model))
    return Kept(images, kept.total, kept.block)


@contextmanager
def _autocast(device: str) -> Iterator[None]:
    """`torch.autocast` to bfloat16, which otherwise refuses a GPU that is not there."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, torch.bfloat16)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
