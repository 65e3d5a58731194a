"""Parts `block`, `step` and `inference`: what a whole network, or its last block, takes."""

import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from mambacl.bench.models import (
    CLASSES,
    autocast,
    build,
    first_that_fits,
    free_memory,
    images,
    make_loop,
    new_step,
    products,
    setting,
    without_kernels,
)
from mambacl.bench.nullspace import fill_with_random
from mambacl.bench.result import Result, Row
from mambacl.bench.sizes import Case, Sizes
from mambacl.bench.timing import Clock
from mambacl.methods import Method
from mambacl.nullspace import NullSpace
from mambacl.training.recorded import Recorded
from mambacl.training.step import WARM_UP

KERNELS, PLAIN = "kernels", "plain"
BLOCK_NOTES = (
    "The last block of a model, with the gradients that Mamba-CL wants: of its trained parameters and of the block's "
    "input. plain: PyTorch operations only, the scan included. forward: without gradients.",
)
METHODS = {"sequential": "sequential", "projected": "mamba-cl"}
IN_A_ROW = 5  # steps before anybody waits for the GPU, as in training
PATIENCE = 10  # times the usual: the difference of two times is wanted
PLAIN_STEPS = 3
STEP_NOTES = (
    "Loss, backward and optimizer, images at hand; sequential: plain fine-tuning of the same parameters; projected: "
    "Mamba-CL with the setting paper and a tenth of the directions protected. Steps of both in turn, in one run. "
    "plain: the sequential step in PyTorch operations only, the scan included; none where it does not fit into memory.",
)
STEP_GPU_NOTE = (
    "recorded: the loop replayed both as CUDA graphs. peak GB: of the GPU's memory in a step that is not recorded, "
    "each method by itself; Mamba-CL's covariances are part of it."
)
INFERENCE_NOTES = ("A call that is waited for, images at hand. Mamba-CL adds nothing to it but its classifiers.",)
INFERENCE_GPU_NOTE = (
    "call ms: not recorded; recorded ms: replayed as a CUDA graph (`mambacl.recorded`), on which ms per image and "
    "images per second are based. GPU ms: the GPU's own time for a call, launching left out; none where it cannot be "
    "told apart."
)


def measure_block(clock: Clock, sizes: Sizes) -> Result:
    result = Result(f"One block on {clock.device.type}", notes=list(BLOCK_NOTES))
    for case in sizes.block:
        for name in sizes.precisions:
            result.rows += first_that_fits(case, partial(_block_rows, clock, case, name))
    return result


def _block_rows(clock: Clock, case: Case, name: str, batch: int) -> list[Row]:
    model = build(case, clock.device)
    space = NullSpace(model, setting("paper"))
    space.freeze_others()
    block = model.get_submodule(space.selection.blocks[-1].name.rpartition(".")[0])
    tokens = _input_of(block, model, images(case, model, batch)).requires_grad_()
    wanted = [tokens, *(parameter for parameter in block.parameters() if parameter.requires_grad)]

    def forward() -> Tensor:
        with torch.no_grad(), autocast(name, clock.device):
            return block(tokens)

    def both() -> object:
        with autocast(name, clock.device):
            y = block(tokens)
        return torch.autograd.grad(y, wanted, torch.ones_like(y))

    rows: list[Row] = []
    for mode in (KERNELS, PLAIN):
        with products(name), without_kernels() if mode == PLAIN else nullcontext():
            once, whole = clock.on_device(forward), clock.on_device(both)
        row: Row = {
            "model": case.model,
            "batch": batch,
            "precision": name,
            "with": mode,
            "forward_ms": 1e3 * once.seconds,
            "forward_and_backward_ms": 1e3 * whole.seconds,
            "images_per_second": batch / whole.seconds,
            "plain_/_kernels": None,
        }
        if clock.device.type == "cuda":
            row["queued"] = once.queued and whole.queued
        rows.append(row)
    rows[0]["plain_/_kernels"] = _both_ms(rows[1]) / _both_ms(rows[0])
    return rows


def _both_ms(row: Row) -> float:
    found = row["forward_and_backward_ms"]
    assert isinstance(found, float)
    return found


def _input_of(block: nn.Module, model: nn.Module, batch: Tensor) -> Tensor:
    """What the block gets when the model sees these images."""
    seen: list[Tensor] = []
    hook = block.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
    try:
        with torch.no_grad():
            model(batch)
    finally:
        hook.remove()
    return seen[0].clone()


def measure_step(clock: Clock, sizes: Sizes) -> Result:
    on_gpu = clock.device.type == "cuda"
    result = Result(f"Training step on {clock.device.type}", notes=[*STEP_NOTES, *([STEP_GPU_NOTE] if on_gpu else [])])
    for case in sizes.step:
        past = Past()
        for name in sizes.precisions:
            result.rows.append(first_that_fits(case, partial(_step_row, clock, case, name, past)))
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


def _step_row(clock: Clock, case: Case, name: str, past: Past, batch: int) -> Row:
    model = build(case, clock.device)
    given = images(case, model, batch)
    labels = torch.arange(batch, device=clock.device) % CLASSES
    with products(name):  # the loop does its own autocast
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
    row["images_per_second"] = batch / seconds["projected"]
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
    return new_step(loop, given, labels)


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


def measure_inference(clock: Clock, sizes: Sizes) -> Result:
    on_gpu = clock.device.type == "cuda"
    result = Result(
        f"Inference on {clock.device.type}", notes=[*INFERENCE_NOTES, *([INFERENCE_GPU_NOTE] if on_gpu else [])]
    )
    for case in sizes.inference:
        for name in sizes.precisions:
            result.rows += _inference_rows(clock, case, name)
            free_memory()
    return result


def _inference_rows(clock: Clock, case: Case, name: str) -> list[Row]:
    model = build(case, clock.device)
    method = make_loop("frozen", model, setting("paper")).method
    rows: list[Row] = []
    for batch in case.batches:
        given = images(case, model, batch)
        predict = partial(_predict, method, given, name)
        with products(name):
            seconds = clock.wall(predict)
            row: Row = {"model": case.model, "batch": batch, "precision": name, "call_ms": 1e3 * seconds}
            if clock.device.type == "cuda":
                fast = Recorded(partial(_predict, method, name=name), model.parameters)
                seconds = clock.wall(partial(_without_gradients, fast, given))
                row["recorded_ms"] = 1e3 * seconds if fast.recordings() else None
            row |= {"ms_per_image": 1e3 * seconds / batch, "images_per_second": batch / seconds}
            if clock.device.type == "cuda":
                own = clock.on_device(predict)
                row["GPU_ms"] = 1e3 * own.seconds if own.queued else None
        rows.append(row)
    return rows


@torch.no_grad()
def _without_gradients(call: Recorded, given: Tensor) -> Tensor:
    return call(given)


@torch.no_grad()
def _predict(method: Method, given: Tensor, name: str) -> Tensor:
    with autocast(name, given.device):
        return method.predict(given)
