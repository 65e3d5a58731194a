"""Part `scan`: the recurrence alone, forward and backward, by each backend, compared with the bytes that must move."""

import os

import torch

from mambacl.bench.models import free_memory
from mambacl.bench.peers import PLAIN_STEPS
from mambacl.bench.result import Result, Row
from mambacl.bench.shapes import MAMBA_SSM, MAMBA_SSM_GPU, MAMBA_SSM_MS, Shape
from mambacl.bench.sizes import Sizes
from mambacl.bench.timing import Clock
from mambacl.data.image_cache import free_bytes
from mambacl.errors import UserError
from mambacl.ops import available_backends, scan_tokens

LEFT_OUT = ("size", "floor_forward_ms", "floor_backward_ms")
NOTES = (
    "floor: u, delta, A, B, C read once and y written once (backward: these and dy read, a gradient of each input "
    "written), at the speed of a copy measured in this run ({speed:.3g} GB/s); inputs, outputs and gradients in the "
    "inputs' type, A in float32. Small shapes can stay in the cache and beat the floor.",
    "over fastest: forward and backward together, relative to the fastest backend for that shape and type. All compute "
    "in float32; the time includes the conversion from bfloat16.",
)
GPU_NOTES = (
    "queued: the GPU never waited for Python. alone: forward and backward of a single call until its result is ready, "
    "including launches.",
    f"The plain backends launch several kernels per step: they are timed only in float32, up to {PLAIN_STEPS} steps.",
)
MAMBA_SSM_NOTE = (
    f"mamba-ssm / ours: recorded times of {MAMBA_SSM}, divided by ours; above 1, ours is faster. Its times for vim-s "
    "and language seem to include the gate z, which this scan does not."
)


def measure(clock: Clock, sizes: Sizes, speed: float) -> Result:
    """`speed`: bytes per second that a copy reads and writes."""
    result = Result(f"Selective scan on {clock.device.type}", left_out=LEFT_OUT)
    backends = [name for name in available_backends() if name != "auto"]
    for name, shape in sizes.shapes.items():
        for dtype in sizes.inputs:
            some = [backend for backend in backends if worthwhile(backend, shape, dtype, clock.device)]
            found = [_row(clock, name, shape, dtype, backend, speed, result) for backend in some]
            rows = [row for row in found if row is not None]
            totals = [row["forward_ms"] + row["backward_ms"] for row in rows]
            for row, total in zip(rows, totals, strict=True):
                row["over_fastest"] = total / min(totals)
                _compare(row, clock.device)
            result.rows += rows
    on_gpu = clock.device.type == "cuda"
    notes = [*NOTES, *(GPU_NOTES if on_gpu else ())]
    shapes = "; ".join(f"{name}: {shape}" for name, shape in sizes.shapes.items())
    result.notes[:0] = [shapes, *(note.format(speed=speed / 1e9) for note in notes)]
    if any("mamba-ssm_/_ours_forward" in row for row in result.rows):
        result.notes.append(MAMBA_SSM_NOTE)
    return result


def worthwhile(backend: str, shape: Shape, dtype: str, device: torch.device) -> bool:
    """Whether to time a backend: on a GPU, plain backends only for few steps and in float32."""
    return device.type != "cuda" or backend == "triton" or (dtype == "float32" and shape.length <= PLAIN_STEPS)


def _row(clock: Clock, name: str, shape: Shape, dtype: str, backend: str, speed: float, result: Result) -> Row | None:
    """None if the backend does not support this device, or memory does not suffice."""
    free_memory()
    if backend == "reference" and shape.graph_bytes() > _available_bytes(clock.device) / 2:
        result.notes.append(f"{name}: the graph of the reference does not fit into memory.")
        return None
    inputs = u, delta, A, B, C = shape.inputs(clock.device, getattr(torch, dtype))
    floors = [count / speed for count in shape.floor_bytes(u.element_size())]
    try:
        forward = clock.on_device(lambda: scan_tokens(u, delta, A, B, C, backend)[0])
        y, _ = scan_tokens(u, delta, A, B, C, backend)
        dy = torch.ones_like(y)
        backward = clock.on_device(lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True))
    except UserError:
        return None
    except torch.cuda.OutOfMemoryError:
        result.notes.append(f"{name}: {backend} does not fit into memory.")
        return None
    row: Row = {
        "shape": name,
        "size": str(shape),
        "inputs": dtype,
        "backend": backend,
        "forward_ms": 1e3 * forward.seconds,
        "backward_ms": 1e3 * backward.seconds,
        "floor_forward_ms": 1e3 * floors[0],
        "floor_backward_ms": 1e3 * floors[1],
        "forward_/_floor": forward.seconds / floors[0],
        "backward_/_floor": backward.seconds / floors[1],
    }
    if clock.device.type == "cuda":
        row["alone_ms"] = 1e3 * (forward.alone + backward.alone)
        row["queued"] = forward.queued and backward.queued
    return row


def _compare(row: Row, device: torch.device) -> None:
    """Compares with mamba-ssm's kernels, if they were timed on this kind of GPU."""
    if device.type != "cuda" or MAMBA_SSM_GPU not in torch.cuda.get_device_name(device):
        return
    recorded = MAMBA_SSM_MS.get(str(row["shape"]), {}).get(str(row["inputs"]))
    if recorded is None:
        return
    for way, theirs in zip(("forward", "backward"), recorded, strict=True):
        row[f"mamba-ssm_/_ours_{way}"] = theirs / row[f"{way}_ms"]


def _available_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return free_bytes(device)
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on every system
        return 4 << 30
