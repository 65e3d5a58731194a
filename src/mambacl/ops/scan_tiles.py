"""The backend `triton` with bias, softplus, skip and gate inside the kernel.

Chooses a layout for the kernels of `ops.kernels.scan_tiles` (or `scan_single`, for a single state) and launches them.
Shapes: u, delta, z, out (b, l, d), channels or time contiguous, read and written in place; A (d, n); B, C (b, l, g, n);
D, bias (d,). Each can be float32, bfloat16 or float16; states and sums are float32.

`order` is the order of the tokens: "forward", "reverse", or "cross" for the four orders of a map of `height` rows (by
rows, by columns, both backwards). With "cross", each of four groups takes one order, and all read the same channels of
u.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from mambacl.ops import kernels
from mambacl.ops.scan_triton import FILLED, Layout, Split, processors, split_time

RESIDENT = {False: 12, True: 8}  # resident warps per multiprocessor without a limit on registers: forward, backward
REGISTERS = 1 << 16  # per multiprocessor
# The kernels for a single state: channels per program (one warp), segments per tile, steps per segment, and resident
# programs of the backward per multiprocessor.
SINGLE_CHANNELS, SINGLE_SEGMENTS, SINGLE_STEPS, SINGLE_RESIDENT = 4, 8, 8, 16
FETCH_BACK = True  # whether the backward prefetches
SUMMED = 512  # sums per program of `sum_shares`
SPREAD = 4  # waves of programs to keep when one program takes several blocks of channels


@functools.cache
def layout(
    n: int, recurrences: int, backward: bool, full: bool = False, time: bool = False, single: bool = False
) -> Layout:
    """Large tiles, which need the fewest exchanges, if enough recurrences fill the GPU; otherwise more programs.
    `full`: time is contiguous or the kernel applies the gate; both need registers. `time`: time is contiguous.
    `single`: the inputs are float32."""
    padded = 1 << (n - 1).bit_length()
    if padded == 1:
        return Layout(1, 1, 1, 32, 8)
    states = {2: 2, 4: 4, 8: 2, 16: 4, 32: 4}.get(padded, padded // 8)
    lanes_n = padded // states
    lanes_d = 32 // lanes_n
    if full and padded == 8 and backward:  # few states: one wave of many warps
        return Layout(states, lanes_n, 2, 2 * lanes_d, 4, registers=168, warps=2)
    most, fewest = 8 if full else 16, 2 if padded <= 32 else 1  # values per lane; channels per lane
    channels = min(4, max(fewest, most // states))
    programs = FILLED * (2 if backward else 1)
    while channels > fewest and recurrences < programs * channels * lanes_d:
        channels //= 2
    block = channels * lanes_d
    if full and padded == 16 and not backward:
        if time and FILLED // 2 * (block // 2) <= recurrences < 2 * programs * block:  # narrow and long tiles
            return Layout(2, 8, channels, 4, 8)
        if recurrences < programs * block:  # narrow tiles with few registers: many programs at once
            return Layout(2, 8, channels, 4, 4, registers=80)
        return Layout(states, lanes_n, channels, lanes_d, 8 if time and single else 4)
    if backward and time and padded == 16 and recurrences < programs * block:
        if recurrences <= FILLED * 8:  # narrow tiles with fewer registers: all programs at once
            return Layout(2, 8, 2, 4, 4, registers=168)
        return Layout(2, 8, 2, 8, 8, warps=2)  # narrow and long
    # Two warps leave half as many partial sums of dB and dC as one each.
    enough = programs * lanes_d if time and single and padded == 16 else 2 * programs * block
    warps = 2 if backward and full and recurrences >= enough else 1
    return Layout(states, lanes_n, channels, lanes_d * warps, 4, warps=warps)


def kept_steps(n: int, itemsize: int) -> int:
    """Steps between the states that the forward keeps. With 16 states, they take as much memory as u. A single state is
    cheap to keep, and memory limits the speed, so recomputing would cost more than it saves."""
    return 8 if n == 1 else 16 * max(1, 4 // itemsize)


def _single(u: Tensor, delta: Tensor, z: Tensor | None, n: int, order: str) -> bool:
    """Whether the kernels for a single state apply: they need contiguous time."""
    return n == 1 and order != "cross" and all(x is None or x.stride(1) == 1 for x in (u, delta, z))


def kept_shape(u: Tensor, delta: Tensor, A: Tensor, z: Tensor | None = None, order: str = "forward") -> tuple[int, ...]:
    """Shape of the states that the forward keeps for the backward, (b, intervals, n, d)."""
    length, n = u.shape[1], A.shape[1]
    single = _single(u, delta, z, n, order)
    steps = SINGLE_SEGMENTS * SINGLE_STEPS if single else kept_steps(n, u.element_size())
    return u.shape[0], -(-length // steps), n, A.shape[0]


def out_like(u: Tensor, channels: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """A new tensor (b, l, channels), time contiguous if it is in u, otherwise channels; channels and dtype are u's by
    default."""
    batch, length, own = u.shape
    channels = own if channels is None else channels
    time_last = u.stride(1) == 1 and u.stride(2) != 1
    strides = (channels * length, 1, length) if time_last else (length * channels, channels, 1)
    return torch.empty_strided((batch, length, channels), strides, dtype=dtype or u.dtype, device=u.device)


def forward(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    bias: Tensor | None = None, *, log_A: bool = False, softplus: int = 0, order: str = "forward", height: int = 1,
    dtype: torch.dtype = torch.float32, keep: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the output in `dtype`, the last state and, if `keep`, the states for the backward. `log_A`: A holds
    log(-A). `softplus`: 0 none, 1 already applied to delta, 2 applied by the kernel."""
    call = _Call(u, delta, A, B, C, D, z, bias, log_A, softplus, order, height, backward=False)
    out = out_like(u, len(A), dtype)
    last = call.new(len(u), *A.shape)
    kept = call.new(*(kept_shape(u, delta, A, z, order) if keep else (0,)))
    if call.single:
        _single_forward(call, out, last, kept, D is not None, keep)
        return out, last, kept
    ends, sums = _ends(call, u)
    kernels.launch.launch(
        kernels.scan_tiles.scan_forward,
        (call.blocks * len(u) * call.split.segments,),
        *(call.u, call.delta, call.A, call.B, call.C, call.D, call.z, call.bias, out, last, kept, ends, sums),
        *call.sizes,
        *(*call.u.stride(), *call.delta.stride(), *call.z.stride(), *out.stride()),
        *(*call.B.stride()[:3], *call.C.stride()[:3]),
        **call.constants, **call.time, SKIP=D is not None, KEEP=keep,
        SAME=_same_strides(call.u, call.delta, call.z, out), FETCH=call.fetch,
    )  # fmt: skip
    return out, last, kept


