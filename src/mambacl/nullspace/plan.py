"""What protecting a model will cost, before anything is trained: bytes by place, projection FLOPs, decomposition time.

Everything but the time follows from shapes. The time is that of one decomposition of each size, measured here and now,
times their number.
"""

import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from mambacl.errors import UserError
from mambacl.nullspace.projectors import basis_dtype, decompose
from mambacl.nullspace.space import NullSpace
from mambacl.nullspace.statistics import evaluating, watching

FLOAT32, FLOAT64 = 4, 8


@dataclass(frozen=True)
class Plan:
    blocks: int
    widths: tuple[int, ...]  # of the SSMs, without repetitions
    tokens: tuple[int, ...]
    matrices: dict[int, int]  # covariances to decompose, by size
    projector_bytes: int  # bases on the device, for the share of protected directions assumed
    dense_bytes: int  # the same as dense matrices, in the same precision
    covariance_bytes: int  # kept between tasks, in float64
    gathering_bytes: int  # those of one task, on the device while they are gathered
    step_bytes: int  # on the device during a step: the parameters before it, and what is projected at once
    file_bytes: int  # a run's file of the null space at the end of a task; it keeps two
    projection_flops: int  # a step
    dense_flops: int
    covariances: str  # where they are kept
    decomposition_seconds: float | None  # a task; None without a calibration

    def by_place(self) -> dict[str, int]:
        """Bytes between tasks on the device, in the machine's memory and on disk (without a run's files)."""
        places = {"device": self.projector_bytes, "cpu": 0, "disk": 0}
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
    """`space` of a model, which may be on the meta device; `images`: one batch of their size; `protected`: the share of
    directions assumed to be protected; `calibrate_on`: where to time the decomposition; `kernels`: whether a step is
    projected by kernels, as on a GPU."""
    if not 0.0 <= protected <= 1.0:
        raise UserError(f"The protected share must lie between 0 and 1, got {protected}.")
    setting, named = space.setting, dict(space.model.named_parameters())
    itemsize = torch.empty(0, dtype=basis_dtype(space.model, setting.storage)).element_size()
    keys: dict[tuple[str, str], tuple[int, int]] = {}  # groups and size
    together: dict[tuple[int, int, int], int] = {}  # values that are projected at once
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
        # what the basis holds of the changes; and these, and the bases of the parts taken out of their stack
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
        decomposition_seconds=None if calibrate_on is None else decomposition_seconds(matrices, calibrate_on),
    )


def _kept(size: int, protected: float) -> int:
    """Columns of the basis: the smaller of the two spaces."""
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


def decomposition_seconds(
    matrices: dict[int, int], device: torch.device, rule: str = "energy:0.99", storage: torch.dtype = torch.float32
) -> float:
    """Time of `decompose` for a covariance of each size, the median of a few, times their number."""
    total = 0.0
    for size, count in matrices.items():
        groups = min(count, 256) if size <= 32 else 1  # the small matrices of depthwise convolutions go together
        rows = torch.randn(groups, 2 * size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        rows = rows.to(device) * torch.logspace(0, -3, size, dtype=torch.float64, device=device)
        covariance = rows.mT @ rows if groups > 1 else rows[0].T @ rows[0]
        seconds = []
        for _ in range(4 if size <= 1024 else 3):
            _synchronize(device)
            started = time.perf_counter()
            decompose([covariance], rule, torch.float64, storage)
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
    """The paper's estimate of what its dense projectors take on the GPU in half precision."""
    return paper_values(blocks, width, tokens)  # half of the values, two bytes each
