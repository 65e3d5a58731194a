"""The selective scan of a single state, for tensors with time contiguous: a tile of channels and steps at a time.

    h_t = a_t h_{t-1} + b_t,  a = exp(dt A),  b = dt u B,  y = C h + D u,  out = y silu(z)

With one state there is little to compute, and memory sets the pace. A program takes CH channels of one image and goes
through time in tiles of S segments of Q steps. A lane owns one segment of one channel: it reads the steps in vectors of
V, goes through them one after the other, and only what a segment makes of a state passes between lanes. Backward, p is
the gradient of h, and q that of the state before:

    p_t = C_t dy_t + q_{t+1},  q_t = a_t p_t,  dB = p dt u,  dC = h dy,
    ddt = p (a_t h_{t-1} A + B u),  du = p B dt + D dy
"""
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, assignment"
# ruff: noqa: RUF005, SIM102

import torch
import triton
import triton.language as tl
from torch import Tensor

from mambacl.ops.kernels.launch import launch
from mambacl.ops.kernels.softplus import sigmoid_of_softplus, softplus
from mambacl.ops.kernels.tiles import INSIDE, LOG2E, as_float32, sigmoid
from mambacl.ops.scan_tiles import SINGLE_SEGMENTS, SINGLE_STEPS
from mambacl.ops.scan_triton import processors

LN2 = tl.constexpr(0.6931471805599453)
CHANNELS = 4  # of a program, which is one warp
RESIDENT = 16  # programs of the backward that a processor of a GPU holds at once


@triton.jit
def _then(a, b, a_next, b_next):
    return a * a_next, a_next * b + b_next


