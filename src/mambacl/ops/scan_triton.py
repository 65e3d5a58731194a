"""The backend `triton`: how the kernels of `triton_kernels` are laid out for given shapes, and launched.

Shapes: u, delta (b, l, d); A (d, n); B, C (b, l, g, n). u, delta, B and C may be float32, bfloat16 or float16, each its
own; states, sums and y are float32.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

MOST_STATES = 256
KEPT = 8  # steps between the states that the forward keeps
FILLED = 2048  # warps that keep a large GPU busy
RESIDENT = {False: 25, True: 12}  # warps of the forward and of the backward that a processor of a GPU holds at once
PIECE = 256  # steps: below, going over all of them once more costs more than it saves
MOST_SEGMENTS = 8
ENDS_REGISTERS = 80  # of a thread that finds where a piece ends


@dataclass(frozen=True)
class Layout:
    """How a warp's 32 lanes share a tile: `lanes_n` x `lanes_d` of them, with `states` x `channels` each; how many
    steps are taken at a time; and the most registers of a thread."""

    states: int
    lanes_n: int
    channels: int
    lanes_d: int
    steps: int
    registers: int | None = None

    @property
    def block(self) -> int:
        """Channels of a program."""
        return self.channels * self.lanes_d


@functools.cache
def layout(n: int, recurrences: int, backward: bool) -> Layout:
    """Large tiles where there are recurrences enough, as they need fewest shuffles; else more programs."""
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
    """Whether Triton's interpreter runs the kernels: they then take CPU tensors."""
    import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]

    return bool(triton.knobs.runtime.interpret)


def kept_shape(u: Tensor, A: Tensor) -> tuple[int, ...]:
    """Shape of the states that the forward keeps for the backward, (b, chunks, n, d)."""
    return u.shape[0], -(-u.shape[1] // KEPT), A.shape[1], u.shape[2]


def forward(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, reverse: bool = False, log_A: bool = False,
    keep: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, last state and, unless `keep` is false, the states for the backward. With `log_A`, A holds log(-A)."""
    from mambacl.ops.kernels.launch import launch
    from mambacl.ops.kernels.scan import scan_forward

    u, delta, A, B, C = _prepared(u, delta, A, B, C)
    y, last = _new(u, u.shape), _new(u, (len(u), *A.shape))
    kept = _new(u, kept_shape(u, A) if keep else (0,))
    plan = layout(A.shape[1], u.shape[0] * u.shape[2], backward=False)
    split = _split(u, B, plan, backward=False)
    ends, sums = _ends(u, delta, A, B, plan, split, log_A, reverse, backward=False)
    launch(
        scan_forward,
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
    """Gradients of all inputs, those of u and delta in their types, the others in float32. With `softplus`, delta is
    one, and its gradient that of what went into it; with `log_A`, A holds log(-A), and its gradient is that of it.
    Without `need_A` there are no sums for A."""
    from mambacl.ops.kernels.launch import launch
    from mambacl.ops.kernels.scan import scan_backward

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
    parts = _new(u, (batch, blocks, length, 2, states))  # of dB and of dC
    launch(
        scan_backward,
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
    """Time in segments, each a program's, of so many pieces of `width` steps, whose ends are found beforehand."""

    width: int
    pieces: int
    segments: int


def segments(length: int, programs: int, room: int) -> int:
    """Into how many time is split, where few programs of many steps would leave a GPU idle that has room for more."""
    return max(1, min(MOST_SEGMENTS, room // programs, length // PIECE)) if programs else 1


@functools.cache
def processors(device: torch.device) -> int:
    """Of a GPU; an H200's in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def _split(u: Tensor, B: Tensor, plan: Layout, backward: bool) -> Split:
    """Pieces are a multiple of the steps between kept states."""
    length, room = u.shape[1], RESIDENT[backward] * processors(u.device)
    wanted = segments(length, _blocks(u, B, plan) * len(u), room)
    if wanted == 1 or plan.states == 1:  # with a single state, most of the time goes into reading the inputs
        return Split(length, 1, 1)
    pieces = max(1, length // (wanted * PIECE))
    width = -(-length // (wanted * pieces * KEPT)) * KEPT
    return Split(width, pieces, -(-length // (width * pieces)))


def _ends(
    x: Tensor, delta: Tensor, A: Tensor, M: Tensor, plan: Layout, split: Split, log_A: bool, reverse: bool,
    backward: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What each piece makes of nothing, (b, pieces, n, d), and the sums of its deltas, (b, pieces, d): those of all
    segments but the last; backward, of all but the first."""
    from mambacl.ops.kernels.launch import launch
    from mambacl.ops.kernels.scan import scan_ends

    length = x.shape[1]
    first = split.pieces if backward else 0
    pieces = -(-length // split.width) - split.pieces if backward else (split.segments - 1) * split.pieces
    ends, sums = _new(x, (len(x), pieces, A.shape[1], x.shape[2])), _new(x, (len(x), pieces, x.shape[2]))
    if pieces:
        plan = replace(plan, registers=ENDS_REGISTERS if plan.registers else None)
        constants = _constants(plan, x, delta, A, M, M)
        taken = {"x_l": constants["u_l"], "M_l": constants["B_l"], "M_g": constants["B_g"]}
        dropped = ("u_l", "B_l", "B_g", "C_l", "C_g", "EVERY")
        launch(
            scan_ends,
            (_blocks(x, M, plan) * len(x) * pieces,),
            x, delta, A, M, ends, sums, x.stride(0), delta.stride(0), M.stride(0), length, split.width, first, pieces,
            **taken, **{name: value for name, value in constants.items() if name not in dropped},
            LOG_A=log_A, REVERSE=reverse, BACKWARD=backward,
        )  # fmt: skip
    return ends, sums


def _new(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _prepared(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, ...]:
    """All but A with contiguous channels or states, whatever their other strides."""
    u, delta, B, C = (x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in (u, delta, B, C))
    return u, delta, A.float().contiguous(), B, C


def _blocks(u: Tensor, B: Tensor, plan: Layout) -> int:
    """Blocks of channels, none of which reaches into another group."""
    return B.shape[2] * -(-(u.shape[2] // B.shape[2]) // plan.block)


def _constants(plan: Layout, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> dict[str, Any]:
    """What a kernel is compiled for."""
    channels = u.shape[2] // B.shape[2]
    strides = {"u_l": u.stride(1), "delta_l": delta.stride(1)}
    strides |= {"B_l": B.stride(1), "B_g": B.stride(2), "C_l": C.stride(1), "C_g": C.stride(2)}
    sizes = {"D": u.shape[2], "K": channels, "N": A.shape[1], "BLOCKS": -(-channels // plan.block)}
    tile = {"NT": plan.states, "DT": plan.channels, "LD": plan.lanes_d, "LN": plan.lanes_n, "T": plan.steps}
    options = {"num_warps": 1, "num_stages": 1, "enable_fp_fusion": True, "maxnreg": plan.registers}
    return {**strides, **sizes, **tile, "EVERY": KEPT // plan.steps, **options}
