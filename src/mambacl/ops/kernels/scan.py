"""Triton kernels for the recurrence of the selective scan: forward, backward, and `scan_ends` for split time.

Each program is one warp. It steps through time for one image and a block of channels, with the states in registers;
`tiles` describes how its lanes share them. A lane's states and channels are contiguous in memory, and the sums over
states (y) and over channels (dB and dC) need few shuffles and none across warps.

If the recurrences are too few to fill the GPU, time is split into segments, one per program, and these into pieces of W
steps. `scan_ends` first computes, for each piece, its final state from a zero start and the sum of its deltas, which
gives its decay. From these every program computes the state its segment starts with.

All kernels process T steps at a time and load all inputs before the arithmetic. The forward keeps the state before
every T * EVERY steps; the backward recomputes the states of T steps from it, then goes back through them. Sums are
reproducible: programs write their parts of dA (per image) and of dB and dC (per block of channels) separately.

Masks: `there` marks the channels of a block that exist, `real` the states that exist.
"""
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, assignment"
# ruff: noqa: RUF005, SIM102

import triton
import triton.language as tl

from mambacl.ops.kernels.softplus import sigmoid_of_softplus
from mambacl.ops.kernels.tiles import as_float32, carried, place_of, rates_of

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _before(i, count):
    """Whether i < count, as a block: the interpreter cannot combine a scalar and a mask."""
    return tl.full([1, 1, 1, 1], i, tl.int32) < count


@triton.jit
def _load_steps(pointers, stride: tl.constexpr, mask, count, T: tl.constexpr, MASKED: tl.constexpr, TAIL: tl.constexpr):
    """Loads T steps of an input. In the tail, the steps from `count` on are zeros."""
    found = ()
    for i in tl.static_range(T):
        if TAIL:
            step = tl.load(pointers + i * stride, mask=mask & _before(i, count), other=0.0)
        elif MASKED:
            step = tl.load(pointers + i * stride, mask=mask, other=0.0)
        else:
            step = tl.load(pointers + i * stride)
        found = found + (as_float32(step),)
    return found


@triton.jit
def _over_states(x):
    """The sum over the states, in every lane."""
    return tl.sum(tl.sum(x, axis=2, keep_dims=True), axis=0, keep_dims=True)


@triton.jit
def _xor(x, y):
    return x ^ y


