"""Part `block`: one block of a model, forward and backward, with the kernels and without."""

from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from mambacl.bench.models import autocast, build, first_that_fits, images, products, setting, without_kernels
from mambacl.bench.result import Result, Row
from mambacl.bench.sizes import Case, Sizes
from mambacl.bench.timing import Clock
from mambacl.nullspace import NullSpace

KERNELS, PLAIN = "kernels", "plain"
NOTES = (
    "The last block of a model, with the gradients that Mamba-CL wants: of its trained parameters and of the block's "
    "input. plain: PyTorch operations only, the scan included. forward: without gradients.",
)


def measure(clock: Clock, sizes: Sizes) -> Result:
    result = Result(f"One block on {clock.device.type}", notes=list(NOTES))
    for case in sizes.block:
        for name in sizes.precisions:
            result.rows += first_that_fits(case, partial(_rows, clock, case, name))
    return result


def _rows(clock: Clock, case: Case, name: str, batch: int) -> list[Row]:
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
            "images_a_second": batch / whole.seconds,
            "plain_/_kernels": None,
        }
        if clock.device.type == "cuda":
            row["queued"] = once.queued and whole.queued
        rows.append(row)
    rows[0]["plain_/_kernels"] = _whole(rows[1]) / _whole(rows[0])
    return rows


def _whole(row: Row) -> float:
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
