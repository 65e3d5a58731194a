"""The backend `triton` with all that surrounds the recurrence inside: bias, softplus, skip and gate, in either layout.

How the kernels of `ops.kernels.scan_tiles` (and, for a single state, `scan_single`) are laid out for given shapes, and
launched. Shapes: u, delta, z, out (b, l, d) with channels or time contiguous, read and written in place; A (d, n); B, C
(b, l, g, n); D, bias (d,). Each may be float32, bfloat16 or float16; states and sums are float32.

`order` says in which order the tokens follow one another: "forward", "reverse", or "cross", the four orders of a map
of `height` rows (by rows, by columns, both from the end), one for each of four groups, which then share the channels
of u.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mambacl.ops.scan_triton import Split, processors, segments

FILLED = 2048  # warps that keep a large GPU busy
RESIDENT = {False: 12, True: 8}  # warps of the forward and of the backward that a processor of a GPU holds at once
PIECE = 256  # steps: below, going over all of them once more costs more than it saves
SINGLE_SEGMENTS, SINGLE_STEPS = 8, 8  # of a tile of the kernels for a single state, and steps of each segment
SPREAD = 4  # waves of programs below which blocks of channels are not taken one after the other by one program


@dataclass(frozen=True)
class Layout:
    """How a program's lanes share a tile: `lanes_n` x `lanes_d` of them, with `states` x `channels` each; how many
    steps are taken at a time; the most registers of a thread; and how many warps a program has, along the channels."""

    states: int
    lanes_n: int
    channels: int
    lanes_d: int
    steps: int
    registers: int | None = None
    warps: int = 1

    @property
    def block(self) -> int:
        """Channels of a program."""
        return self.channels * self.lanes_d

    @property
    def ahead(self) -> bool:
        """Whether there are registers for what the next steps need."""
        return self.states * self.channels <= 8


@functools.cache
def layout(n: int, recurrences: int, backward: bool, full: bool = False) -> Layout:
    """Large tiles where there are recurrences enough, as they need the fewest exchanges; else more programs. `full`:
    time is contiguous, or the gate is taken in the kernel, which both take registers."""
    padded = 1 << (n - 1).bit_length()
    if padded == 1:
        return Layout(1, 1, 1, 32, 8)
    states = {2: 2, 4: 4, 8: 2, 16: 4, 32: 4}.get(padded, padded // 8)
    lanes_n = padded // states
    lanes_d = 32 // lanes_n
    most, fewest = 8 if full else 16, 2 if padded <= 32 else 1  # values of a lane; channels
    channels = min(4, max(fewest, most // states))
    programs = FILLED * (2 if backward else 1)
    while channels > fewest and recurrences < programs * channels * lanes_d:
        channels //= 2
    warps = 2 if backward and full and recurrences >= 2 * programs * channels * lanes_d else 1
    return Layout(states, lanes_n, channels, lanes_d * warps, 4, warps=warps)


def kept_steps(n: int, itemsize: int) -> int:
    """Steps between the states that the forward keeps: of 16 states, these take as much memory as u. A single state is
    cheap to keep, and everything else is read from memory at its speed, so that nothing should be read twice."""
    return 8 if n == 1 else 16 * max(1, 4 // itemsize)


def _single(u: Tensor, delta: Tensor, z: Tensor | None, n: int, order: str) -> bool:
    """Whether the kernels of a single state serve: they want time contiguous."""
    return n == 1 and order != "cross" and all(x is None or x.stride(1) == 1 for x in (u, delta, z))


def kept_shape(u: Tensor, delta: Tensor, A: Tensor, z: Tensor | None = None, order: str = "forward") -> tuple[int, ...]:
    """Shape of the states that the forward keeps for the backward, (b, intervals, n, d)."""
    length, n = u.shape[1], A.shape[1]
    single = _single(u, delta, z, n, order)
    steps = SINGLE_SEGMENTS * SINGLE_STEPS if single else kept_steps(n, u.element_size())
    return u.shape[0], -(-length // steps), n, A.shape[0]


def out_like(u: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """A new tensor (b, l, channels) with time contiguous where it is in u, else channels."""
    batch, length, _ = u.shape
    if u.stride(1) == 1 and u.stride(2) != 1:
        return torch.empty(batch, channels, length, dtype=dtype, device=u.device).mT
    return torch.empty(batch, length, channels, dtype=dtype, device=u.device)


def forward(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    bias: Tensor | None = None, *, log_A: bool = False, softplus: int = 0, order: str = "forward", height: int = 1,
    dtype: torch.dtype = torch.float32, keep: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output in `dtype`, last state and, unless `keep` is false, the states for the backward. With `log_A`, A holds
    log(-A). `softplus`: 0 none, 1 delta is one already, 2 the kernel takes it."""
    from mambacl.ops.kernels.launch import launch
    from mambacl.ops.kernels.scan_tiles import scan_forward

    call = _Call(u, delta, A, B, C, D, z, bias, log_A, softplus, order, height, backward=False)
    out = out_like(u, len(A), dtype)
    last = call.new(len(u), *A.shape)
    kept = call.new(*(kept_shape(u, delta, A, z, order) if keep else (0,)))
    if call.single:
        from mambacl.ops.kernels import scan_single

        scan_single.forward(call, out, last, kept, D is not None, keep)
        return out, last, kept
    ends, sums = _ends(call, u)
    launch(
        scan_forward,
        (call.blocks * len(u) * call.split.segments,),
        *(call.u, call.delta, call.A, call.B, call.C, call.D, call.z, call.bias, out, last, kept, ends, sums),
        *call.sizes,
        *(*call.u.stride(), *call.delta.stride(), *call.z.stride(), *out.stride()),
        *(*call.B.stride()[:3], *call.C.stride()[:3]),
        **call.constants, **call.time, SKIP=D is not None, KEEP=keep,
        SAME=_same_steps(call.u, call.delta, call.z, out), FETCH=call.fetch,
    )  # fmt: skip
    return out, last, kept