@triton.jit
def _two_over_channels(x, y, LN: tl.constexpr, LD: tl.constexpr, NT: tl.constexpr):
    """Sums over the channels, (LN, LD, NT, 1): of x in every second lane of LD, of y in the others.

    Neighbouring lanes first exchange values, so that each then computes one sum instead of two.
    """
    x, y = tl.sum(x, axis=3, keep_dims=True), tl.sum(y, axis=3, keep_dims=True)
    second = tl.broadcast_to(tl.arange(0, LD)[None, :, None, None] % 2 == 1, [LN, LD, NT, 1])
    own = tl.reshape(tl.where(second, y, x), [LN, LD // 2, 2, NT])
    given = tl.reshape(tl.where(second, x, y).to(tl.int32, bitcast=True), [LN, LD // 2, 2, NT])
    taken = (tl.reduce(given, 2, _xor, keep_dims=True) ^ given).to(tl.float32, bitcast=True)  # the neighbour's value
    sums = tl.sum(own + taken, axis=1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(sums, [LN, LD // 2, 2, NT]), [LN, LD, NT, 1])


@triton.jit
def _ends_chunk(
    state, total, A, x_ptrs, delta_ptrs, M_ptrs, there, real, count,
    x_l: tl.constexpr, delta_l: tl.constexpr, M_l: tl.constexpr, T: tl.constexpr, EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr, BACKWARD: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Returns the state (or its gradient) after T steps, and the sum of the deltas."""
    xs = _load_steps(x_ptrs, x_l, there, count, T, not EVEN_K, TAIL)
    deltas = _load_steps(delta_ptrs, delta_l, there, count, T, not EVEN_K, TAIL)
    Ms = _load_steps(M_ptrs, M_l, real, count, T, not EVEN_N, TAIL)
    for i in tl.static_range(T):
        if BACKWARD:
            delta = deltas[T - 1 - i]
            new = tl.exp2(delta * A) * (state + Ms[T - 1 - i] * xs[T - 1 - i])
            if TAIL:
                new = tl.where(_before(T - 1 - i, count), new, state)
        else:
            delta = deltas[i]
            new = tl.exp2(delta * A) * state + (delta * xs[i]) * Ms[i]
        state = new
        total += delta
    return state, total


@triton.jit(do_not_specialize=["L", "W", "first", "pieces"])
def scan_ends(
    x_ptr, delta_ptr, A_ptr, M_ptr, ends_ptr, sums_ptr, x_b, delta_b, M_b, L, W, first, pieces,
    x_l: tl.constexpr, delta_l: tl.constexpr, M_l: tl.constexpr, M_g: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    N: tl.constexpr, NT: tl.constexpr, DT: tl.constexpr, LD: tl.constexpr, LN: tl.constexpr, BLOCKS: tl.constexpr,
    T: tl.constexpr, LOG_A: tl.constexpr, REVERSE: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """For each piece of W steps from `first` on: the state after it, starting from zero, (b, pieces, n, d), and the sum
    of its deltas. x is u and M is B. In the backward: the gradient of the state before it; x is dy and M is C. Only the
    backward includes the last piece, which can be shorter."""
    EVEN_K: tl.constexpr = K % (DT * LD) == 0
    EVEN_N: tl.constexpr = N == NT * LN
    WAY: tl.constexpr = -1 if REVERSE else 1
    blocks: tl.constexpr = D // K * BLOCKS
    block, part = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    piece, image = part % pieces, (part // pieces).to(tl.int64)
    group = block // BLOCKS
    channels, there, states, real, matrix = place_of(block, K, N, NT, DT, LD, LN, BLOCKS)
    A = rates_of(A_ptr, matrix, there & real, LOG_A)
    start = image * 0
    if REVERSE:
        start += L - 1
    x_ptr += image * x_b + start * x_l
    delta_ptr += image * delta_b + start * delta_l
    M_ptr += image * M_b + group * M_g + start * M_l
    state = tl.zeros([LN, LD, NT, DT], tl.float32)
    total = tl.zeros([LN, LD, 1, DT], tl.float32)
    begin = (first + piece) * (W // T)
    whole = tl.minimum(begin + W // T, L // T)
    if BACKWARD:
        if (first + piece + 1) * W > whole * T:
            if whole * T < L:
                at = image * 0 + WAY * whole * T
                state, total = _ends_chunk(
                    state, total, A, x_ptr + at * x_l + channels, delta_ptr + at * delta_l + channels,
                    M_ptr + at * M_l + states, there, real, L - whole * T,
                    WAY * x_l, WAY * delta_l, WAY * M_l, T, EVEN_K, EVEN_N, BACKWARD, True,
                )  # fmt: skip
    for number in range(0, whole - begin):
        chunk = begin + number
        if BACKWARD:
            chunk = whole - 1 - number
        at = image * 0 + WAY * chunk * T
        state, total = _ends_chunk(
            state, total, A, x_ptr + at * x_l + channels, delta_ptr + at * delta_l + channels,
            M_ptr + at * M_l + states, there, real, T,
            WAY * x_l, WAY * delta_l, WAY * M_l, T, EVEN_K, EVEN_N, BACKWARD, False,
        )  # fmt: skip
    place = image * pieces + piece
    leads = there & (tl.broadcast_to(tl.arange(0, LN)[:, None, None, None], [LN, LD, 1, DT]) == 0)
    tl.store(sums_ptr + place * D + channels, total, mask=leads)
    tl.store(ends_ptr + place * N * D + states * D + channels, state, mask=there & real)


@triton.jit
def _forward_chunk(
    h, A, u_ptrs, delta_ptrs, B_ptrs, C_ptrs, y_ptrs, there, real, writes, count,
    u_l: tl.constexpr, delta_l: tl.constexpr, B_l: tl.constexpr, C_l: tl.constexpr, y_l: tl.constexpr,
    LN: tl.constexpr, LD: tl.constexpr, DT: tl.constexpr, T: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """Writes T outputs; returns the state after them."""
    us = _load_steps(u_ptrs, u_l, there, count, T, not EVEN_K, TAIL)
    deltas = _load_steps(delta_ptrs, delta_l, there, count, T, not EVEN_K, TAIL)
    Bs = _load_steps(B_ptrs, B_l, real, count, T, not EVEN_N, TAIL)
    Cs = _load_steps(C_ptrs, C_l, real, count, T, not EVEN_N, TAIL)
    for i in tl.static_range(T):
        new = tl.exp2(deltas[i] * A) * h + (deltas[i] * us[i]) * Bs[i]
        if TAIL:  # 0 times an infinite A is NaN
            new = tl.where(_before(i, count), new, h)
        h = new
        if not EVEN_N:
            h = tl.where(real, h, 0.0)
        y = tl.broadcast_to(_over_states(h * Cs[i]), [LN, LD, 1, DT])
        if TAIL:
            tl.store(y_ptrs + i * y_l, y, mask=writes & _before(i, count))
        else:
            tl.store(y_ptrs + i * y_l, y, mask=writes)
    return h


@triton.jit(do_not_specialize=["L", "W"])
def scan_forward(
    u_ptr, delta_ptr, A_ptr, B_ptr, C_ptr, y_ptr, last_ptr, kept_ptr, ends_ptr, sums_ptr, u_b, delta_b, B_b, C_b, L, W,
    u_l: tl.constexpr, delta_l: tl.constexpr, B_l: tl.constexpr, B_g: tl.constexpr, C_l: tl.constexpr,
    C_g: tl.constexpr, D: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    NT: tl.constexpr, DT: tl.constexpr, LD: tl.constexpr, LN: tl.constexpr, BLOCKS: tl.constexpr,
    T: tl.constexpr, EVERY: tl.constexpr, SEGMENTS: tl.constexpr, PIECES: tl.constexpr, LOG_A: tl.constexpr,
    KEEP: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """u, delta, y: (b, l, d); A (d, n); B, C (b, l, g, n); last (b, d, n); kept (b, chunks, n, d)."""
    EVEN_K: tl.constexpr = K % (DT * LD) == 0
    EVEN_N: tl.constexpr = N == NT * LN
    WAY: tl.constexpr = -1 if REVERSE else 1
    blocks: tl.constexpr = D // K * BLOCKS
    block, part = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    segment, image = part % SEGMENTS, (part // SEGMENTS).to(tl.int64)
    group = block // BLOCKS
    channels, there, states, real, matrix = place_of(block, K, N, NT, DT, LD, LN, BLOCKS)
    A = rates_of(A_ptr, matrix, there & real, LOG_A)
    start = image * 0  # makes the offsets 64-bit
    if REVERSE:
        start += L - 1
    u_ptr += image * u_b + start * u_l
    delta_ptr += image * delta_b + start * delta_l
    B_ptr += image * B_b + group * B_g + start * B_l
    C_ptr += image * C_b + group * C_g + start * C_l
    y_ptr += (image * L + start) * D
    kept_ptr += image * tl.cdiv(L, T * EVERY) * N * D
    writes = there & (tl.broadcast_to(tl.arange(0, LN)[:, None, None, None], [LN, LD, 1, DT]) == 0)

    h = tl.zeros([LN, LD, NT, DT], tl.float32)
    whole, first, end = L // T, 0, L // T
    if SEGMENTS > 1:
        place = image * ((SEGMENTS - 1) * PIECES)
        h = carried(h, A, ends_ptr, sums_ptr, place, segment * PIECES, 1, channels, states, there, real, D, N)
        first = segment * PIECES * (W // T)
        end = tl.minimum(first + PIECES * (W // T), whole)
    for chunk in range(first, end):
        if KEEP:
            if chunk % EVERY == 0:
                tl.store(kept_ptr + (image * 0 + chunk // EVERY) * N * D + states * D + channels, h, mask=there & real)
        at = image * 0 + WAY * chunk * T
        h = _forward_chunk(
            h, A, u_ptr + at * u_l + channels, delta_ptr + at * delta_l + channels, B_ptr + at * B_l + states,
            C_ptr + at * C_l + states, y_ptr + at * D + channels, there, real, writes, T,
            WAY * u_l, WAY * delta_l, WAY * B_l, WAY * C_l, WAY * D, LN, LD, DT, T, EVEN_K, EVEN_N, False,
        )  # fmt: skip
    if (whole * T < L) & (segment == SEGMENTS - 1):
        if KEEP:
            if whole % EVERY == 0:
                tl.store(kept_ptr + (image * 0 + whole // EVERY) * N * D + states * D + channels, h, mask=there & real)
        at = image * 0 + WAY * whole * T
        h = _forward_chunk(
            h, A, u_ptr + at * u_l + channels, delta_ptr + at * delta_l + channels, B_ptr + at * B_l + states,
            C_ptr + at * C_l + states, y_ptr + at * D + channels, there, real, writes, L - whole * T,
            WAY * u_l, WAY * delta_l, WAY * B_l, WAY * C_l, WAY * D, LN, LD, DT, T, EVEN_K, EVEN_N, True,
        )  # fmt: skip
    if segment == SEGMENTS - 1:
        tl.store(last_ptr + image * D * N + matrix, h, mask=there & real)


@triton.jit
def _backward_chunk(
    h, g, dA, A, u_ptrs, delta_ptrs, dy_ptrs, B_ptrs, C_ptrs, du_ptrs, ddelta_ptrs, parts_ptrs,
    there, real, writes, adds, count,
    u_l: tl.constexpr, delta_l: tl.constexpr, dy_l: tl.constexpr, B_l: tl.constexpr, C_l: tl.constexpr,
    D: tl.constexpr, N: tl.constexpr, LN: tl.constexpr, LD: tl.constexpr, NT: tl.constexpr, DT: tl.constexpr,
    T: tl.constexpr, NEED_A: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, SOFTPLUS: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """Writes the inputs' gradients for T steps; returns the gradients of the state before them and of A.

    With g the gradient of the state h = a h' + x B, where a = exp(delta A) and x = delta u:
    dB = g x, dC = h dy, dx = <g, B>, dA = g a h' delta, ddelta = <g a h', A> + dx u, du = dx delta, dh' = a g.
    """
    us = _load_steps(u_ptrs, u_l, there, count, T, not EVEN_K, TAIL)
    deltas = _load_steps(delta_ptrs, delta_l, there, count, T, not EVEN_K, TAIL)
    dys = _load_steps(dy_ptrs, dy_l, there, count, T, not EVEN_K, TAIL)
    Bs = _load_steps(B_ptrs, B_l, real, count, T, not EVEN_N, TAIL)
    Cs = _load_steps(C_ptrs, C_l, real, count, T, not EVEN_N, TAIL)
    olds = ()
    for i in tl.static_range(T):
        olds = olds + (h,)
        if i < T - 1:
            h = tl.exp2(deltas[i] * A) * h + (deltas[i] * us[i]) * Bs[i]
    for i in tl.static_range(T - 1, -1, -1):
        u, delta, B = us[i], deltas[i], Bs[i]
        x = delta * u
        a = tl.exp2(delta * A)
        decayed = a * olds[i]
        g += Cs[i] * dys[i]
        dC, dB, w, gB = (decayed + x * B) * dys[i], g * x, g * decayed, g * B
        if not EVEN_K:
            dC, dB = tl.where(there, dC, 0.0), tl.where(there, dB, 0.0)
        if not EVEN_N:
            w, gB = tl.where(real, w, 0.0), tl.where(real, gB, 0.0)
        parts = _two_over_channels(dB, dC, LN, LD, NT)
        dx = tl.broadcast_to(_over_states(gB), [LN, LD, 1, DT])
        ddelta = LN2 * tl.broadcast_to(_over_states(w * A), [LN, LD, 1, DT]) + dx * u
        if SOFTPLUS:
            ddelta *= sigmoid_of_softplus(delta)
        if TAIL:  # steps beyond the end must not change anything
            inside = _before(i, count)
            w, a = tl.where(inside, w, 0.0), tl.where(inside, a, 1.0)
        if NEED_A:
            dA += w * delta
        g = a * g
        if TAIL:
            tl.store(parts_ptrs + i * 2 * N, parts, mask=adds & inside)
            tl.store(du_ptrs + i * D, dx * delta, mask=writes & inside)
            tl.store(ddelta_ptrs + i * D, ddelta, mask=writes & inside)
        else:
            tl.store(parts_ptrs + i * 2 * N, parts, mask=adds)
            tl.store(du_ptrs + i * D, dx * delta, mask=writes)
            tl.store(ddelta_ptrs + i * D, ddelta, mask=writes)
    return g, dA


@triton.jit
def _state_before(
    chunk, A, kept_ptr, u_ptr, delta_ptr, B_ptr, channels, states, there, real,
    u_l: tl.constexpr, delta_l: tl.constexpr, B_l: tl.constexpr, D: tl.constexpr, N: tl.constexpr, T: tl.constexpr,
    EVERY: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """The state before a chunk, recomputed from the nearest kept state."""
    first = chunk // EVERY
    zero = tl.program_id(0).to(tl.int64) * 0
    places = kept_ptr + (zero + first) * N * D + states * D + channels
    if EVEN_K and EVEN_N:
        h = tl.load(places)
    else:
        h = tl.load(places, mask=there & real, other=0.0)
    for before in range(first * EVERY, chunk):
        at = zero + before * T
        us = _load_steps(u_ptr + at * u_l + channels, u_l, there, T, T, not EVEN_K, False)
        deltas = _load_steps(delta_ptr + at * delta_l + channels, delta_l, there, T, T, not EVEN_K, False)
        Bs = _load_steps(B_ptr + at * B_l + states, B_l, real, T, T, not EVEN_N, False)
        for i in tl.static_range(T):
            h = tl.exp2(deltas[i] * A) * h + (deltas[i] * us[i]) * Bs[i]
    return h


@triton.jit(do_not_specialize=["L", "W"])
def scan_backward(
    dy_ptr, dlast_ptr, u_ptr, delta_ptr, A_ptr, B_ptr, C_ptr, kept_ptr, du_ptr, ddelta_ptr, dA_ptr, parts_ptr,
    ends_ptr, sums_ptr, dy_b, u_b, delta_b, B_b, C_b, L, W,
    dy_l: tl.constexpr, u_l: tl.constexpr, delta_l: tl.constexpr, B_l: tl.constexpr, B_g: tl.constexpr,
    C_l: tl.constexpr, C_g: tl.constexpr, D: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    NT: tl.constexpr, DT: tl.constexpr, LD: tl.constexpr, LN: tl.constexpr, BLOCKS: tl.constexpr,
    T: tl.constexpr, EVERY: tl.constexpr, SEGMENTS: tl.constexpr, PIECES: tl.constexpr, LOG_A: tl.constexpr,
    LAST: tl.constexpr, NEED_A: tl.constexpr, SOFTPLUS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """du, ddelta (b, l, d); dA (b * segments, d, n), to be summed; parts of dB and dC (b, blocks, l, 2, n), to be
    summed over the blocks of a group. SOFTPLUS: delta is the output of a softplus, and ddelta is the gradient of its
    input. LOG_A: A holds log(-A), and dA is its gradient."""
    EVEN_K: tl.constexpr = K % (DT * LD) == 0
    EVEN_N: tl.constexpr = N == NT * LN
    WAY: tl.constexpr = -1 if REVERSE else 1
    blocks: tl.constexpr = D // K * BLOCKS
    block, part = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    segment, image = part % SEGMENTS, (part // SEGMENTS).to(tl.int64)
    group = block // BLOCKS
    channels, there, states, real, matrix = place_of(block, K, N, NT, DT, LD, LN, BLOCKS)
    A = rates_of(A_ptr, matrix, there & real, LOG_A)
    start = image * 0  # makes the offsets 64-bit
    if REVERSE:
        start += L - 1
    dy_ptr += image * dy_b + start * dy_l
    u_ptr += image * u_b + start * u_l
    delta_ptr += image * delta_b + start * delta_l
    B_ptr += image * B_b + group * B_g + start * B_l
    C_ptr += image * C_b + group * C_g + start * C_l
    du_ptr += (image * L + start) * D
    ddelta_ptr += (image * L + start) * D
    parts_ptr += ((image * blocks + block) * L + start) * 2 * N
    kept_ptr += image * tl.cdiv(L, T * EVERY) * N * D
    writes = there & (tl.broadcast_to(tl.arange(0, LN)[:, None, None, None], [LN, LD, 1, DT]) == 0)
    lane = tl.broadcast_to(tl.arange(0, LD)[None, :, None, None], [LN, LD, NT, 1])
    adds, added = real & (lane < 2), lane % 2 * N + states

    if LAST:
        g = tl.load(dlast_ptr + image * D * N + matrix, mask=there & real, other=0.0)
    else:
        g = tl.zeros([LN, LD, NT, DT], tl.float32)
    dA = tl.zeros([LN, LD, NT, DT], tl.float32)
    whole, first, end = L // T, 0, L // T
    if SEGMENTS > 1:
        later = tl.cdiv(L, W) - PIECES  # pieces after the first segment
        g = carried(
            g, A, ends_ptr, sums_ptr, image * later + later - 1, later - segment * PIECES, -1, channels, states, there,
            real, D, N,
        )  # fmt: skip
        first = segment * PIECES * (W // T)
        end = tl.minimum(first + PIECES * (W // T), whole)
    if (whole * T < L) & (segment == SEGMENTS - 1):
        h = _state_before(
            whole, A, kept_ptr, u_ptr, delta_ptr, B_ptr, channels, states, there, real,
            WAY * u_l, WAY * delta_l, WAY * B_l, D, N, T, EVERY, EVEN_K, EVEN_N,
        )  # fmt: skip
        at = image * 0 + WAY * whole * T
        g, dA = _backward_chunk(
            h, g, dA, A, u_ptr + at * u_l + channels, delta_ptr + at * delta_l + channels,
            dy_ptr + at * dy_l + channels, B_ptr + at * B_l + states, C_ptr + at * C_l + states,
            du_ptr + at * D + channels, ddelta_ptr + at * D + channels, parts_ptr + at * 2 * N + added,
            there, real, writes, adds, L - whole * T, WAY * u_l, WAY * delta_l, WAY * dy_l, WAY * B_l, WAY * C_l,
            WAY * D, WAY * N, LN, LD, NT, DT, T, NEED_A, EVEN_K, EVEN_N, SOFTPLUS, True,
        )  # fmt: skip
    for back in range(0, end - first):
        chunk = end - 1 - back
        h = _state_before(
            chunk, A, kept_ptr, u_ptr, delta_ptr, B_ptr, channels, states, there, real,
            WAY * u_l, WAY * delta_l, WAY * B_l, D, N, T, EVERY, EVEN_K, EVEN_N,
        )  # fmt: skip
        at = image * 0 + WAY * chunk * T
        g, dA = _backward_chunk(
            h, g, dA, A, u_ptr + at * u_l + channels, delta_ptr + at * delta_l + channels,
            dy_ptr + at * dy_l + channels, B_ptr + at * B_l + states, C_ptr + at * C_l + states,
            du_ptr + at * D + channels, ddelta_ptr + at * D + channels, parts_ptr + at * 2 * N + added,
            there, real, writes, adds, T, WAY * u_l, WAY * delta_l, WAY * dy_l, WAY * B_l, WAY * C_l,
            WAY * D, WAY * N, LN, LD, NT, DT, T, NEED_A, EVEN_K, EVEN_N, SOFTPLUS, False,
        )  # fmt: skip
    if NEED_A:
        if LOG_A:
            dA *= LN2 * A
        tl.store(dA_ptr + (image * SEGMENTS + segment) * D * N + matrix, dA, mask=there & real)
