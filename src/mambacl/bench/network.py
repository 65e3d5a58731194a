"""Parts `block`, `step` and `inference`: times of a network, or of its last block."""

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
    build,
    each_case,
    first_that_fits,
    free_memory,
    images,
    make_loop,
    new_step,
    products,
    recorded,
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
from mambacl.training.step import WARM_UP, autocast

KERNELS, PLAIN = "kernels", "plain"
BLOCK_NOTES = (
    "The last block of a model, with the gradients that Mamba-CL needs: of its trained parameters and of the block's "
    "input. plain: only PyTorch operations, also for the scan. forward: without gradients.",
)
METHODS = {"sequential": "sequential", "projected": "mamba-cl"}
IN_A_ROW = 5  # steps between waits for the GPU, as in training
PATIENCE = 10  # times the usual budget, because the result is a difference of two times
PLAIN_STEPS = 3
STEP_NOTES = (
    "Loss, backward and optimizer, with images already loaded. sequential: plain fine-tuning of the same parameters; "
    "projected: Mamba-CL with the setting paper and a tenth of the directions protected; both take turns in one run. "
    "plain: the sequential step with only PyTorch operations, also for the scan; empty if it does not fit into memory.",
)
STEP_GPU_NOTE = (
    "recorded: both steps were replayed as CUDA graphs. peak GB: GPU memory in a step that is not recorded, for each "
    "method alone; includes Mamba-CL's covariances."
)
INFERENCE_NOTES = ("A call until its result is ready, with images already loaded. Mamba-CL adds only its classifiers.",)
INFERENCE_GPU_NOTE = (
    "call ms: not recorded; recorded ms: replayed as a CUDA graph (`mambacl.recorded`), which ms per image and images "
    "per second are based on. GPU ms: GPU time of a call without launching; empty if it cannot be separated."
)


def measure_block(clock: Clock, sizes: Sizes) -> Result:
    rows = each_case(
        sizes.block,
        sizes.precisions,
        lambda case, precision: first_that_fits(case, partial(_block_rows, clock, case, precision)),
    )
    return Result(f"One block on {clock.device.type}", rows, list(BLOCK_NOTES))


def _block_rows(clock: Clock, case: Case, precision: str, batch: int) -> list[Row]:
    model = build(case, clock.device)
    space = NullSpace(model, setting("paper"))
    space.freeze_others()
    block = model.get_submodule(space.selection.blocks[-1].name.rpartition(".")[0])
    tokens = _input_of(block, model, images(case, model, batch)).requires_grad_()
    wanted = [tokens, *(parameter for parameter in block.parameters() if parameter.requires_grad)]

    def forward() -> Tensor:
        with torch.no_grad(), autocast(clock.device, precision == "bf16"):
            return block(tokens)

    def both() -> object:
        with autocast(clock.device, precision == "bf16"):
            y = block(tokens)
        return torch.autograd.grad(y, wanted, torch.ones_like(y))

    rows: list[Row] = []
    for mode in (KERNELS, PLAIN):
        with products(precision), without_kernels() if mode == PLAIN else nullcontext():
            forward_time, total_time = clock.on_device(forward), clock.on_device(both)
        row: Row = {
            "model": case.model,
            "batch": batch,
            "precision": precision,
            "with": mode,
            "forward_ms": 1e3 * forward_time.seconds,
            "forward_and_backward_ms": 1e3 * total_time.seconds,
            "images_per_second": batch / total_time.seconds,
            "plain_/_kernels": None,
        }
        if clock.device.type == "cuda":
            row["queued"] = forward_time.queued and total_time.queued
        rows.append(row)
    rows[0]["plain_/_kernels"] = rows[1]["forward_and_backward_ms"] / rows[0]["forward_and_backward_ms"]
    return rows


def _input_of(block: nn.Module, model: nn.Module, batch: Tensor) -> Tensor:
    """The block's input for these images."""
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
        finished: dict[str, Tensor] = {}
        for precision in sizes.precisions:
            result.rows.append(first_that_fits(case, partial(_step_row, clock, case, precision, finished)))
            free_memory()
    return result


def _finish_task(space: NullSpace, state: dict[str, Tensor]) -> None:
    """Puts the space into its state after a task, which is decomposed once and serves all spaces of the same model."""
    if state:
        space.load_state_dict(state)
    else:
        fill_with_random(space)
        copies: dict[int, Tensor] = {}  # parts that share a tensor still share it
        # On the CPU, because the GPU's memory is measured.
        state.update((name, copies.setdefault(id(t), t.cpu())) for name, t in space.state_dict().items())