def backward(
    dout: Tensor, dlast: Tensor | None, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
    z: Tensor | None, bias: Tensor | None, kept: Tensor, *, log_A: bool = False, softplus: int = 0,
    order: str = "forward", height: int = 1, need_A: bool = True,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of u, delta, A, B, C, D, z and bias: those of u, delta and z in their types and layouts, the others in
    float32; None where there is no input. With `softplus`, the gradient of delta is that of what went into it; with
    `log_A`, A holds log(-A), and its gradient is that of it. Without `need_A` there are no sums for A."""
    from mambacl.ops.kernels.launch import launch
    from mambacl.ops.kernels.scan_tiles import scan_backward

    call = _Call(u, delta, A, B, C, D, z, bias, log_A, softplus, order, height, backward=True)
    dout = _one_contiguous(dout)
    batch, length, _ = u.shape
    channels, states = A.shape
    parts = batch * call.split.segments
    du = out_like(u, channels, torch.float32 if order == "cross" else u.dtype)
    ddelta, dz = out_like(delta, channels, delta.dtype), u if z is None else out_like(z, channels, z.dtype)
    dA = call.new(parts, *A.shape) if need_A else call.A  # A itself is not written
    dD, dbias = (call.A if x is None else call.new(parts, channels) for x in (D, bias))
    if call.single:
        from mambacl.ops.kernels import scan_single

        dB, dC = scan_single.backward(
            call, _time_contiguous(dout), dlast, kept, du, ddelta, dz, dA, dD, dbias, D is not None, need_A
        )  # fmt: skip
        return _gradients(du, ddelta, dA, dB, dC, dD, dz, dbias, D, z, bias, need_A)
    share = call.share
    shares = -(-call.constants["BLOCKS"] // share) * B.shape[2]
    dBC = call.new(batch, shares, length, 2, states)
    every = call.time["EVERY"]
    programs = shares * batch * call.split.segments
    scratch = call.new(programs * every * _padded(states) * call.plan.block) if every > 1 else call.A
    ends, sums = _ends(call, dout)
    launch(
        scan_backward,
        (programs,),
        *(dout, dout if dlast is None else dlast.contiguous(), call.u, call.delta, call.A, call.B, call.C, call.D),
        *(call.z, call.bias, kept, ends, sums, scratch, du, ddelta, dz, dA, dD, dbias, dBC),
        *call.sizes,
        *(*dout.stride(), *call.u.stride(), *call.delta.stride(), *call.z.stride()),
        *(*call.B.stride()[:3], *call.C.stride()[:3], *du.stride(), *ddelta.stride(), *dz.stride()),
        **call.constants, **call.time, SHARE=share, SKIP=D is not None, LAST=dlast is not None, NEED_A=need_A,
        SAME=_same_steps(call.u, call.delta, call.z, dout, du, ddelta, dz), AHEAD=call.plan.ahead,
    )  # fmt: skip
    dB, dC = dBC.view(batch, B.shape[2], -1, length, 2, states).sum(2).transpose(1, 2).unbind(3)  # (b, l, g, n)
    if order == "cross":  # the four orders share u
        du = du.unflatten(2, (B.shape[2], -1)).sum(2).to(u.dtype)
    return _gradients(du, ddelta, dA, dB, dC, dD, dz, dbias, D, z, bias, need_A)


def _gradients(du, ddelta, dA, dB, dC, dD, dz, dbias, D, z, bias, need_A):  # type: ignore[no-untyped-def]
    return (
        *(du, ddelta, dA.sum(0) if need_A else None, dB, dC),
        *(dD.sum(0) if D is not None else None, dz if z is not None else None),
        dbias.sum(0) if bias is not None else None,
    )


class _Call:
    """The inputs as the kernels take them, and what all of them are compiled and launched with."""

    def __init__(
        self, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
        bias: Tensor | None, log_A: bool, softplus: int, order: str, height: int, backward: bool,
    ) -> None:  # fmt: skip
        self.u, self.delta = _one_contiguous(u), _one_contiguous(delta)
        self.z = self.u if z is None else _one_contiguous(z)
        self.A, self.B, self.C = A.float().contiguous(), _states_contiguous(B), _states_contiguous(C)
        self.D, self.bias = (self.A if x is None else x.contiguous() for x in (D, bias))
        self.backward = backward
        self.single = _single(self.u, self.delta, z, A.shape[1], order)
        if self.single:
            self.B, self.C = (_time_contiguous(M) for M in (self.B, self.C))
        full = z is not None or self.delta.stride(1) == 1
        self.plan = layout(A.shape[1], u.shape[0] * A.shape[0], backward, full)
        groups, channels = B.shape[2], A.shape[0] // B.shape[2]
        self.blocks = groups * -(-channels // self.plan.block)  # none of which reaches into another group
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
        """Which way the kernels bring inputs into the cache ahead of time; the interpreter has none."""
        if not self.u.is_cuda:
            return "none"
        return "time" if self.delta.stride(1) == 1 else "channels"

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.u.device)

    @property
    def share(self) -> int:
        """Blocks of channels that one program takes one after the other, so that it leaves one sum for dB and dC."""
        waves = self.blocks * len(self.u) * self.plan.warps // (RESIDENT[True] * processors(self.u.device))
        return max(1, min(self.constants["BLOCKS"], waves // SPREAD))


def _padded(states: int) -> int:
    return int(1 << (states - 1).bit_length())


def _split(u: Tensor, blocks: int, states: int, plan: Layout, backward: bool) -> Split:
    """Pieces are a multiple of the steps between kept states."""
    length, room, kept = u.shape[1], RESIDENT[backward] * processors(u.device), kept_steps(states, u.element_size())
    wanted = segments(length, blocks * len(u), room)
    if wanted == 1 or plan.states == 1:  # with a single state, most of the time goes into reading the inputs
        return Split(length, 1, 1)
    pieces = max(1, length // (wanted * PIECE))
    width = -(-length // (wanted * pieces * kept)) * kept
    return Split(width, pieces, -(-length // (width * pieces)))


def _ends(call: _Call, x: Tensor) -> tuple[Tensor, Tensor]:
    """What each piece makes of nothing, (b, pieces, n, d), and the sums of its steps, (b, pieces, d): those of all
    segments but the last; backward, of all but the first."""
    from mambacl.ops.kernels.launch import launch
    from mambacl.ops.kernels.scan_tiles import scan_ends

    split, length = call.split, x.shape[1]
    first = split.pieces if call.backward else 0
    pieces = -(-length // split.width) - split.pieces if call.backward else (split.segments - 1) * split.pieces
    channels, states = call.A.shape
    ends = sums = call.A  # not read
    if pieces:
        ends, sums = call.new(len(x), pieces, states, channels), call.new(len(x), pieces, channels)
        M = call.C if call.backward else call.B
        x = x if call.backward else call.u
        launch(
            scan_ends,
            (call.blocks * len(x) * pieces,),
            *(x, call.delta, call.A, M, call.z, call.bias, ends, sums),
            *(length, split.width, first, pieces, *call.sizes[2:]),
            *(*x.stride(), *call.delta.stride(), *call.z.stride(), *M.stride()[:3]),
            **call.constants, BACKWARD=call.backward,
        )  # fmt: skip
    return ends, sums


def _one_contiguous(x: Tensor) -> Tensor:
    """x itself where its channels or its tokens are contiguous, else a copy."""
    return x if 1 in (x.stride(1), x.stride(2)) else x.contiguous()


def _time_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.transpose(1, -1).contiguous().transpose(1, -1)


def _same_steps(*tensors: Tensor) -> bool:
    """Whether the same offsets lead from one channel or token to the next in all of them."""
    return len({x.stride()[1:] for x in tensors}) == 1


def _states_contiguous(M: Tensor) -> Tensor:
    """B or C with contiguous states; where time was, a copy, which is small beside u."""
    return M if M.stride(3) == 1 or M.shape[3] == 1 else M.contiguous()
