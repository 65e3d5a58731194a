"""Triton kernels for the selective scan with a single state and contiguous time.

    h_t = a_t h_{t-1} + b_t,  a = exp(dt A),  b = dt u B,  y = C h + D u,  out = y silu(z)

With one state the arithmetic is cheap and memory limits the speed. A program processes CH channels of one image, in
tiles of S segments of Q steps. A lane owns one segment of one channel: it reads the steps in vectors of V and runs the
recurrence over them; lanes exchange only the effect of each segment on the state. In the backward, p is the gradient
of h_t and q that of h_{t-1}:

    p_t = C_t dy_t + q_{t+1},  q_t = a_t p_t,  dB = p dt u,  dC = h dy,
    ddt = p (a_t h_{t-1} A + B u),  du = p B dt + D dy

The mask `there` marks the channels of a block that exist.
"""
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, assignment"
# ruff: noqa: RUF005, SIM102

import triton
import triton.language as tl

from mambacl.ops.kernels.softplus import sigmoid_of_softplus, softplus
from mambacl.ops.kernels.tiles import INSIDE, as_float32, rates_of, sigmoid

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _compose(a, b, a_next, b_next):
    """The map h -> a h + b followed by h -> a_next h + b_next."""
    return a * a_next, a_next * b + b_next


