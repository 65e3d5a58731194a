"""The cost of protecting a model, before training: bytes by place, projection FLOPs, decomposition time.

Everything but the time follows from shapes. The time is measured for one decomposition of each size and multiplied by
their number.
"""

import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from mambacl.errors import UserError
from mambacl.log import logger
from mambacl.nullspace.projectors import basis_dtype, decompose
from mambacl.nullspace.space import NullSpace
from mambacl.nullspace.statistics import evaluating, watching

FLOAT32, FLOAT64 = 4, 8


@dataclass(frozen=True)
class Plan:
    blocks: int
    widths: tuple[int, ...]  # of the SSMs, without duplicates
    tokens: tuple[int, ...]
    matrices: dict[int, int]  # covariances to decompose, by size
    projector_bytes: int  # bases, for the assumed share of protected directions
    dense_bytes: int  # as dense matrices, in the same precision
    covariance_bytes: int  # kept between tasks, in float64
    gathering_bytes: int  # of one task, on the device while they are gathered
    step_bytes: int  # on the device during a step: parameters before it and temporaries
    file_bytes: int  # the null-space file of a run after a task; a run keeps two
    projection_flops: int  # per step
    dense_flops: int
    covariances: str  # where they are kept
    projectors: str
    decomposition_seconds: float | None  # per task; None without a calibration

    def by_place(self) -> dict[str, int]:
        """Bytes between tasks on the device, in CPU memory and on disk (without a run's files)."""
        places = {"device": 0, "cpu": 0, "disk": 0}
        places[self.projectors] += self.projector_bytes
        places[self.covariances] += self.covariance_bytes
        return places


def make_plan(
    space: NullSpace,
    images: Tensor,
    protected: float = 0.1,
    tasks: int = 1,
    calibrate_on: torch.device | None = None,
    kernels: bool = False,
) -> Plan:
    """`space`: its model can be on the meta device; `images`: one batch of the right size; `protected`: the assumed
    share of protected directions; `calibrate_on`: the device to time the decomposition on; `kernels`: whether kernels
    project the steps, as on a GPU."""
    if not 0.0 <= protected <= 1.0:
        raise UserError(f"The protected share must lie between 0 and 1, got {protected}.")
    logger.info("%s", space.describe())
    setting, named = space.setting, dict(space.model.named_parameters())
    itemsize = torch.empty(0, dtype=basis_dtype(space.model, setting.storage)).element_size()
    keys: dict[tuple[str, str], tuple[int, int]] = {}  # groups and size
    together: dict[tuple[int, int, int], int] = {}  # values that one product projects
    working: dict[tuple[int, int, int], int] = {}
    flops = dense_flops = 0
    for protection in space.selection.projected():
        part = protection.part
        groups, rows, size = part.matrix(named[part.parameter]).shape
        keys[protection.key] = groups, size
        flops += 4 * groups * rows * size * _kept(size, protected)
        dense_flops += 2 * groups * rows * size * size
        shape, kept = (groups, rows, size), _kept(size, protected)
        together[shape] = together.get(shape, 0) + groups * rows * size
        # Kernels need only the changes times the basis; otherwise also the changes and a copy of the bases.
        needed = rows * kept if kernels else rows * kept + rows * size + size * kept
        working[shape] = working.get(shape, 0) + groups * needed
    squares = sum(groups * size * size for groups, size in keys.values())
    bases = sum(groups * size * _kept(size, protected) for groups, size in keys.values())
    matrices: dict[int, int] = {}
    for groups, size in keys.values():
        matrices[size] = matrices.get(size, 0) + groups
    widths, tokens = _shapes(space, images)
    held = tasks if setting.keep_tasks else 1
    return Plan(
        blocks=sum(block.selective for block in space.selection.blocks),
        widths=tuple(sorted(set(widths))),
        tokens=tuple(sorted(set(tokens))),
        matrices=matrices,
        projector_bytes=bases * itemsize,
        dense_bytes=squares * itemsize,
        covariance_bytes=squares * FLOAT64 * held,
        gathering_bytes=squares * FLOAT64,
        step_bytes=FLOAT32 * (sum(together.values()) + max(working.values(), default=0)),
        file_bytes=squares * FLOAT64 * held + bases * itemsize,
        projection_flops=flops,
        dense_flops=dense_flops,
        covariances=setting.covariances,
        projectors=setting.projectors,
        decomposition_seconds=None if calibrate_on is None else decomposition_seconds(matrices, calibrate_on),
    )


def _kept(size: int, protected: float) -> int:
    """Columns of the basis, which spans the smaller of the two spaces."""
    count = round(protected * size)
    return min(count, size - count)


def _shapes(space: NullSpace, images: Tensor) -> tuple[list[int], list[int]]:
    """Channels and tokens of every SSM's input."""
    widths, tokens = [], []

    def show(_: object, features: object) -> None:
        if isinstance(features, dict) and isinstance(features.get("x"), Tensor):
            widths.append(features["x"].shape[-1])
            tokens.append(features["x"].shape[1])

    with watching([b for b in space.selection.blocks if b.selective], show), evaluating(space.model), torch.no_grad():
        space.model(images)
    return widths, tokens


def decomposition_seconds(matrices: dict[int, int], device: torch.device) -> float:
    """The time to `decompose` all matrices: the median of a few runs per size, times their number."""
    total = 0.0
    for size, count in matrices.items():
        groups = min(count, 256) if size <= 32 else 1  # the small ones, of depthwise convolutions, in batches
        rows = torch.randn(groups, 2 * size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        rows = rows.to(device) * torch.logspace(0, -3, size, dtype=torch.float64, device=device)
        covariance = rows.mT @ rows if groups > 1 else rows[0].T @ rows[0]
        seconds = []
        for _ in range(4 if size <= 1024 else 3):
            _synchronize(device)
            started = time.perf_counter()
            decompose([covariance], "energy:0.99", torch.float64, torch.float32)
            _synchronize(device)
            seconds.append(time.perf_counter() - started)
        total += statistics.median(seconds[1:]) * count / groups
    return total


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def paper_values(blocks: int, width: int, tokens: int) -> int:
    """The paper's count of auxiliary values, 2 S (2 D^2 + L^2): covariances and dense projectors."""
    return 2 * blocks * (2 * width**2 + tokens**2)


def paper_projector_bytes(blocks: int, width: int, tokens: int) -> int:
    """The paper's estimate of the GPU memory of its dense projectors in half precision."""
    return paper_values(blocks, width, tokens)  # half of the values, two bytes each
