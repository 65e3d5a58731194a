"""The features of a finished task, gathered in one pass over its images."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mambacl.errors import UserError
from mambacl.nullspace.adapters import Block, Part, named_parameters
from mambacl.nullspace.covariance import GRAMS, Features, value
from mambacl.nullspace.elementwise import Activity, Box, activity, activity_and_sensitivity, box

Key = tuple[str, str]  # block, and the feature with the block's own names in it


@dataclass
class Gathered:
    """What a task adds: a covariance for each feature of each block, and a box for each part that is protected
    element by element."""

    covariances: dict[Key, Tensor] = field(default_factory=dict)
    boxes: dict[str, Box] = field(default_factory=dict)

    def add_(self, other: "Gathered") -> "Gathered":
        """Adds what other tasks gathered to this one, in place, so that memory holds no third copy."""
        for key, mine in self.covariances.items():
            mine.add_(other.covariances[key])
        self.boxes = {name: mine.within(other.boxes[name]) for name, mine in self.boxes.items()}
        return self


@dataclass(frozen=True)
class Wanted:
    """A feature to gather: under which key, of which kind, and from which of the block's tensors."""

    key: Key
    feature: str
    inputs: tuple[str, ...]

    @property
    def elementwise(self) -> bool:
        return self.feature == "delta-elementwise"


def wanted_feature(block: Block, part: Part, feature: str) -> Wanted:
    """Parts that multiply the same tensors get the same key."""
    names = ("delta",) if feature == "delta-elementwise" else GRAMS[feature].inputs
    inputs = tuple(part.inputs.get(name, name) for name in names)
    label = feature if inputs == names else f"{feature}({', '.join(inputs)})"
    return Wanted((block.name, label), feature, inputs)


@contextmanager
def watching(blocks: Sequence[Block], show: Callable[[Block, Features], None]) -> Iterator[dict[str, int]]:
    """While open, every forward pass shows the features of the blocks. Gives how often each block was run."""
    runs = {block.name: 0 for block in blocks}
    handles: list[Any] = []

    def count(name: str) -> Callable[..., None]:
        def counted(*_: Any) -> None:
            runs[name] += 1

        return counted

    try:
        for block in blocks:
            handles.append(block.module.register_forward_hook(count(block.name)))
            handles += block.hooks(partial(show, block))
        with eagerly():
            yield runs
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def eagerly() -> Iterator[None]:
    """Compiled models run as they are written: compiled code knows nothing of hooks that came later."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for every module while open; each module's own mode comes back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def run_batches(loader: Iterable[Any], forward: Callable[..., Any], device: torch.device) -> int:
    """Sends batches through `forward`: tensors, tuples that begin with one, or mappings of arguments by name."""
    images = 0
    for batch in loader:
        batch = batch[0] if isinstance(batch, (tuple, list)) else batch
        if isinstance(batch, Mapping):
            arguments = {name: v.to(device) if isinstance(v, Tensor) else v for name, v in batch.items()}
            images += len(next(v for v in arguments.values() if isinstance(v, Tensor)))
            forward(**arguments)
        elif len(batch):
            images += len(batch)
            forward(batch.to(device))
    return images


def gather(
    model: nn.Module,
    blocks: Sequence[Block],
    protected: Sequence[tuple[Block, Part, Wanted]],
    run: Callable[[], int],
    products: torch.dtype,
    batch_mean: bool,
    relax: float,
) -> tuple[Gathered, int]:
    """Runs the task's images, and gathers what the protected parts want. Also gives the number of images."""
    by_block: dict[str, dict[Key, Wanted]] = {}
    for block, _, wanted in protected:
        by_block.setdefault(block.name, {})[wanted.key] = wanted
    scans = {wanted.key: part.inputs.get("scan", "scan") for _, part, wanted in protected if part.kind == "A"}
    sums: dict[Key, Tensor] = {}
    activities: dict[Key, Activity] = {}
    counts: dict[Key, int] = {}

    @torch.inference_mode(False)  # what is gathered is added to later, whatever mode the forward function runs in
    @torch.no_grad()
    def show(block: Block, features: Features) -> None:
        made: dict[str, Any] = {}
        for key, wanted in by_block.get(block.name, {}).items():
            if not all(name in features for name in wanted.inputs):
                continue
            counts[key] = counts.get(key, 0) + 1
            for name in wanted.inputs:
                if name not in made:
                    made[name] = value(features, name).to(products)
            if wanted.elementwise:
                activities[key] = _active(features, made[wanted.inputs[0]], scans[key], relax).plus(activities.get(key))
                continue
            share, rows = GRAMS[wanted.feature].gram(*(made[name] for name in wanted.inputs))
            share = share.double() / (rows if batch_mean else 1)
            sums[key] = sums[key].add_(share) if key in sums else share

    watched = [block for block in blocks if block.name in by_block]
    with watching(watched, show) as runs, evaluating(model), torch.no_grad():
        images = run()
    images = summed_over_processes(sums, activities, images)
    if images == 0:
        raise UserError("consolidate got no images: the loader is empty.")
    _check_seen(watched, runs, by_block, counts)
    for key, total in [*sums.items(), *((key, seen.time) for key, seen in activities.items())]:
        if not torch.isfinite(total).all():
            raise UserError(f"The feature {key[1]} of {key[0]} holds NaN or infinite values.")
    named = named_parameters(model)
    boxes = {
        part.name: box(part.of(named[part.parameter]).detach(), activities[wanted.key], relax)
        for _, part, wanted in protected
        if wanted.elementwise
    }
    return Gathered(sums, boxes), images


def summed_over_processes(sums: dict[Key, Tensor], activities: dict[Key, Activity], images: int) -> int:
    """With several processes, each of which saw its own share of the images: everybody's sums, the same in each."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return images
    if torch.distributed.get_world_size() == 1:
        return images
    for key in sorted(sums):
        torch.distributed.all_reduce(sums[key])
    for key in sorted(activities):
        torch.distributed.all_reduce(activities[key].time, torch.distributed.ReduceOp.MAX)
        for total in (activities[key].k, activities[key].y):
            if total is not None:
                torch.distributed.all_reduce(total)
    device = next(iter([*sums.values(), *(seen.time for seen in activities.values())])).device
    count = torch.tensor(images, device=device)
    torch.distributed.all_reduce(count)
    return int(count)


def _active(features: Features, delta: Tensor, scan: str, relax: float) -> Activity:
    if relax == 0:
        return activity(delta)
    return activity_and_sensitivity(value(features, scan))


def _check_seen(
    blocks: Sequence[Block],
    runs: Mapping[str, int],
    wanted: Mapping[str, Mapping[Key, Wanted]],
    seen: Mapping[Key, int],
) -> None:
    for block in blocks:
        for key in wanted[block.name]:
            if runs[block.name] == 0 and not block.selective:
                raise UserError(
                    f"consolidate saw nothing go into {block.name}: the forward function does not run it, or uses its "
                    f"weight without calling it; leave=('{block.name}',) leaves it out."
                )
            if runs[block.name] == 0:
                raise UserError(f"consolidate saw no features of {block.name}: the forward function does not run it.")
            if seen.get(key, 0) < runs[block.name]:
                raise UserError(
                    f"{block.name} ran without showing its feature {key[1]}: a fused kernel bypasses its layers; "
                    "choose its plain path (use_fast_path=False or use_mem_eff_path=False in mamba_ssm)."
                )