@triton.jit
def _unstack(x, V: tl.constexpr):
    """Splits (S, CH, V) into V blocks (S, CH)."""
    if V == 1:
        return (tl.reshape(x, [x.shape[0], x.shape[1]]),)
    else:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], V // 2, 2]))
        evens, odds = _unstack(even, V // 2), _unstack(odd, V // 2)
        found = ()
        for i in tl.static_range(V // 2):
            found = found + (evens[i], odds[i])
        return found


@triton.jit
def _stack(xs, first: tl.constexpr, V: tl.constexpr, EVERY: tl.constexpr):
    """Stacks V blocks (S, CH) of a tuple, every EVERY-th from `first` on, into (S, CH, V)."""
    if V == 1:
        return tl.expand_dims(xs[first], 2)
    else:
        both = tl.join(_stack(xs, first, V // 2, 2 * EVERY), _stack(xs, first + EVERY, V // 2, 2 * EVERY))
        return tl.reshape(both, [both.shape[0], both.shape[1], V])


@triton.jit
def _vector(at, number: tl.constexpr, L, S: tl.constexpr, Q: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr):
    """The tokens of one vector of V steps per segment, (S, 1, V), and the mask of those that exist."""
    step = at + tl.arange(0, S)[:, None, None] * Q + number * V + tl.arange(0, V)[None, None, :]
    return L - 1 - step if REVERSE else step, step < L


@triton.jit
def _load(
    rows, there, at, L, S: tl.constexpr, Q: tl.constexpr, V: tl.constexpr, EVEN: tl.constexpr, REVERSE: tl.constexpr
):
    """Loads the Q steps of each lane in float32, as Q blocks (S, CH). `rows`: pointers (1, CH)."""
    found = ()
    for number in tl.static_range(Q // V):
        token, exists = _vector(at, number, L, S, Q, V, REVERSE)
        places = tl.expand_dims(rows, 2) + token
        if EVEN:
            raw = tl.load(places)
        else:
            raw = tl.load(places, mask=tl.expand_dims(there, 2) & exists, other=0.0)
        found = found + _unstack(as_float32(raw), V)
    return found


@triton.jit
def _store(
    rows, xs, there, at, L, S: tl.constexpr, Q: tl.constexpr, V: tl.constexpr, EVEN: tl.constexpr, REVERSE: tl.constexpr
):
    for number in tl.static_range(Q // V):
        token, exists = _vector(at, number, L, S, Q, V, REVERSE)
        x = _stack(xs, number * V, V, 1).to(rows.dtype.element_ty)
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
    """Pointers to each channel's first token. Strides count vectors of V values."""
    return pointer + image * s_b * V + (image * 0 + channel) * s_d * V


@triton.jit
def _dt(raw, bias, exists, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, EVEN: tl.constexpr):
    """dt; zero beyond the last token."""
    dt = raw
    if BIAS:
        dt += bias
    if SOFTPLUS == INSIDE:
        dt = softplus(dt)
    if not EVEN:
        dt = tl.where(exists, dt, 0.0)
    return dt


@triton.jit
def _optional(pointer, channel, there, EXISTS: tl.constexpr):
    if EXISTS:
        return tl.load(pointer + channel, mask=there, other=0.0).to(tl.float32)
    else:
        return tl.zeros(channel.shape, tl.float32)


@triton.jit
def _entered(through, fresh, start, S: tl.constexpr, REVERSE: tl.constexpr):
    """The state at the start of each segment, and at the start of the next tile. A segment maps the state h to
    `through` h + `fresh`, both (S, CH); `start` (S, CH) is the state at the start of the tile, the same in every
    row."""
    through, fresh = tl.associative_scan((through, fresh), 0, _compose, reverse=REVERSE)
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
    A, always = rates_of(A_ptr, channel, there, LOG_A), tl.full([1, CH], 1, tl.int1)
    bias, skip = _optional(bias_ptr, channel, there, BIAS), _optional(D_ptr, channel, there, SKIP)
    u_rows = _rows(u_ptr, image, channel, u_b, u_d, V)
    delta_rows = _rows(delta_ptr, image, channel, delta_b, delta_d, V)
    z_rows, out_rows = _rows(z_ptr, image, channel, z_b, z_d, V), _rows(out_ptr, image, channel, out_b, out_d, V)
    which = group + tl.zeros([1, CH], tl.int32)  # every channel reads the same row, in the layout of its inputs
    B_row, C_row = _rows(B_ptr, image, which, B_b, B_g, V), _rows(C_ptr, image, which, C_b, C_g, V)
    segment = tl.arange(0, S)[:, None]
    one = there & (segment == 0)  # one lane per channel
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
            dt = _dt(deltas[i], bias, at + segment * Q + i < L, BIAS, SOFTPLUS, EVEN)
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
    """dA, dD and dbias in one row (3 * d) per image, to be summed; parts of dB and dC (b, groups * shares, 2, l), to be
    summed over the shares of a group. A program processes SHARE blocks of channels in turn."""
    L = vectors * V
    BLOCKS: tl.constexpr = (K + CH - 1) // CH
    SHARES: tl.constexpr = (BLOCKS + SHARE - 1) // SHARE
    share, image = tl.program_id(0) % (GROUPS * SHARES), (tl.program_id(0) // (GROUPS * SHARES)).to(tl.int64)
    group = share // SHARES
    which = group + tl.zeros([1, CH], tl.int32)  # every channel reads the same row, in the layout of its inputs
    B_row, C_row = _rows(B_ptr, image, which, B_b, B_g, V), _rows(C_ptr, image, which, C_b, C_g, V)
    # The lanes of a block's first channel write dB, those of its second channel dC.
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
        A = rates_of(A_ptr, channel, there, LOG_A)
        bias, skip = _optional(bias_ptr, channel, there, BIAS), _optional(D_ptr, channel, there, SKIP)
        dout_rows = _rows(dout_ptr, image, channel, dout_b, dout_d, V)
        u_rows = _rows(u_ptr, image, channel, u_b, u_d, V)
        delta_rows = _rows(delta_ptr, image, channel, delta_b, delta_d, V)
        z_rows = _rows(z_ptr, image, channel, z_b, z_d, V)
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
            dts, decays = (), ()
            for i in tl.static_range(Q):
                dts = dts + (_dt(deltas[i], bias, at + segment * Q + i < L, BIAS, SOFTPLUS, EVEN),)
                decays = decays + (tl.exp2(dts[i] * A),)
                through *= decays[i]
                fresh = decays[i] * fresh + dts[i] * us[i] * Bs[i]
            h, _ = _entered(through, fresh, start, S, False)
            fresh = tl.zeros([S, CH], tl.float32)
            for i in tl.static_range(Q - 1, -1, -1):
                fresh = decays[i] * (fresh + Cs[i] * dys[i])
            q, q_end = _entered(through, fresh, q_end, S, True)
            kept = ()  # a_t h_{t-1}
            for i in tl.static_range(Q):
                kept = kept + (decays[i] * h,)
                h = kept[i] + dts[i] * us[i] * Bs[i]
            dus, ddeltas, dzs, dBCs = (), (), (), ()
            for i in tl.static_range(Q - 1, -1, -1):
                x = dts[i] * us[i]
                p = Cs[i] * dys[i] + q
                q = decays[i] * p
                h = kept[i] + x * Bs[i]
                decayed, pB = p * kept[i], p * Bs[i]
                ddt = decayed * (A * LN2) + pB * us[i]
                if SOFTPLUS > 0:
                    ddt *= sigmoid_of_softplus(dts[i])
                if not EVEN:  # a softplus needs no mask: its derivative is zero where dt is zero
                    if SOFTPLUS == 0:
                        ddt = tl.where(at + segment * Q + i < L, ddt, 0.0)
                du = pB * dts[i]
                if SKIP:
                    du += skip * dys[i]
                    dD += dys[i] * us[i]
                if BIAS:
                    dbias += ddt
                if NEED_A:
                    dA += decayed * dts[i]
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
        own = row + image * (2 * GROUPS * K)
        if NEED_A:
            dA = tl.sum(dA, axis=0, keep_dims=True)
            if LOG_A:
                dA *= A * LN2
            tl.store(dA_ptr + own, dA, mask=there)
        if SKIP:
            tl.store(dD_ptr + own, tl.sum(dD, axis=0, keep_dims=True), mask=there)
        if BIAS:
            tl.store(dbias_ptr + own, tl.sum(dbias, axis=0, keep_dims=True), mask=there)
        if SHARE > 1:
            tl.debug_barrier()  # another lane can load what one stored
