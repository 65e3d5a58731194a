"""Part `step`: a training step of the product's own loop, in plain fine-tuning and projected."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from mambacl.bench.models import (
    CLASSES,
    build,
    first_that_fits,
    free_memory,
    images,
    make_loop,
    products,
    setting,
    without_kernels,
)
from mambacl.bench.nullspace import fill_with_random
from mambacl.bench.result import Result, Row
from mambacl.bench.sizes import Case, Sizes
from mambacl.bench.timing import Clock
from mambacl.nullspace import NullSpace
from mambacl.training.step import WARM_UP

METHODS = {"sequential": "sequential", "projected": "mamba-cl"}
IN_A_ROW = 5  # steps before anybody waits for the GPU, as in training
PATIENCE = 10  # times the usual: the difference of two times is wanted
PLAIN_STEPS = 3
NOTES = (
    "Loss, backward and optimizer, images at hand; sequential: plain fine-tuning of the same parameters; projected: "
    "Mamba-CL with the setting paper and a tenth of the directions protected. Steps of both in turn, in one run. "
    "plain: the sequential step in PyTorch operations only, the scan included; none where it does not fit into memory.",
)
GPU_NOTE = (
    "recorded: the loop replayed both as CUDA graphs. peak GB: of the GPU's memory in a step that is not, each method "
    "by itself; Mamba-CL's covariances are part of it."
)


def measure(clock: Clock, sizes: Sizes) -> Result:
    on_gpu = clock.device.type == "cuda"
    result = Result(f"Training step on {clock.device.type}", notes=[*NOTES, *([GPU_NOTE] if on_gpu else [])])
    for case in sizes.step:
        past = Past()
        for name in sizes.precisions:
            result.rows.append(first_that_fits(case, partial(_row, clock, case, name, past)))
            free_memory()
    return result


class Past:
    """A task that a space has behind it; decomposed once, it serves all spaces of the same model."""

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}  # beside the GPU, whose memory is measured

    def give(self, space: NullSpace) -> None:
        if not self.state:
            fill_with_random(space)
            copies: dict[int, Tensor] = {}  # what parts share they go on sharing
            self.state = {name: copies.setdefault(id(t), t.cpu()) for name, t in space.state_dict().items()}
        else:
            space.load_state_dict(self.state)


def _row(clock: Clock, case: Case, name: str, past: Past, batch: int) -> Row:
    model = build(case, clock.device)
    given = images(case, model, batch)
    labels = torch.arange(batch, device=clock.device) % CLASSES
    with products(name):  # the loop has an autocast of its own
        peaks = {}
        for key, method in METHODS.items():
            peaks[key] = _peak(clock, partial(_stepper, method, model, given, labels, name, past))
            free_memory()
        steps = {key: _stepper(method, model, given, labels, name, past) for key, method in METHODS.items()}
        for step in steps.values():
            _warm_up(clock, step)
        seconds = replace(clock, budget=PATIENCE * clock.budget).in_turn(steps, IN_A_ROW)
    row: Row = {"model": case.model, "batch": batch, "precision": name}
    row |= {f"{key}_ms": 1e3 * seconds[key] for key in METHODS}
    row["per_cent_slower"] = 100 * (seconds["projected"] / seconds["sequential"] - 1)
    row["images_a_second"] = batch / seconds["projected"]
    if clock.device.type == "cuda":
        row["recorded"] = all(getattr(step.func, "_recorded", None) is not None for step in steps.values())
    del steps
    with products(name), without_kernels():
        plain, peaks["plain"] = _plain(
            clock, partial(_stepper, METHODS["sequential"], model, given, labels, name, past, False)
        )
    row["plain_ms"] = None if plain is None else 1e3 * plain
    row["plain_/_sequential"] = None if plain is None else plain / seconds["sequential"]
    row |= {f"peak_GB_{key}": None if peak is None else peak / 1e9 for key, peak in peaks.items()}
    return row


def _stepper(
    method: str, model: nn.Module, given: Tensor, labels: Tensor, name: str, past: Past, fast: bool = True
) -> partial[None]:
    """A step of the loop, the next at each call."""
    loop = make_loop(method, model, setting("paper"), bf16=name == "bf16", fast=fast)
    if method == METHODS["projected"]:
        past.give(cast(Any, loop.method).space)
    loop._new_optimizer()
    loop._new_step()
    assert loop.step is not None
    return partial(loop.step, given, labels, 1.0)


def _warm_up(clock: Clock, step: partial[None]) -> None:
    """The loop records a step after the first few, if memory has had room enough since a run began."""
    if clock.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(clock.device)
    for _ in range(WARM_UP + 1):
        step()


def _plain(clock: Clock, make: Callable[[], partial[None]]) -> tuple[float | None, int | None]:
    """Seconds of a step, and bytes on the GPU; None where memory does not suffice."""
    free_memory()
    try:
        peak = _peak(clock, make)
        step = make()
        step()
        return statistics.median(clock.once(step) for _ in range(PLAIN_STEPS)), peak
    except torch.cuda.OutOfMemoryError:
        return None, None


def _peak(clock: Clock, make: Callable[[], partial[None]]) -> int | None:
    """Bytes on the GPU in the second step, which finds the optimizer set up and is not recorded yet. Of a process it
    could not be told apart."""
    if clock.device.type != "cuda":
        return None
    step = make()
    step()
    torch.cuda.reset_peak_memory_stats(clock.device)
    clock.once(step)
    return torch.cuda.max_memory_allocated(clock.device)