def _step_row(clock: Clock, case: Case, precision: str, finished: dict[str, Tensor], batch: int) -> Row:
    model = build(case, clock.device)
    given = images(case, model, batch)
    labels = torch.arange(batch, device=clock.device) % CLASSES

    def make(method: str, fast: bool = True) -> partial[None]:
        """A step of the loop; every call takes the next step."""
        loop = make_loop(method, model, setting("paper"), bf16=precision == "bf16", fast=fast)
        if method == METHODS["projected"]:
            _finish_task(cast(Any, loop.method).space, finished)
        return new_step(loop, given, labels)

    with products(precision):  # the loop itself uses autocast
        peaks = {}
        for key, method in METHODS.items():
            peaks[key] = _peak(clock, partial(make, method))
            free_memory()
        steps = {key: make(method) for key, method in METHODS.items()}
        for step in steps.values():
            _warm_up(clock, step)
        seconds = replace(clock, budget=PATIENCE * clock.budget).in_turn(steps, IN_A_ROW)
    row: Row = {"model": case.model, "batch": batch, "precision": precision}
    row |= {f"{key}_ms": 1e3 * seconds[key] for key in METHODS}
    row["per_cent_slower"] = 100 * (seconds["projected"] / seconds["sequential"] - 1)
    row["images_per_second"] = batch / seconds["projected"]
    if clock.device.type == "cuda":
        row["recorded"] = all(map(recorded, steps.values()))
    del steps
    with products(precision), without_kernels():
        plain, peaks["plain"] = _plain(clock, partial(make, METHODS["sequential"], fast=False))
    row["plain_ms"] = None if plain is None else 1e3 * plain
    row["plain_/_sequential"] = None if plain is None else plain / seconds["sequential"]
    row |= {f"peak_GB_{key}": None if peak is None else peak / 1e9 for key, peak in peaks.items()}
    return row


def _warm_up(clock: Clock, step: partial[None]) -> None:
    """Takes steps until the loop has recorded one. It records only if peak memory was low enough, so that is reset."""
    if clock.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(clock.device)
    for _ in range(WARM_UP + 1):
        step()


def _plain(clock: Clock, make: Callable[[], partial[None]]) -> tuple[float | None, int | None]:
    """Seconds per step, and bytes on the GPU; None if memory does not suffice."""
    free_memory()
    try:
        peak = _peak(clock, make)
        step = make()
        step()
        return statistics.median(clock.once(step) for _ in range(PLAIN_STEPS)), peak
    except torch.cuda.OutOfMemoryError:
        return None, None


def _peak(clock: Clock, make: Callable[[], partial[None]]) -> int | None:
    """Peak bytes on the GPU in the second step, when the optimizer has its state and nothing is recorded yet. None on
    the CPU, where the memory of a step cannot be separated from the process's."""
    if clock.device.type != "cuda":
        return None
    step = make()
    step()
    return clock.memory(step)[1]


def measure_inference(clock: Clock, sizes: Sizes) -> Result:
    on_gpu = clock.device.type == "cuda"
    rows = each_case(sizes.inference, sizes.precisions, partial(_inference_rows, clock))
    notes = [*INFERENCE_NOTES, *([INFERENCE_GPU_NOTE] if on_gpu else [])]
    return Result(f"Inference on {clock.device.type}", rows, notes)


def _inference_rows(clock: Clock, case: Case, precision: str) -> list[Row]:
    model = build(case, clock.device)
    method = make_loop("frozen", model, setting("paper")).method
    rows: list[Row] = []
    for batch in case.batches:
        given = images(case, model, batch)
        predict = partial(_predict, method, given, precision)
        with products(precision):
            seconds = clock.wall(predict)
            row: Row = {"model": case.model, "batch": batch, "precision": precision, "call_ms": 1e3 * seconds}
            if clock.device.type == "cuda":
                fast = Recorded(partial(_predict, method, precision=precision), model.parameters)
                with torch.no_grad():
                    seconds = clock.wall(partial(fast, given))
                row["recorded_ms"] = 1e3 * seconds if fast.recordings() else None
            row |= {"ms_per_image": 1e3 * seconds / batch, "images_per_second": batch / seconds}
            if clock.device.type == "cuda":
                own = clock.on_device(predict)
                row["GPU_ms"] = 1e3 * own.seconds if own.queued else None
        rows.append(row)
    return rows


@torch.no_grad()
def _predict(method: Method, given: Tensor, precision: str) -> Tensor:
    with autocast(given.device, precision == "bf16"):
        return method.predict(given)
