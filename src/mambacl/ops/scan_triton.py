"""The backend `triton` for the bare recurrence: chooses a layout for the kernels of `ops.kernels.scan` and launches
them.

Shapes: u, delta (b, l, d); A (d, n); B, C (b, l, g, n). u, delta, B and C can each be float32, bfloat16 or float16;
states, sums and y are float32.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mambacl.ops import kernels

MOST_STATES = 256
KEPT = 8  # steps between the states that the forward keeps for the backward
FILLED = 2048  # warps that keep a large GPU busy
RESIDENT = {False: 25, True: 12}  # resident warps per multiprocessor: forward, backward
PIECE = 256  # fewest steps per piece: below, the extra pass of `scan_ends` costs more than it saves
MOST_SEGMENTS = 8
ENDS_REGISTERS = 80  # per thread of `scan_ends`


@dataclass(frozen=True)
class Layout:
    """How a program's lanes share a tile: `lanes_n` x `lanes_d` lanes with `states` x `channels` values each.

    `steps`: time steps per iteration; `registers`: limit per thread; `warps`: per program, along the channels.
    """

    states: int
    lanes_n: int
    channels: int
    lanes_d: int
    steps: int
    registers: int | None = None
    warps: int = 1

    @property
    def block(self) -> int:
        """Channels per program."""
        return self.channels * self.lanes_d

    @property
    def ahead(self) -> bool:
        """Whether enough registers are left to load the next steps' inputs early."""
        return self.states * self.channels <= 8


