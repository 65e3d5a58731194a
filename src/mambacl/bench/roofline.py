"""Part `roofline`: the least work of a scan, how long this work would take here, and how long the scan takes.

The call is `mambacl.selective_scan` with D, delta's bias, softplus and, without groups, the gate z.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mambacl.bench.models import free_memory
from mambacl.bench.peers import OURS
from mambacl.bench.result import Result, Row
from mambacl.bench.shapes import Problem, Shape, make_problem
from mambacl.bench.sizes import Sizes
from mambacl.bench.timing import Clock
from mambacl.ops import kernels, switch

PROGRAMS_PER_PROCESSOR, BLOCK, UNROLLED, ROUNDS = 32, 1024, 32, 64  # of a GPU
SIDE = 256  # of a matrix
EXPONENTIAL = 10  # products on a CPU: two for the argument's remainder, six for a polynomial, two for the power of two
REGISTERS, MOST_WARPS, LANES = 65536, 64, 32  # of a processor of an NVIDIA GPU; threads of a warp
NOTES = (
    "bytes: every input read once and every result written once; with a backward, the inputs once more, dy, and a "
    "gradient of each input. functions: one exponential per state and step, two with a backward, which computes states "
    "again; and those of softplus and of the gate. products: multiplications, with an addition or without.",
    "Ceilings measured in this run: {bytes:.3g} GB/s, {functions:.3g} billion functions and {products:.3g} billion "
    "products per second. The longest of these times binds; left: the time taken, divided by it.",
)
CPU_NOTE = f"On the CPU a function takes about {EXPONENTIAL} products, so both add up to arithmetic."
GPU_NOTE = "registers: per thread of the scan's kernel; warps: how many a processor has registers for, at most 64."


@dataclass(frozen=True)
class Work:
    bytes: int
    functions: int
    products: int


@dataclass(frozen=True)
class Ceilings:
    """The most work that this machine can do per second."""

    bytes: float
    functions: float
    """exponentials, and other functions that the same unit computes"""
    products: float
    """products of float32, each with an addition or without"""
    shared: bool
    """whether functions consist of products, so that their times add up"""

    def seconds(self, work: Work) -> dict[str, float]:
        """The least time for each kind of work."""
        functions, products = work.functions / self.functions, work.products / self.products
        if self.shared:
            return {"bytes": work.bytes / self.bytes, "arithmetic": functions + products}
        return {"bytes": work.bytes / self.bytes, "functions": functions, "products": products}


def ceilings(clock: Clock, copied: float) -> Ceilings:
    """`copied`: bytes per second that a copy reads and writes."""
    if clock.device.type == "cuda":
        return Ceilings(copied, *_on_gpu(clock), shared=False)
    matrix, product = torch.rand(SIDE, SIDE), torch.empty(SIDE, SIDE)
    times = clock.in_rounds({"product": lambda: torch.mm(matrix, matrix, out=product)})
    products = SIDE**3 / min(times["product"])
    return Ceilings(copied, products / EXPONENTIAL, products, shared=True)


def _on_gpu(clock: Clock) -> tuple[float, float]:
    from mambacl.bench.roofline_kernels import exponentiate, multiply_and_add

    programs = PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(clock.device).multi_processor_count
    out = torch.empty(programs * BLOCK, device=clock.device)
    constants = {"UNROLLED": UNROLLED, "BLOCK": BLOCK}
    with torch.cuda.device(clock.device):
        times = clock.in_rounds(
            {
                "exp": lambda: exponentiate[(programs,)](out, -0.9, ROUNDS, **constants),
                "product": lambda: multiply_and_add[(programs,)](out, 0.9, 0.1, ROUNDS, **constants),
            }
        )
    done = programs * BLOCK * UNROLLED * ROUNDS
    return done / min(times["exp"]), done / min(times["product"])


def forward_work(shape: Shape, itemsize: int) -> Work:
    """Per state and step: exp(delta A) and its argument, delta u B, the new state, its part of y. Per step: the bias,
    softplus (exponential, logarithm), delta u, D u, and the gate (exponential, reciprocal, two products)."""
    gated = shape.groups == 1
    tokens, matrices, weights = _elements(shape)
    states = tokens * shape.states
    return Work(
        bytes=itemsize * ((3 + gated) * tokens + matrices) + 4 * weights,
        functions=states + (2 + 2 * gated) * tokens,
        products=4 * states + (3 + 2 * gated) * tokens,
    )


def training_work(shape: Shape, itemsize: int) -> Work:
    """Forward and backward. Per state and step, the backward computes the state again (an exponential, three products)
    and the gradients (nine products): of the state (C dy, and the decayed gradient from later steps), of B, C and
    delta u, and, through the decay, of A and delta (the decayed state, times the gradient, times delta and A). Per
    step: softplus and gate again, their derivatives, and the gradients of u, delta, D, bias and z."""
    gated = shape.groups == 1
    tokens, matrices, weights = _elements(shape)
    states = tokens * shape.states
    forward = forward_work(shape, itemsize)
    read, written = (3 + gated) * tokens + matrices, (2 + gated) * tokens + matrices
    return Work(
        bytes=forward.bytes + itemsize * (read + written) + 8 * weights,
        functions=forward.functions + states + (3 + 2 * gated) * tokens,
        products=forward.products + 12 * states + (8 + 6 * gated) * tokens,
    )


def _elements(shape: Shape) -> tuple[int, int, int]:
    """The number of elements of u; of B and C together; of A, D and the bias together."""
    images = shape.batch * shape.length
    return images * shape.channels, 2 * images * shape.groups * shape.states, shape.channels * (shape.states + 2)


def measure(clock: Clock, sizes: Sizes, speed: float) -> Result:
    """`speed`: bytes per second that a copy reads and writes."""
    ceiling = ceilings(clock, speed)
    on_gpu = clock.device.type == "cuda"
    result = Result(f"Roofline of the scan on {clock.device.type}", left_out=("size",))
    for name, shape in sizes.shapes.items():
        for dtype in sizes.inputs:
            free_memory()
            try:
                problem = make_problem(shape, clock.device, getattr(torch, dtype))
                result.rows += _rows(clock, name, problem, ceiling)
            except torch.cuda.OutOfMemoryError:
                result.notes.append(f"{name}: does not fit into memory.")
    shapes = "; ".join(f"{name}: {shape}" for name, shape in sizes.shapes.items())
    rates = {key: getattr(ceiling, key) / 1e9 for key in ("bytes", "functions", "products")}
    result.notes[:0] = [shapes, *(note.format(**rates) for note in NOTES), GPU_NOTE if on_gpu else CPU_NOTE]
    return result


def _rows(clock: Clock, name: str, problem: Problem, ceiling: Ceilings) -> list[Row]:
    call, itemsize = OURS.prepare(problem, torch.get_num_threads()), problem.dy.element_size()
    with torch.no_grad():
        forward = _row(clock, call, forward_work(problem.shape, itemsize), ceiling, "forward")
    work = training_work(problem.shape, itemsize)
    both = _row(clock, lambda: problem.gradients(call()), work, ceiling, "backward")
    common = {"shape": name, "size": str(problem.shape), "inputs": problem.inputs_dtype}
    return [{**common, "call": "forward", **forward}, {**common, "call": "forward and backward", **both}]


def _row(clock: Clock, call: Callable[[], object], work: Work, ceiling: Ceilings, kernel: str) -> Row:
    times = ceiling.seconds(work)
    binding = max(times, key=lambda key: times[key])
    taken = clock.on_device(call).seconds
    row: Row = {f"{key}_ms": 1e3 * seconds for key, seconds in times.items()}
    row |= {"binds": binding, "taken_ms": 1e3 * taken, "left": taken / times[binding]}
    if clock.device.type == "cuda":
        found = [found.n_regs for name, found in kernels_of(call).items() if "scan" in name and kernel in name]
        row |= {"registers": max(found), "warps": warps(max(found))} if found else {}
    return row


def warps(registers: int) -> int:
    """How many warps a processor has registers for. Registers per thread are allocated in eights."""
    return min(MOST_WARPS, REGISTERS // (-(-registers // 8) * 8 * LANES))


def kernels_of(call: Callable[[], object]) -> dict[str, Any]:
    """The compiled Triton kernels that a call runs, by name; empty without Triton."""
    if not switch.available():
        return {}
    launch = kernels.launch
    remembered = launch._compiled
    launch._compiled = {}  # the call enters every kernel that it launches
    try:
        call()
        found = launch._compiled
    finally:
        launch._compiled = remembered
    return {key[0].__name__: kernel for key, kernel in found.items()}
