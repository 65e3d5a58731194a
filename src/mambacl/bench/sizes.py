"""The sizes of each part of the bench: the paper's on a GPU, nano's on the CPU."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mambacl.bench.shapes import GPU_SHAPES, SHAPES, Shape

NANO, LARGE = "defocus_mamba_nano", "defocus_mamba_large_22k"
ONE_BLOCK = {"depth": 1}


@dataclass(frozen=True)
class Case:
    """A model with random weights, and its input sizes."""

    model: str
    batches: tuple[int, ...] = ()
    """batch sizes: a part uses the first that fits into memory, or all of them"""
    pixels: int | None = None
    """image size; the model's if None"""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sizes:
    shapes: Mapping[str, Shape]
    inputs: tuple[str, ...]
    """types of the scan's inputs"""
    precisions: tuple[str, ...]
    """precisions of a block, a step and inference: float32, tf32, bf16"""
    block: tuple[Case, ...]
    step: tuple[Case, ...]
    nullspace: tuple[Case, ...]
    inference: tuple[Case, ...]
    run: Mapping[str, Any]
    """changes to the preset of the part run"""
    copy_bytes: int
    repeats: int
    budget: float
    """approximate seconds per measurement"""


CPU = Sizes(
    shapes={name: SHAPES[name] for name in ("cpu", "nano")},
    inputs=("float32", "bfloat16"),
    precisions=("float32", "bf16"),
    block=(Case(NANO, (8,), options=ONE_BLOCK),),
    step=(Case(NANO, (8,)),),
    nullspace=(Case(NANO),),
    inference=(Case(NANO, (1, 32, 200)),),
    run={"stream": {"train_per_class": 40}, "training": {"passes": 1}},
    copy_bytes=1 << 28,
    repeats=15,
    budget=1.5,
)
CPU_QUICK = replace(
    CPU,
    shapes={"cpu": SHAPES["cpu"]},
    inputs=("float32",),
    precisions=("float32",),
    run={"stream": {"train_per_class": 10}, "training": {"passes": 1}},
    copy_bytes=1 << 26,
    repeats=5,
    budget=0.3,
)
GPU = Sizes(
    shapes={name: SHAPES[name] for name in GPU_SHAPES},
    inputs=("float32", "bfloat16"),
    precisions=("float32", "tf32", "bf16"),
    block=(
        Case(LARGE, (50,), 192, ONE_BLOCK),
        Case(NANO, (200,), options=ONE_BLOCK),
        Case("vim_small", (64,), options=ONE_BLOCK),
    ),
    step=(Case(NANO, (200,)), Case(LARGE, (200, 100, 50, 25), 192), Case(LARGE, (50, 25), 192)),
    nullspace=(Case(NANO), Case(LARGE, (), 192)),
    inference=(Case(NANO, (1, 1000)), Case(LARGE, (1, 100), 192)),
    run={"precision": "bf16"},
    copy_bytes=1 << 30,
    repeats=21,
    budget=0.6,
)
GPU_QUICK = replace(
    GPU,
    shapes={name: SHAPES[name] for name in ("defocus-l-50", "nano")},
    precisions=("float32", "bf16"),
    block=GPU.block[:1],
    step=GPU.step[:1],
    nullspace=GPU.nullspace[:1],
    inference=GPU.inference[:1],
    run={**CPU.run, "precision": "bf16"},
    repeats=7,
    budget=0.3,
)


def default_sizes(device: torch.device, quick: bool) -> Sizes:
    if device.type == "cuda":
        return GPU_QUICK if quick else GPU
    return CPU_QUICK if quick else CPU
