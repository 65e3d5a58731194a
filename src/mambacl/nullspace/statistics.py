"""Statistics of features, summed up in one pass over some batches while a model runs.

    wanted = {source: {"x": accumulator, ...}, ...}
    images = gather(model, wanted, batches)

A `Source` is a module whose hooks record its features by name. An `Accumulator` turns the features of a batch into
totals that add up over batches, processes and tasks, in float64. This module does not depend on what they are for.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mambacl import processes
from mambacl.errors import UserError
from mambacl.nullspace.sharing import any_is_cut, failing_together

Features = Mapping[str, Any]  # tensors, or functions without arguments that compute them on demand
Record = Callable[[Features], None]
LABELS = "labels"  # a feature of every source if batches are (images, labels)


class Source:
    """A module whose features can be recorded: by default `output`, what it returns."""

    may_rest: bool = False
    """whether a forward pass may leave it out, as an expert that no token is sent to; its totals can then be missing"""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module

    def register_hooks(self, record: Record) -> list[Any]:
        """Registers hooks that record features, and returns their handles."""
        return [self.module.register_forward_hook(lambda _, __, output: record({"output": output}))]

    def if_not_run(self) -> str:
        """Advice for the case that the forward pass does not run the module: the end of a sentence."""
        return ""


S = TypeVar("S", bound=Source)


class Accumulator(ABC):
    """Totals of some features. A subclass defines what one batch contributes."""

    largest: tuple[str, ...] = ()  # totals that are the maximum over batches, not the sum

    def __init__(self, inputs: Sequence[str]) -> None:
        """`inputs`: names of the features that `contribution` takes."""
        self.inputs = tuple(inputs)
        self.totals: dict[str, Tensor] = {}

    @abstractmethod
    def contribution(self, *features: Any) -> dict[str, Tensor]:
        """The totals of one batch, as new tensors."""

    def add(self, *features: Any) -> None:
        self._include(self.contribution(*features))

    def merge(self, other: "Accumulator") -> None:
        """Adds the totals of another accumulator."""
        self._include({name: total.clone() for name, total in other.totals.items()})

    def _include(self, totals: Mapping[str, Tensor]) -> None:
        for name, total in totals.items():
            if name not in self.totals:
                self.totals[name] = total.double()
            elif name in self.largest:
                self.totals[name] = torch.maximum(self.totals[name], total.double())
            else:
                self.totals[name].add_(total.double())

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.totals)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.totals = {name: total.clone() for name, total in state.items()}


def gather(
    model: nn.Module,
    wanted: Mapping[S, Mapping[str, Accumulator]],
    batches: Iterable[Any],
    forward: Callable[..., Any] | None = None,
    products: torch.dtype = torch.float64,
    in_parts: bool = True,
) -> int:
    """Sends batches through `forward`, by default the model, in evaluation mode, and adds the sources' features, in the
    precision `products`, to the accumulators. Returns the number of images.

    With several processes, each passes its own share of the batches, which can be empty, and all end with the same
    totals; if one of them fails, all do, unless the model is cut. A batch of images with no label for any of them goes
    through the model, but does not count: for processes that must run the model equally often. Without `in_parts`, each
    passes all batches.
    """
    seen = {(source, label): 0 for source, accumulators in wanted.items() for label in accumulators}
    labels: dict[str, Any] = {}

    @torch.inference_mode(False)  # so that totals can be added to later, even if `forward` runs in inference mode
    @torch.no_grad()
    def show(source: S, features: Features) -> None:
        if LABELS in labels and not len(labels[LABELS]()):  # the batch only keeps processes in step
            seen.update({(source, label): seen[source, label] + 1 for label in wanted[source]})
            return
        features, made = {**labels, **features}, {}
        for label, accumulator in wanted[source].items():
            if not all(name in features or name == LABELS for name in accumulator.inputs):
                continue
            seen[source, label] += 1
            for name in accumulator.inputs:
                if name not in features:
                    raise UserError(f"The statistic {label} needs labels: pass batches of (images, labels).")
                if name not in made:
                    feature = value(features, name)
                    floating = isinstance(feature, Tensor) and feature.is_floating_point()
                    made[name] = feature.to(products) if floating else feature
            accumulator.add(*(made[name] for name in accumulator.inputs))

    device = next(model.parameters()).device
    # Processes with a model that is cut wait for one another inside it: the one that fails can only end.
    alone = not in_parts or any_is_cut(dict(model.named_parameters()))
    together: AbstractContextManager[None] = nullcontext() if alone else failing_together()
    with together, watching(list(wanted), show) as runs, evaluating(model), torch.no_grad():
        images = run_batches(batches, model if forward is None else forward, device, labels)
    if in_parts:
        images = _over_processes(wanted, images, runs, seen, device)
    if images == 0:
        raise UserError("There are no images to gather features from: the loader is empty.")
    for source, accumulators in wanted.items():
        for label, accumulator in accumulators.items():
            if runs[source.name] == 0 and not source.may_rest:
                raise UserError(
                    f"A pass over the images found no features of {source.name}: the forward function does not run it"
                    f"{source.if_not_run()}."
                )
            if seen[source, label] < runs[source.name]:
                raise UserError(
                    f"{source.name} ran, but its feature {label} was not recorded: a fused kernel bypasses its layers; "
                    "choose its plain path (use_fast_path=False or use_mem_eff_path=False in mamba_ssm)."
                )
            if not all(torch.isfinite(total).all() for total in accumulator.totals.values()):
                raise UserError(f"The feature {label} of {source.name} holds NaN or infinite values.")
    return images


def _over_processes(
    wanted: Mapping[S, Mapping[str, Accumulator]],
    images: int,
    runs: dict[str, int],
    seen: dict[tuple[S, str], int],
    device: torch.device,
) -> int:
    """Replaces totals and counts by the sums over all processes; returns the number of all images. A process without
    images has no totals: it takes part with zeros."""
    if processes.count() == 1:
        return images
    accumulators = [accumulator for some in wanted.values() for accumulator in some.values()]
    shapes = [{name: tuple(total.shape) for name, total in one.totals.items()} for one in accumulators]
    found = processes.together((images, runs, list(seen.values()), shapes))
    for name in runs:
        runs[name] = sum(one[1][name] for one in found)
    for number, pair in enumerate(seen):
        seen[pair] = sum(one[2][number] for one in found)
    for number, accumulator in enumerate(accumulators):
        known = {name: shape for one in found for name, shape in one[3][number].items()}
        for name in sorted(known):
            largest = name in accumulator.largest
            if name not in accumulator.totals:
                nothing = -torch.inf if largest else 0.0
                accumulator.totals[name] = torch.full(known[name], nothing, dtype=torch.float64, device=device)
            processes.sum_([accumulator.totals[name]], largest)
    return sum(one[0] for one in found)


def value(features: Features, name: str) -> Any:
    """A feature by name, computed now if it is a function."""
    found = features[name]
    return found() if callable(found) and not isinstance(found, Tensor) else found


@contextmanager
def watching(sources: Sequence[S], show: Callable[[S, Features], None]) -> Iterator[dict[str, int]]:
    """While open, every forward pass calls `show` with the features of the sources. Yields how often each one ran, by
    name."""
    runs = {source.name: 0 for source in sources}
    handles: list[Any] = []

    def count(name: str) -> Callable[..., None]:
        def counted(*_: Any) -> None:
            runs[name] += 1

        return counted

    try:
        for source in sources:
            handles.append(source.module.register_forward_hook(count(source.name)))
            handles += source.register_hooks(partial(show, source))
        # Compiled code ignores hooks that were registered later, so compiled models run uncompiled.
        compiled = "torch._dynamo" in sys.modules
        with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            yield runs
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts every module in evaluation mode while open; restores each module's mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def run_batches(
    batches: Iterable[Any], forward: Callable[..., Any], device: torch.device, labels: dict[str, Any] | None = None
) -> int:
    """Sends batches through `forward`: tensors, tuples that begin with one, or mappings of arguments by name. Puts the
    labels of the current batch, if it has any, into `labels`. Returns the number of images."""
    images = 0
    for batch in batches:
        inputs = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
        _check_inputs(inputs)
        if labels is not None:
            labels.clear()
            if isinstance(batch, (tuple, list)) and len(batch) > 1 and isinstance(batch[1], Tensor):
                labels[LABELS] = partial(batch[1].to, device)
        if isinstance(inputs, Mapping):
            arguments = {name: v.to(device) if isinstance(v, Tensor) else v for name, v in inputs.items()}
            images += len(next(v for v in arguments.values() if isinstance(v, Tensor)))
            forward(**arguments)
        elif len(inputs):
            images += len(inputs) if labels is None or LABELS not in labels or len(batch[1]) else 0
            try:
                forward(inputs.to(device))
            except RuntimeError as error:
                if getattr(inputs, "dtype", None) != torch.uint8:
                    raise
                raise UserError(
                    "The model refused a batch of bytes (uint8): pass images as in training, of floating-point numbers."
                ) from error
    return images


def _check_inputs(inputs: Any) -> None:
    tensors = inputs.values() if isinstance(inputs, Mapping) else [inputs]
    if not any(hasattr(value, "to") for value in tensors):
        raise UserError(
            "A batch must be a tensor, a tuple that begins with one, or a mapping of the forward function's arguments, "
            f"got {inputs!r:.60}."
        )