def backward(
    dout: Tensor, dlast: Tensor | None, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
    z: Tensor | None, bias: Tensor | None, kept: Tensor, *, log_A: bool = False, softplus: int = 0,
    order: str = "forward", height: int = 1, need_A: bool = True,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of u, delta, A, B, C, D, z and bias: those of u, delta and z in the inputs' dtypes and layouts, the
    others in float32; None for inputs that are None.

    `softplus`: the gradient of delta is taken with respect to the softplus's input. `log_A`: A holds log(-A); its
    gradient is taken with respect to log(-A). `need_A=False` skips the gradient of A.
    """
    call = _Call(u, delta, A, B, C, D, z, bias, log_A, softplus, order, height, backward=True)
    dout = _one_contiguous(dout)
    batch, length, _ = u.shape
    channels, states = A.shape
    parts = batch * call.split.segments
    du = out_like(u, channels, torch.float32 if order == "cross" else u.dtype)
    ddelta, dz = out_like(delta, channels), u if z is None else out_like(z, channels)
    rows = call.new(parts, channels * (states + 2))  # one per part; what is not needed is not written
    dA, dD, dbias = rows.split((channels * states, channels, channels), dim=1)
    if call.single:
        skip = D is not None
        dB, dC = _single_backward(call, dout, dlast, kept, du, ddelta, dz, dA, dD, dbias, skip, need_A)
        return _gradients(du, ddelta, rows, dB, dC, dz, A, D, z, bias, need_A)
    share = call.share
    shares = -(-call.constants["BLOCKS"] // share) * B.shape[2]
    dBC = call.new(batch, shares, length, 2, states)
    every = call.time["EVERY"]
    programs = shares * batch * call.split.segments
    padded = 1 << (states - 1).bit_length()
    scratch = call.new(programs * every * padded * call.plan.block) if every > 1 else call.A
    ends, sums = _ends(call, dout)
    kernels.launch.launch(
        kernels.scan_tiles.scan_backward,
        (programs,),
        *(dout, dout if dlast is None else dlast.contiguous(), call.u, call.delta, call.A, call.B, call.C, call.D),
        *(call.z, call.bias, kept, ends, sums, scratch, du, ddelta, dz, dA, dD, dbias, dBC),
        *call.sizes,
        *(*dout.stride(), *call.u.stride(), *call.delta.stride(), *call.z.stride()),
        *(*call.B.stride()[:3], *call.C.stride()[:3], *du.stride(), *ddelta.stride(), *dz.stride()),
        **call.constants, **call.time, SHARE=share, SKIP=D is not None, LAST=dlast is not None, NEED_A=need_A,
        SAME=_same_strides(call.u, call.delta, call.z, dout, du, ddelta, dz), AHEAD=call.plan.ahead,
        FETCH=call.fetch_back,
    )  # fmt: skip
    dB, dC = _summed(dBC, B, C)
    if order == "cross":  # the four orders share u
        du = du.unflatten(2, (B.shape[2], -1)).sum(2).to(u.dtype)
    return _gradients(du, ddelta, rows, dB, dC, dz, A, D, z, bias, need_A)


def _summed(parts: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """dB and dC (b, l, g, n), in the types of B and C, from the parts (b, g * shares, l, 2, n)."""
    batch, length, groups, states = B.shape
    dB, dC = (torch.empty(M.shape, dtype=M.dtype, device=M.device) for M in (B, C))
    kernels.launch.launch(
        kernels.scan_sums.sum_shares,
        (batch * groups * -(-length * 2 * states // SUMMED),),
        *(parts, dB, dC, length, parts.shape[1] // groups),
        GROUPS=groups, N=states, BLOCK=SUMMED, num_warps=4,
    )  # fmt: skip
    return dB, dC


def _gradients(du, ddelta, rows, dB, dC, dz, A, D, z, bias, need_A):  # type: ignore[no-untyped-def]
    channels = len(A)
    dA, dD, dbias = rows.sum(0).split((A.numel(), channels, channels))  # one sum for all
    return (
        *(du, ddelta, dA.view(A.shape) if need_A else None, dB, dC),
        *(dD if D is not None else None, dz if z is not None else None, dbias if bias is not None else None),
    )


def _single_arguments(call: "_Call", *tensors: Tensor) -> tuple[list[int], dict[str, Any]]:
    """Length and batch and channel strides in units of V values, and the constants. V is the largest vector of at most
    16 bytes that divides them all. `tensors` (b, l, d), B and C (b, l, g, 1) have contiguous time."""
    L, reverse = call.u.shape[1], call.constants["ORDER"] == "reverse"
    strides = [stride for x in (*tensors, call.B, call.C) for stride in (x.stride(0), x.stride(2))]
    V = 1 if reverse else 16 // max(x.element_size() for x in (*tensors, call.B, call.C))
    while V > 1 and any(number % V for number in (L, *strides)):
        V //= 2
    names = ("GROUPS", "K", "LOG_A", "GATE", "BIAS", "SOFTPLUS")
    constants = {name: call.constants[name] for name in names}
    constants |= {
        "CH": SINGLE_CHANNELS,
        "S": SINGLE_SEGMENTS,
        "Q": SINGLE_STEPS,
        "V": V,
        "REVERSE": reverse,
        "num_warps": 1,
    }
    constants["EVEN"] = L % (SINGLE_SEGMENTS * SINGLE_STEPS) == 0 and constants["K"] % SINGLE_CHANNELS == 0
    return [number // V for number in (L, *strides)], constants


def _single_blocks(call: "_Call") -> int:
    return -(-int(call.constants["K"]) // SINGLE_CHANNELS)


def _single_forward(call: "_Call", out: Tensor, last: Tensor, kept: Tensor, skip: bool, keep: bool) -> None:
    numbers, constants = _single_arguments(call, call.u, call.delta, call.z, out)
    kernels.launch.launch(
        kernels.scan_single.scan_single_forward, (len(call.u) * call.constants["GROUPS"] * _single_blocks(call),),
        *(call.u, call.delta, call.A, call.B, call.C, call.D, call.z, call.bias, out, last, kept),
        *numbers,
        **constants, SKIP=skip, KEEP=keep,
    )  # fmt: skip


def _single_backward(
    call: "_Call", dout: Tensor, dlast: Tensor | None, kept: Tensor, du: Tensor, ddelta: Tensor, dz: Tensor, dA: Tensor,
    dD: Tensor, dbias: Tensor, skip: bool, need_A: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Writes the other gradients; returns dB and dC (b, l, g, 1)."""
    dout = _time_contiguous(dout)
    numbers, constants = _single_arguments(call, dout, call.u, call.delta, call.z, du, ddelta, dz)
    batch, L, groups = len(call.u), call.u.shape[1], call.constants["GROUPS"]
    # Only as many programs as the GPU holds at once: each leaves a partial sum of dB and dC.
    blocks, room = _single_blocks(call), SINGLE_RESIDENT * processors(call.u.device)
    share = -(-blocks // max(1, room // (batch * groups)))
    shares = -(-blocks // share)
    parts = call.new(batch, groups, shares, 2, L)
    kernels.launch.launch(
        kernels.scan_single.scan_single_backward, (batch * groups * shares,),
        *(dout, dout if dlast is None else dlast.contiguous(), call.u, call.delta, call.A, call.B, call.C, call.D),
        *(call.z, call.bias, kept, du, ddelta, dz, dA, dD, dbias, parts), *numbers,
        **constants, SHARE=share, SKIP=skip, LAST=dlast is not None, NEED_A=need_A,
    )  # fmt: skip
    dB, dC = torch.sum(parts, 2).transpose(1, 3).unsqueeze(4).unbind(2)  # (b, l, g, 1)
    return dB, dC


class _Call:
    """The inputs in the layouts the kernels need, and the constants and sizes common to all launches."""

    def __init__(
        self, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
        bias: Tensor | None, log_A: bool, softplus: int, order: str, height: int, backward: bool,
    ) -> None:  # fmt: skip
        self.u, self.delta = _one_contiguous(u), _one_contiguous(delta)
        self.z = self.u if z is None else _one_contiguous(z)
        self.A, self.B, self.C = A.float().contiguous(), *_states_contiguous(B, C)
        self.D, self.bias = (self.A if x is None else x.contiguous() for x in (D, bias))
        self.backward = backward
        self.single = _single(self.u, self.delta, z, A.shape[1], order)
        if self.single:
            self.B, self.C = (_time_contiguous(M) for M in (self.B, self.C))
        time_contiguous = self.delta.stride(1) == 1
        full, single = z is not None or time_contiguous, u.element_size() == 4
        self.plan = layout(A.shape[1], u.shape[0] * A.shape[0], backward, full, time_contiguous, single)
        groups, channels = B.shape[2], A.shape[0] // B.shape[2]
        self.blocks = groups * -(-channels // self.plan.block)  # no block crosses a group boundary
        self.split = _split(u, self.blocks, A.shape[1], self.plan, backward)
        self.sizes = (u.shape[1], self.split.width, height, u.shape[1] // height)
        plan = self.plan
        self.constants: dict[str, Any] = {
            "GROUPS": groups, "K": channels, "N": A.shape[1], "BLOCKS": self.blocks // groups,
            "NT": plan.states, "DT": plan.channels, "LD": plan.lanes_d, "LN": plan.lanes_n, "T": plan.steps,
            "LOG_A": log_A, "ORDER": order, "GATE": z is not None, "BIAS": bias is not None, "SOFTPLUS": softplus,
            "num_warps": plan.warps, "num_stages": 1, "enable_fp_fusion": True, "maxnreg": plan.registers,
        }  # fmt: skip
        self.time = {"EVERY": kept_steps(A.shape[1], u.element_size()) // plan.steps, "SEGMENTS": self.split.segments}
        self.time["PIECES"] = self.split.pieces

    @property
    def fetch(self) -> str:
        """Along which axis the kernels prefetch inputs; the interpreter cannot prefetch."""
        if not self.u.is_cuda:
            return "none"
        return "time" if self.delta.stride(1) == 1 else "channels"

    @property
    def fetch_back(self) -> str:
        """Like `fetch`, for the backward."""
        return self.fetch if FETCH_BACK and self.time["EVERY"] * self.plan.steps >= 16 else "none"

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.u.device)

    @property
    def share(self) -> int:
        """Blocks of channels per program, which leaves one partial sum of dB and dC for all of them. With 5 to 8 states
        these sums cost more than a second block per program does, unless a block has two warps already."""
        waves = self.blocks * len(self.u) * self.plan.warps // (RESIDENT[True] * processors(self.u.device))
        least = 2 if 4 < self.constants["N"] <= 8 and self.plan.warps == 1 else 1
        return min(self.constants["BLOCKS"], max(least, waves // SPREAD))


def _split(u: Tensor, blocks: int, states: int, plan: Layout, backward: bool) -> Split:
    resident = REGISTERS // (32 * plan.registers) if plan.registers else RESIDENT[backward]
    room = resident * processors(u.device)
    return split_time(u.shape[1], blocks * len(u), room, plan, kept_steps(states, u.element_size()))


def _ends(call: _Call, x: Tensor) -> tuple[Tensor, Tensor]:
    """The state after each piece if it starts at zero, (b, pieces, n, d), and the sum of its dt, (b, pieces, d), for
    all segments but the last; in the backward, for all but the first."""
    split, length = call.split, x.shape[1]
    first = split.pieces if call.backward else 0
    pieces = -(-length // split.width) - split.pieces if call.backward else (split.segments - 1) * split.pieces
    channels, states = call.A.shape
    ends = sums = call.A  # placeholders; the kernels do not read them
    if pieces:
        ends, sums = call.new(len(x), pieces, states, channels), call.new(len(x), pieces, channels)
        M = call.C if call.backward else call.B
        x = x if call.backward else call.u
        kernels.launch.launch(
            kernels.scan_tiles.scan_ends,
            (call.blocks * len(x) * pieces,),
            *(x, call.delta, call.A, M, call.z, call.bias, ends, sums),
            *(length, split.width, first, pieces, *call.sizes[2:]),
            *(*x.stride(), *call.delta.stride(), *call.z.stride(), *M.stride()[:3]),
            **call.constants, BACKWARD=call.backward,
        )  # fmt: skip
    return ends, sums


def _one_contiguous(x: Tensor) -> Tensor:
    """x itself if its channels or its tokens are contiguous, otherwise a copy."""
    return x if 1 in (x.stride(1), x.stride(2)) else x.contiguous()


def _time_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.transpose(1, -1).contiguous().transpose(1, -1)


def _same_strides(*tensors: Tensor) -> bool:
    """Whether all have the same strides over tokens and channels."""
    return len({x.stride()[1:] for x in tensors}) == 1


def _states_contiguous(B: Tensor, C: Tensor) -> tuple[Tensor, ...]:
    """B and C with contiguous states. The copies, if needed, are small compared to u; one kernel makes both."""
    copied = [M.shape[3] > 1 and M.stride(3) != 1 for M in (B, C)]
    if all(copied) and B.dtype == C.dtype and B.shape[2] == 1:
        return torch.cat((B.squeeze(2), C.squeeze(2))).unsqueeze(2).chunk(2)
    return tuple(M.contiguous() if copy else M for M, copy in zip((B, C), copied, strict=True))
