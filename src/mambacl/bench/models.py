"""Models with random weights, and what the benchmarks of them share."""

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from mambacl.backbones import create_model
from mambacl.bench.result import Row
from mambacl.bench.sizes import Case
from mambacl.errors import UserError
from mambacl.methods import METHODS, Method, Setup, Task
from mambacl.nullspace import Setting
from mambacl.nullspace.settings import setting_named
from mambacl.ops.precision import float32_products
from mambacl.ops.scan import ENVIRONMENT_VARIABLE
from mambacl.ops.switch import plain
from mambacl.training.loop import Loop
from mambacl.training.progress import Progress
from mambacl.training.recipe import Recipe

PROTECTED = 0.1  # share of the directions that are protected
CLASSES = 10
T = TypeVar("T")


def build(case: Case, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        return create_model(case.model, num_classes=0, **case.options).eval()


def pixels(case: Case, model: nn.Module) -> int:
    configured = cast(Any, model).default_cfg
    return case.pixels or configured["input_size"][-1]


def images(case: Case, model: nn.Module, batch: int) -> Tensor:
    """Normalized noise on the model's device."""
    size, device = pixels(case, model), next(model.parameters()).device
    return torch.randn(batch, 3, size, size, generator=torch.Generator(device).manual_seed(1), device=device)


def setting(name: str) -> Setting:
    """A named setting that protects this benchmark's share of directions, independent of the features."""
    return setting_named(name).override(rank=f"fraction:{1 - PROTECTED}")


def make_loop(method_name: str, model: nn.Module, setting: Setting, bf16: bool = False, fast: bool = True) -> Loop:
    """The loop of a run in its first task, without stream and folder, to take single steps."""
    device = next(model.parameters()).device
    method: Method = METHODS.get(method_name)(model, Setup(setting))
    method.start_task(Task(0, CLASSES, 0, seed=0))
    nothing: Any = None
    return Loop(method, nothing, Recipe(), nothing, Progress(), {}, device, bf16, fast=fast)


def new_step(loop: Loop, images: Tensor, labels: Tensor) -> partial[None]:
    """A step of the loop with a new optimizer; every call takes the next step."""
    loop._new_optimizer()
    loop._new_step()
    assert loop.step is not None
    return partial(loop.step, images, labels, 1.0)


def recorded(step: partial[None]) -> bool:
    """Whether this step of a loop is replayed as a CUDA graph."""
    return cast(Any, step.func)._recorded is not None


def first_that_fits(case: Case, measure: Callable[[int], T]) -> T:
    """The result of `measure` for the largest batch that fits into memory."""
    for batch in case.batches:
        try:
            return measure(batch)
        except torch.cuda.OutOfMemoryError:
            pass
        free_memory()
    raise UserError(
        f"{case.model} does not fit into this GPU's memory, even with {case.batches[-1]} images: use a larger GPU."
    )


def each_case(cases: Iterable[Case], names: Iterable[str], measure: Callable[[Case, str], list[Row]]) -> list[Row]:
    """The rows of all cases with each precision or setting."""
    rows: list[Row] = []
    names = list(names)
    for case in cases:
        for name in names:
            rows += measure(case, name)
            free_memory()
    return rows


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def products(precision: str) -> AbstractContextManager[None]:
    """Products of float32 matrices as in a run: with TF32 for tf32 and bf16, in full for float32."""
    return float32_products(tf32=precision != "float32")


@contextmanager
def without_kernels() -> Iterator[None]:
    """Plain PyTorch everywhere: the plain twins of the fused kernels, and the PyTorch scan."""
    before = os.environ.get(ENVIRONMENT_VARIABLE)
    os.environ[ENVIRONMENT_VARIABLE] = "torch"
    try:
        with plain():
            yield
    finally:
        if before is None:
            del os.environ[ENVIRONMENT_VARIABLE]
        else:
            os.environ[ENVIRONMENT_VARIABLE] = before