@triton.jit
def _divided(x, V: tl.constexpr):
    """(S, CH, V) as V blocks (S, CH)."""
    if V == 1:
        return (tl.reshape(x, [x.shape[0], x.shape[1]]),)
    else:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], V // 2, 2]))
        evens, odds = _divided(even, V // 2), _divided(odd, V // 2)
        found = ()
        for i in tl.static_range(V // 2):
            found = found + (evens[i], odds[i])
        return found


@triton.jit
def _joined(xs, first: tl.constexpr, V: tl.constexpr, EVERY: tl.constexpr):
    """V blocks (S, CH) of a tuple, from the first on, as (S, CH, V)."""
    if V == 1:
        return tl.expand_dims(xs[first], 2)
    else:
        both = tl.join(_joined(xs, first, V // 2, 2 * EVERY), _joined(xs, first + EVERY, V // 2, 2 * EVERY))
        return tl.reshape(both, [both.shape[0], both.shape[1], V])


@triton.jit
def _vector(at, number: tl.constexpr, L, S: tl.constexpr, Q: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr):
    """The tokens of a vector of V steps in each segment, (S, 1, V), and which of them exist."""
    step = at + tl.arange(0, S)[:, None, None] * Q + number * V + tl.arange(0, V)[None, None, :]
    return L - 1 - step if REVERSE else step, step < L


@triton.jit
def _load(
    rows, there, at, L, S: tl.constexpr, Q: tl.constexpr, V: tl.constexpr, EVEN: tl.constexpr, REVERSE: tl.constexpr
):
    """The Q steps of each lane in float32, as blocks (S, CH). `rows`: pointers (1, CH)."""
    found = ()
    for number in tl.static_range(Q // V):
        token, exists = _vector(at, number, L, S, Q, V, REVERSE)
        places = tl.expand_dims(rows, 2) + token
        if EVEN:
            raw = tl.load(places)
        else:
            raw = tl.load(places, mask=tl.expand_dims(there, 2) & exists, other=0.0)
        found = found + _divided(as_float32(raw), V)
    return found


@triton.jit
def _store(
    rows, xs, there, at, L, S: tl.constexpr, Q: tl.constexpr, V: tl.constexpr, EVEN: tl.constexpr, REVERSE: tl.constexpr
):
    for number in tl.static_range(Q // V):
        token, exists = _vector(at, number, L, S, Q, V, REVERSE)
        x = _joined(xs, number * V, V, 1).to(rows.dtype.element_ty)
        if EVEN:
            tl.store(tl.expand_dims(rows, 2) + token, x)
        else:
            tl.store(tl.expand_dims(rows, 2) + token, x, mask=tl.expand_dims(there, 2) & exists)


@triton.jit
def _added(xs, ys, Q: tl.constexpr):
    found = ()
    for i in tl.static_range(Q):
        found = found + (xs[i] + ys[i],)
    return found


@triton.jit
def _rows(pointer, image, channel, s_b, s_d, V: tl.constexpr):
    """Where each channel's tokens begin. Strides count vectors of V values."""
    return pointer + image * s_b * V + (image * 0 + channel) * s_d * V


@triton.jit
def _steps(raw, bias, exists, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, EVEN: tl.constexpr):
    """dt, zero where there is no token."""
    dt = raw
    if BIAS:
        dt += bias
    if SOFTPLUS == INSIDE:
        dt = softplus(dt)
    if not EVEN:
        dt = tl.where(exists, dt, 0.0)
    return dt


@triton.jit
def _decays(A_ptr, channel, there, LOG_A: tl.constexpr):
    A = tl.load(A_ptr + channel, mask=there, other=0.0)
    if LOG_A:
        A = tl.where(there, -tl.exp(A), 0.0)
    return A * LOG2E


@triton.jit
def _optional(pointer, channel, there, EXISTS: tl.constexpr):
    if EXISTS:
        return tl.load(pointer + channel, mask=there, other=0.0).to(tl.float32)
    else:
        return tl.zeros(channel.shape, tl.float32)


@triton.jit
def _entered(through, fresh, start, S: tl.constexpr, REVERSE: tl.constexpr):
    """The states with which each segment begins, and that with which the next tile does: `through` (S, CH) times the
    state before, plus `fresh`, is what a segment makes of it; `start` (S, CH) is the same for all."""
    through, fresh = tl.associative_scan((through, fresh), 0, _then, reverse=REVERSE)
    ends = through * start + fresh
    segment = tl.arange(0, S)[:, None] + tl.zeros(start.shape, tl.int32)
    if REVERSE:
        before, first, last = tl.minimum(segment + 1, S - 1), S - 1, 0
    else:
        before, first, last = tl.maximum(segment - 1, 0), 0, S - 1
    return tl.where(segment == first, start, tl.gather(ends, before, 0)), tl.gather(ends, segment * 0 + last, 0)


@triton.jit(do_not_specialize=["vectors"])
def scan_single_forward(
    u_ptr, delta_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, bias_ptr, out_ptr, last_ptr, kept_ptr, vectors,
    u_b, u_d, delta_b, delta_d, z_b, z_d, out_b, out_d, B_b, B_g, C_b, C_g,
    GROUPS: tl.constexpr, K: tl.constexpr, CH: tl.constexpr, S: tl.constexpr, Q: tl.constexpr, V: tl.constexpr,
    EVEN: tl.constexpr, LOG_A: tl.constexpr, SKIP: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr, KEEP: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """kept: (b, tiles, d), the state before each tile. Strides and the length count vectors of V values."""
    L = vectors * V
    BLOCKS: tl.constexpr = (K + CH - 1) // CH
    block, image = tl.program_id(0) % (GROUPS * BLOCKS), (tl.program_id(0) // (GROUPS * BLOCKS)).to(tl.int64)
    group = block // BLOCKS
    inside = block % BLOCKS * CH + tl.arange(0, CH)[None, :]
    channel, there = group * K + inside, inside < K
    A, always = _decays(A_ptr, channel, there, LOG_A), tl.full([1, CH], 1, tl.int1)
    bias, skip = _optional(bias_ptr, channel, there, BIAS), _optional(D_ptr, channel, there, SKIP)
    u_rows, delta_rows = (
        _rows(u_ptr, image, channel, u_b, u_d, V),
        _rows(delta_ptr, image, channel, delta_b, delta_d, V),
    )
    z_rows, out_rows = _rows(z_ptr, image, channel, z_b, z_d, V), _rows(out_ptr, image, channel, out_b, out_d, V)
    which = group + tl.zeros([1, CH], tl.int32)  # every channel reads them, in the layout of its own inputs
    B_row, C_row = _rows(B_ptr, image, which, B_b, B_g, V), _rows(C_ptr, image, which, C_b, C_g, V)
    segment = tl.arange(0, S)[:, None]
    one = there & (segment == 0)  # lane of each channel
    start = tl.zeros([S, CH], tl.float32)
    tiles = tl.cdiv(L, S * Q)
    for tile in range(0, tiles):
        at = tile * (S * Q)
        us = _load(u_rows, there, at, L, S, Q, V, EVEN, REVERSE)
        deltas = _load(delta_rows, there, at, L, S, Q, V, EVEN, REVERSE)
        Bs = _load(B_row, always, at, L, S, Q, V, EVEN, REVERSE)
        Cs = _load(C_row, always, at, L, S, Q, V, EVEN, REVERSE)
        if GATE:
            zs = _load(z_rows, there, at, L, S, Q, V, EVEN, REVERSE)
        if KEEP:
            tl.store(kept_ptr + (image * tiles + tile) * (GROUPS * K) + channel + segment * 0, start, mask=one)
        through, fresh = tl.full([S, CH], 1.0, tl.float32), tl.zeros([S, CH], tl.float32)
        decays, inputs = (), ()
        for i in tl.static_range(Q):
            dt = _steps(deltas[i], bias, at + segment * Q + i < L, BIAS, SOFTPLUS, EVEN)
            decays = decays + (tl.exp2(dt * A),)
            inputs = inputs + (dt * us[i] * Bs[i],)
            through *= decays[i]
            fresh = decays[i] * fresh + inputs[i]
        h, start = _entered(through, fresh, start, S, False)
        outs = ()
        for i in tl.static_range(Q):
            h = decays[i] * h + inputs[i]
            y = h * Cs[i]
            if SKIP:
                y += skip * us[i]
            if GATE:
                y *= zs[i] * sigmoid(zs[i])
            outs = outs + (y,)
        _store(out_rows, outs, there, at, L, S, Q, V, EVEN, REVERSE)
    tl.store(last_ptr + image * (GROUPS * K) + channel + segment * 0, start, mask=one)


@triton.jit(do_not_specialize=["vectors"])
def scan_single_backward(
    dout_ptr, dlast_ptr, u_ptr, delta_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, bias_ptr, kept_ptr, du_ptr, ddelta_ptr,
    dz_ptr, dA_ptr, dD_ptr, dbias_ptr, parts_ptr, vectors, dout_b, dout_d, u_b, u_d, delta_b, delta_d, z_b, z_d,
    du_b, du_d, ddelta_b, ddelta_d, dz_b, dz_d, B_b, B_g, C_b, C_g,
    GROUPS: tl.constexpr, K: tl.constexpr, CH: tl.constexpr, S: tl.constexpr, Q: tl.constexpr, V: tl.constexpr,
    EVEN: tl.constexpr, SHARE: tl.constexpr, LOG_A: tl.constexpr, SKIP: tl.constexpr, GATE: tl.constexpr,
    BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, LAST: tl.constexpr, NEED_A: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """dA, dD, dbias (b, d), to be summed; parts of dB and dC (b, groups * shares, 2, l), to be summed over the shares
    of a group: a program takes SHARE blocks of channels, one after the other."""
    L = vectors * V
    BLOCKS: tl.constexpr = (K + CH - 1) // CH
    SHARES: tl.constexpr = (BLOCKS + SHARE - 1) // SHARE
    share, image = tl.program_id(0) % (GROUPS * SHARES), (tl.program_id(0) // (GROUPS * SHARES)).to(tl.int64)
    group = share // SHARES
    which = group + tl.zeros([1, CH], tl.int32)  # every channel reads them, in the layout of its own inputs
    B_row, C_row = _rows(B_ptr, image, which, B_b, B_g, V), _rows(C_ptr, image, which, C_b, C_g, V)
    # The lanes of a block's first channel write dB, those of the second dC.
    number_of = tl.arange(0, CH)[None, :]
    sums_row = parts_ptr + ((image * (GROUPS * SHARES) + share) * 2 + number_of % 2) * vectors * V
    two = number_of < 2
    always = tl.full([1, CH], 1, tl.int1)
    segment = tl.arange(0, S)[:, None]
    tiles = tl.cdiv(L, S * Q)
    final = tl.minimum(SHARE, BLOCKS - share % SHARES * SHARE)
    for number in range(0, final):
        inside = (share % SHARES * SHARE + number) * CH + tl.arange(0, CH)[None, :]
        channel, there = group * K + inside, inside < K
        A = _decays(A_ptr, channel, there, LOG_A)
        bias, skip = _optional(bias_ptr, channel, there, BIAS), _optional(D_ptr, channel, there, SKIP)
        dout_rows, u_rows = (
            _rows(dout_ptr, image, channel, dout_b, dout_d, V),
            _rows(u_ptr, image, channel, u_b, u_d, V),
        )
        delta_rows, z_rows = (
            _rows(delta_ptr, image, channel, delta_b, delta_d, V), _rows(z_ptr, image, channel, z_b, z_d, V),
        )  # fmt: skip
        du_rows, dz_rows = _rows(du_ptr, image, channel, du_b, du_d, V), _rows(dz_ptr, image, channel, dz_b, dz_d, V)
        ddelta_rows = _rows(ddelta_ptr, image, channel, ddelta_b, ddelta_d, V)
        row = image * (GROUPS * K) + channel
        q_end = tl.zeros([S, CH], tl.float32)
        if LAST:
            q_end += tl.load(dlast_ptr + row, mask=there, other=0.0)
        dA, dD, dbias = tl.zeros([S, CH], tl.float32), tl.zeros([S, CH], tl.float32), tl.zeros([S, CH], tl.float32)
        for back in range(0, tiles):
            tile = tiles - 1 - back
            at = tile * (S * Q)
            us = _load(u_rows, there, at, L, S, Q, V, EVEN, REVERSE)
            deltas = _load(delta_rows, there, at, L, S, Q, V, EVEN, REVERSE)
            dys = _load(dout_rows, there, at, L, S, Q, V, EVEN, REVERSE)
            Bs = _load(B_row, always, at, L, S, Q, V, EVEN, REVERSE)
            Cs = _load(C_row, always, at, L, S, Q, V, EVEN, REVERSE)
            start = tl.load(
                kept_ptr + (image * tiles + tile) * (GROUPS * K) + channel + segment * 0,
                mask=there & (segment >= 0), other=0.0,
            )  # fmt: skip
            if GATE:
                zs, douts, gates = _load(z_rows, there, at, L, S, Q, V, EVEN, REVERSE), dys, ()
                dys = ()
                for i in tl.static_range(Q):
                    gates = gates + (sigmoid(zs[i]),)
                    dys = dys + (douts[i] * zs[i] * gates[i],)
            through, fresh = tl.full([S, CH], 1.0, tl.float32), tl.zeros([S, CH], tl.float32)
            steps, decays = (), ()
            for i in tl.static_range(Q):
                steps = steps + (_steps(deltas[i], bias, at + segment * Q + i < L, BIAS, SOFTPLUS, EVEN),)
                decays = decays + (tl.exp2(steps[i] * A),)
                through *= decays[i]
                fresh = decays[i] * fresh + steps[i] * us[i] * Bs[i]
            h, _ = _entered(through, fresh, start, S, False)
            fresh = tl.zeros([S, CH], tl.float32)
            for i in tl.static_range(Q - 1, -1, -1):
                fresh = decays[i] * (fresh + Cs[i] * dys[i])
            q, q_end = _entered(through, fresh, q_end, S, True)
            kept = ()  # of the state before, a_t h_{t-1}
            for i in tl.static_range(Q):
                kept = kept + (decays[i] * h,)
                h = kept[i] + steps[i] * us[i] * Bs[i]
            dus, ddeltas, dzs, dBCs = (), (), (), ()
            for i in tl.static_range(Q - 1, -1, -1):
                x = steps[i] * us[i]
                p = Cs[i] * dys[i] + q
                q = decays[i] * p
                h = kept[i] + x * Bs[i]
                decayed, pB = p * kept[i], p * Bs[i]
                ddt = decayed * (A * LN2) + pB * us[i]
                if SOFTPLUS > 0:
                    ddt *= sigmoid_of_softplus(steps[i])
                if not EVEN:  # without a softplus, whose derivative at a step of zero is zero
                    if SOFTPLUS == 0:
                        ddt = tl.where(at + segment * Q + i < L, ddt, 0.0)
                du = pB * steps[i]
                if SKIP:
                    du += skip * dys[i]
                    dD += dys[i] * us[i]
                if BIAS:
                    dbias += ddt
                if NEED_A:
                    dA += decayed * steps[i]
                if GATE:
                    y = h * Cs[i]
                    if SKIP:
                        y += skip * us[i]
                    dzs = (douts[i] * y * gates[i] * (1.0 + zs[i] * (1.0 - gates[i])),) + dzs
                dus, ddeltas, dBCs = (du,) + dus, (ddt,) + ddeltas, (p * x, h * dys[i]) + dBCs
            _store(du_rows, dus, there, at, L, S, Q, V, EVEN, REVERSE)
            _store(ddelta_rows, ddeltas, there, at, L, S, Q, V, EVEN, REVERSE)
            if GATE:
                _store(dz_rows, dzs, there, at, L, S, Q, V, EVEN, REVERSE)
            sums = ()
            for i in tl.static_range(Q):
                dB, dC = tl.sum(dBCs[2 * i], axis=1, keep_dims=True), tl.sum(dBCs[2 * i + 1], axis=1, keep_dims=True)
                sums = sums + (tl.where(number_of == 0, dB, dC),)
            if SHARE > 1:
                if number > 0:
                    sums = _added(sums, _load(sums_row, two, at, L, S, Q, V, False, REVERSE), Q)
            _store(sums_row, sums, two, at, L, S, Q, V, False, REVERSE)
        if NEED_A:
            dA = tl.sum(dA, axis=0, keep_dims=True)
            if LOG_A:
                dA *= A * LN2
            tl.store(dA_ptr + row, dA, mask=there)
        if SKIP:
            tl.store(dD_ptr + row, tl.sum(dD, axis=0, keep_dims=True), mask=there)
        if BIAS:
            tl.store(dbias_ptr + row, tl.sum(dbias, axis=0, keep_dims=True), mask=there)
        if SHARE > 1:
            tl.debug_barrier()  # what one lane stored, another may load


def _arguments(call, *tensors: Tensor) -> tuple[list[int], dict]:
    """The length and all strides of batch and channels in vectors of V values, as many as fit into 16 bytes and divide
    all of them; and the constants. `tensors`: (b, l, d), and B and C (b, l, g, 1), with time contiguous."""
    L, reverse = call.u.shape[1], call.constants["ORDER"] == "reverse"
    strides = [stride for x in (*tensors, call.B, call.C) for stride in (x.stride(0), x.stride(2))]
    V = 1 if reverse else 16 // max(x.element_size() for x in (*tensors, call.B, call.C))
    while V > 1 and any(number % V for number in (L, *strides)):
        V //= 2
    names = ("GROUPS", "K", "LOG_A", "GATE", "BIAS", "SOFTPLUS")
    constants = {name: call.constants[name] for name in names}
    constants |= {"CH": CHANNELS, "S": SINGLE_SEGMENTS, "Q": SINGLE_STEPS, "V": V, "REVERSE": reverse, "num_warps": 1}
    constants["EVEN"] = L % (SINGLE_SEGMENTS * SINGLE_STEPS) == 0 and constants["K"] % CHANNELS == 0
    return [number // V for number in (L, *strides)], constants


def _blocks(call) -> int:
    return triton.cdiv(call.constants["K"], CHANNELS)


def forward(call, out: Tensor, last: Tensor, kept: Tensor, skip: bool, keep: bool) -> None:
    numbers, constants = _arguments(call, call.u, call.delta, call.z, out)
    launch(
        scan_single_forward, (len(call.u) * call.constants["GROUPS"] * _blocks(call),),
        *(call.u, call.delta, call.A, call.B, call.C, call.D, call.z, call.bias, out, last, kept, *numbers),
        **constants, SKIP=skip, KEEP=keep,
    )  # fmt: skip


def backward(call, dout, dlast, kept, du, ddelta, dz, dA, dD, dbias, skip, need_A) -> tuple[Tensor, Tensor]:
    """Fills the gradients, and returns dB and dC (b, l, g, 1)."""
    numbers, constants = _arguments(call, dout, call.u, call.delta, call.z, du, ddelta, dz)
    batch, L, groups = len(call.u), call.u.shape[1], call.constants["GROUPS"]
    # As many programs as a GPU holds at once, so that few sums for dB and dC remain.
    share = triton.cdiv(_blocks(call), max(1, RESIDENT * processors(call.u.device) // (batch * groups)))
    shares = triton.cdiv(_blocks(call), share)
    parts = call.new(batch, groups, shares, 2, L)
    launch(
        scan_single_backward, (batch * groups * shares,),
        *(dout, dout if dlast is None else dlast.contiguous(), call.u, call.delta, call.A, call.B, call.C, call.D),
        *(call.z, call.bias, kept, du, ddelta, dz, dA, dD, dbias, parts, *numbers),
        **constants, SHARE=share, SKIP=skip, LAST=dlast is not None, NEED_A=need_A,
    )  # fmt: skip
    dB, dC = torch.sum(parts, 2).transpose(1, 3).unsqueeze(4).unbind(2)  # (b, l, g, 1)
    return dB, dC