@functools.cache
def layout(n: int, recurrences: int, backward: bool) -> Layout:
    """Large tiles, which need the fewest shuffles, if enough recurrences fill the GPU; otherwise more programs."""
    padded = 1 << (n - 1).bit_length()
    if padded == 1:
        return Layout(1, 1, 2 if backward else 1, 32, 8)
    states = {2: 2, 4: 4, 8: 2, 16: 4, 32: 4}.get(padded, padded // 8)
    lanes_n = padded // states
    lanes_d = 32 // lanes_n
    channels = 16 // states
    programs = FILLED * (2 if backward else 1)
    while channels > 1 and (channels > 4 or recurrences < programs * channels * lanes_d):
        channels //= 2
    channels = max(channels, 2 if padded <= 32 else 1)
    registers = (168 if backward else 80) if states * channels == 8 else None
    return Layout(states, lanes_n, channels, lanes_d, 4, registers=registers)


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors."""
    import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]

    return bool(triton.knobs.runtime.interpret)


def kept_shape(u: Tensor, A: Tensor) -> tuple[int, ...]:
    """Shape of the states that the forward keeps for the backward, (b, chunks, n, d)."""
    return u.shape[0], -(-u.shape[1] // KEPT), A.shape[1], u.shape[2]


def forward(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, reverse: bool = False, log_A: bool = False,
    keep: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the output, the last state and, if `keep`, the states for the backward. `log_A`: A holds log(-A)."""
    u, delta, A, B, C = _prepared(u, delta, A, B, C)
    y, last = _new(u, u.shape), _new(u, (len(u), *A.shape))
    kept = _new(u, kept_shape(u, A) if keep else (0,))
    plan = layout(A.shape[1], u.shape[0] * u.shape[2], backward=False)
    split = _split(u, B, plan, backward=False)
    ends, sums = _ends(u, delta, A, B, plan, split, log_A, reverse, backward=False)
    kernels.launch.launch(
        kernels.scan.scan_forward,
        (_blocks(u, B, plan) * len(u) * split.segments,),
        u, delta, A, B, C, y, last, kept, ends, sums,
        u.stride(0), delta.stride(0), B.stride(0), C.stride(0), u.shape[1], split.width,
        **_constants(plan, u, delta, A, B, C), SEGMENTS=split.segments, PIECES=split.pieces, LOG_A=log_A, KEEP=keep,
        REVERSE=reverse,
    )  # fmt: skip
    return y, last, kept


def backward(
    dy: Tensor, dlast: Tensor | None, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, kept: Tensor,
    reverse: bool = False, log_A: bool = False, softplus: bool = False, need_A: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of all inputs: those of u and delta in the inputs' dtypes, the others in float32.

    `softplus`: delta is the output of a softplus; its gradient is taken with respect to the softplus's input. `log_A`:
    A holds log(-A); its gradient is taken with respect to log(-A). `need_A=False` skips the gradient of A.
    """
    u, delta, A, B, C = _prepared(u, delta, A, B, C)
    dy = dy if dy.stride(2) == 1 else dy.contiguous()
    batch, length, _ = u.shape
    states, groups = A.shape[1], B.shape[2]
    plan = layout(states, u.shape[0] * u.shape[2], backward=True)
    blocks = _blocks(u, B, plan)
    du, ddelta = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (u, delta))
    split = _split(u, B, plan, backward=True)
    ends, sums = _ends(dy, delta, A, C, plan, split, log_A, reverse, backward=True)
    dA = _new(u, (batch * split.segments if need_A else 0, *A.shape))
    parts = _new(u, (batch, blocks, length, 2, states))  # partial sums of dB and dC
    kernels.launch.launch(
        kernels.scan.scan_backward,
        (blocks * len(u) * split.segments,),
        dy, dy if dlast is None else dlast.contiguous(), u, delta, A, B, C, kept, du, ddelta, dA, parts,
        ends, sums, dy.stride(0), u.stride(0), delta.stride(0), B.stride(0), C.stride(0), length, split.width,
        dy_l=dy.stride(1), **_constants(plan, u, delta, A, B, C), SEGMENTS=split.segments, PIECES=split.pieces,
        LOG_A=log_A, LAST=dlast is not None, NEED_A=need_A, REVERSE=reverse, SOFTPLUS=softplus,
    )  # fmt: skip
    dB, dC = parts.unflatten(1, (groups, -1)).sum(2).transpose(1, 2).unbind(3)  # (b, l, g, n)
    return du, ddelta, dA.sum(0), dB, dC


@dataclass(frozen=True)
class Split:
    """Time cut into segments, one per program, each of `pieces` pieces of `width` steps. `scan_ends` computes what each
    piece does to the state before the programs start."""

    width: int
    pieces: int
    segments: int


def segments(length: int, programs: int, room: int) -> int:
    """How many segments to cut time into, so that few programs with many steps still fill a GPU with `room`
    programs."""
    return max(1, min(MOST_SEGMENTS, room // programs, length // PIECE)) if programs else 1


@functools.cache
def processors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; that of an H200 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def split_time(length: int, programs: int, room: int, plan: Layout, kept: int) -> Split:
    """Pieces are a multiple of `kept`, the steps between kept states."""
    wanted = segments(length, programs, room)
    if wanted == 1 or plan.states == 1:  # with a single state, reading the inputs takes most of the time
        return Split(length, 1, 1)
    pieces = max(1, length // (wanted * PIECE))
    width = -(-length // (wanted * pieces * kept)) * kept
    return Split(width, pieces, -(-length // (width * pieces)))


def _split(u: Tensor, B: Tensor, plan: Layout, backward: bool) -> Split:
    room = RESIDENT[backward] * processors(u.device)
    return split_time(u.shape[1], _blocks(u, B, plan) * len(u), room, plan, KEPT)


def _ends(
    x: Tensor, delta: Tensor, A: Tensor, M: Tensor, plan: Layout, split: Split, log_A: bool, reverse: bool,
    backward: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The state after each piece if it starts at zero, (b, pieces, n, d), and the sum of its deltas, (b, pieces, d),
    for all segments but the last; in the backward, for all but the first."""
    length = x.shape[1]
    first = split.pieces if backward else 0
    pieces = -(-length // split.width) - split.pieces if backward else (split.segments - 1) * split.pieces
    ends, sums = _new(x, (len(x), pieces, A.shape[1], x.shape[2])), _new(x, (len(x), pieces, x.shape[2]))
    if pieces:
        plan = replace(plan, registers=ENDS_REGISTERS if plan.registers else None)
        constants = _constants(plan, x, delta, A, M, M)
        taken = {"x_l": constants["u_l"], "M_l": constants["B_l"], "M_g": constants["B_g"]}
        dropped = ("u_l", "B_l", "B_g", "C_l", "C_g", "EVERY")
        kernels.launch.launch(
            kernels.scan.scan_ends,
            (_blocks(x, M, plan) * len(x) * pieces,),
            x, delta, A, M, ends, sums, x.stride(0), delta.stride(0), M.stride(0), length, split.width, first, pieces,
            **taken, **{name: value for name, value in constants.items() if name not in dropped},
            LOG_A=log_A, REVERSE=reverse, BACKWARD=backward,
        )  # fmt: skip
    return ends, sums


def _new(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _prepared(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, ...]:
    """The inputs with contiguous channels or states; A in float32."""
    u, delta, B, C = (x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in (u, delta, B, C))
    return u, delta, A.float().contiguous(), B, C


def _blocks(u: Tensor, B: Tensor, plan: Layout) -> int:
    """Number of blocks of channels; no block crosses a group boundary."""
    return B.shape[2] * -(-(u.shape[2] // B.shape[2]) // plan.block)


def _constants(plan: Layout, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> dict[str, Any]:
    """The constants a kernel is compiled with."""
    channels = u.shape[2] // B.shape[2]
    strides = {"u_l": u.stride(1), "delta_l": delta.stride(1)}
    strides |= {"B_l": B.stride(1), "B_g": B.stride(2), "C_l": C.stride(1), "C_g": C.stride(2)}
    sizes = {"D": u.shape[2], "K": channels, "N": A.shape[1], "BLOCKS": -(-channels // plan.block)}
    tile = {"NT": plan.states, "DT": plan.channels, "LD": plan.lanes_d, "LN": plan.lanes_n, "T": plan.steps}
    options = {"num_warps": 1, "num_stages": 1, "enable_fp_fusion": True, "maxnreg": plan.registers}
    return {**strides, **sizes, **tile, "EVERY": KEPT // plan.steps, **options}
