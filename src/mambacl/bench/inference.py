"""Part `inference`: milliseconds an image, with a classifier, one image at a time and many."""

from functools import partial

import torch
from torch import Tensor

from mambacl.bench.models import autocast, build, free_memory, images, make_loop, products, setting
from mambacl.bench.result import Result, Row
from mambacl.bench.sizes import Case, Sizes
from mambacl.bench.timing import Clock
from mambacl.methods import Method
from mambacl.training.recorded import Recorded

NOTES = ("A call that is waited for, images at hand. Mamba-CL adds nothing to it but its classifiers.",)
GPU_NOTE = (
    "call ms: the call as it is; recorded ms: the same replayed as a CUDA graph (`mambacl.recorded`), what ms an image "
    "and images a second are of. GPU ms: the GPU's own time for a call, launching left out; none where it cannot be "
    "told apart."
)


def measure(clock: Clock, sizes: Sizes) -> Result:
    on_gpu = clock.device.type == "cuda"
    result = Result(f"Inference on {clock.device.type}", notes=[*NOTES, *([GPU_NOTE] if on_gpu else [])])
    for case in sizes.inference:
        for name in sizes.precisions:
            result.rows += _rows(clock, case, name)
            free_memory()
    return result


def _rows(clock: Clock, case: Case, name: str) -> list[Row]:
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
            row |= {"ms_an_image": 1e3 * seconds / batch, "images_a_second": batch / seconds}
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
