"""Part `memory`: what a training step keeps for its backward pass, and what accumulation and recomputing save."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mambacl.bench.models import (
    CLASSES,
    build,
    each_case,
    first_that_fits,
    images,
    make_loop,
    new_step,
    pixels,
    products,
    recorded,
    setting,
)
from mambacl.bench.result import Result, Row
from mambacl.bench.sizes import Case, Sizes
from mambacl.bench.timing import Clock
from mambacl.methods import Method
from mambacl.training.activations import kept_for_backward, planned
from mambacl.training.step import autocast
from mambacl.tuning import recompute

METHOD = "mamba-cl"
PIECES = 4
SWITCHES = {  # pieces of the batch, and whether blocks are computed again
    "nothing": (1, False),
    f"accumulate {PIECES}": (PIECES, False),
    "recompute": (1, True),
    "both": (PIECES, True),
}
NOTES = (
    "A Mamba-CL step in its first task. kept: bytes that the forward pass of a piece keeps for its backward pass, "
    "counted: they depend on shapes, not on the machine. planned: the same as `mambacl plan` counts it, without the "
    "classifier. Where Triton kernels run, kept is less than on a CPU.",
)


def measure(clock: Clock, sizes: Sizes) -> Result:
    rows = each_case(
        sizes.step,
        sizes.precisions,
        lambda case, precision: first_that_fits(case, partial(_rows, clock, case, precision)),
    )
    return Result(f"Memory of a training step on {clock.device.type}", rows, list(NOTES))


def _rows(clock: Clock, case: Case, precision: str, batch: int) -> list[Row]:
    model, bf16 = build(case, clock.device), precision == "bf16"
    given, labels = images(case, model, batch), torch.arange(batch, device=clock.device) % CLASSES
    rows: list[Row] = []
    with products(precision):
        for switched, (pieces, again) in SWITCHES.items():
            loop = make_loop(METHOD, model, setting("paper"), bf16=bf16)
            loop.recipe = replace(loop.recipe, accumulate=pieces)
            recompute(model, again)
            count = -(-batch // pieces)
            kept = _kept(loop.method, given[:count], labels[:count], bf16)
            expected = planned(model, count, pixels(case, model), clock.device.type, bf16, again).total
            step = new_step(loop, given, labels)
            seconds = clock.wall(step)
            row: Row = {"model": case.model, "batch": batch, "precision": precision, "switched_on": switched}
            row |= {"kept_MB": kept / 1e6, "planned_MB": expected / 1e6, "step_ms": 1e3 * seconds}
            if clock.device.type == "cuda":
                row["recorded"] = recorded(step)
            first = rows[0] if rows else row
            rows.append(row | {"of_the_memory": row["kept_MB"] / first["kept_MB"]})
    recompute(model, False)
    return rows


def _kept(method: Method, images: Tensor, labels: Tensor, bf16: bool) -> int:
    """Bytes kept by the loss of a piece."""

    def run() -> None:
        with autocast(images.device, bf16):
            method.loss(images, labels)

    beside = [*method.model.parameters(), *(p for named in method.named_parameters().values() for _, p in named)]
    return kept_for_backward(run, beside).total
