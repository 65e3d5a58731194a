"""Triton kernels for the whole selective scan: forward, backward, and `scan_ends` for split time.

    dt = softplus(delta + bias),  h_t = exp(dt_t A) h_{t-1} + dt_t u_t B_t,  y_t = <C_t, h_t> + D u_t,  out = y silu(z)

Each program is one warp. It steps through time for one image and a block of channels, with the states in registers;
`tiles` describes how its lanes share them. All elementwise work (softplus, skip, gate) is done on tiles of T steps of
the inputs and outputs, for either memory layout. `columns` hands a tile's steps to the lanes that hold the states, and
`summed` sums over states or channels. Both go through shared memory, which takes far fewer instructions than shuffles.

If the recurrences are too few to fill the GPU, time is split into segments, one per program, and these into pieces of W
steps. `scan_ends` first computes, for each piece, its final state from a zero start and the sum of its dt, which gives
its decay. From these every program computes the state its segment starts with.

The forward keeps the state before every T * EVERY steps. The backward recomputes such an interval, storing the state
before every T steps in scratch memory, then goes back through it. Sums are reproducible: programs write their parts of
dA (per image) and of dB and dC (per block of channels) separately.
"""
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, assignment"
# ruff: noqa: RUF005, SIM102

import triton
import triton.language as tl

from mambacl.ops.kernels.softplus import sigmoid_of_softplus
from mambacl.ops.kernels.tiles import (
    as_float32,
    carried,
    columns,
    decay_of,
    dt_of,
    even_odd,
    fetch_states,
    fetch_tile,
    load_states,
    load_tile,
    over_channels,
    over_states,
    paired,
    place_of,
    private_places,
    sigmoid,
    store_tile,
    tile_channels,
    token_of,
    vector_of,
)

LN2 = tl.constexpr(0.6931471805599453)
FETCHED = tl.constexpr(32)  # steps that the forward prefetches at a time


@triton.jit(do_not_specialize=["L", "W", "first", "pieces", "height", "width"])
def scan_ends(
    x_ptr, delta_ptr, A_ptr, M_ptr, z_ptr, bias_ptr, ends_ptr, sums_ptr, L, W, first, pieces, height, width,
    x_b, x_l, x_d, delta_b, delta_l, delta_d, z_b, z_l, z_d, M_b, M_l, M_g, GROUPS: tl.constexpr, K: tl.constexpr,
    N: tl.constexpr, NT: tl.constexpr, DT: tl.constexpr, LD: tl.constexpr, LN: tl.constexpr, BLOCKS: tl.constexpr,
    T: tl.constexpr, LOG_A: tl.constexpr, ORDER: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """For each piece of W steps from `first` on: the state after it, starting from zero, (b, pieces, n, d), and the sum
    of its dt. x is u and M is B. In the backward: the gradient of the state before it; x is dout and M is C."""
    D: tl.constexpr = GROUPS * K
    SHARED: tl.constexpr = (ORDER == "cross") and not BACKWARD
    GATED: tl.constexpr = BACKWARD and GATE
    blocks: tl.constexpr = GROUPS * BLOCKS
    block, part = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    group = block // BLOCKS
    where = (L, group, block, height, width)
    piece, image = part % pieces, (part // pieces).to(tl.int64)
    channels, there, states, real, matrix = place_of(block, K, N, NT, DT, LD, LN, BLOCKS)
    A = decay_of(A_ptr, matrix, there & real, LOG_A)
    bias = vector_of(bias_ptr, block, K, BIAS, DT, LD, BLOCKS)
    x_ptr += image * x_b
    delta_ptr += image * delta_b
    z_ptr += image * z_b
    M_ptr += image * M_b + group * M_g
    state = tl.zeros([LN, LD, NT, DT], tl.float32)
    total = tl.zeros([1, LD, 1, DT, T], tl.float32)
    begin = (first + piece) * (W // T)
    count = tl.minimum(W // T, tl.cdiv(L, T) - begin)
    at, way = begin * T, T
    if BACKWARD:
        at, way = (begin + count - 1) * T, -T
    next_x = load_tile(x_ptr, at, where, x_l, x_d, BLOCKS, K, DT, LD, T, ORDER, SHARED)
    next_dt = load_tile(delta_ptr, at, where, delta_l, delta_d, BLOCKS, K, DT, LD, T, ORDER, False)
    next_M = load_states(M_ptr, at, where, M_l, N, LN, NT, T, ORDER)
    if GATED:
        next_z = load_tile(z_ptr, at, where, z_l, z_d, BLOCKS, K, DT, LD, T, ORDER, False)
    for _ in range(0, count):
        x = as_float32(next_x)
        dt = dt_of(next_dt, at, where, bias, BLOCKS, K, DT, LD, T, BIAS, SOFTPLUS)
        Ms = columns(as_float32(next_M), T)
        if GATED:
            z = as_float32(next_z)
            x *= z * sigmoid(z)
        at = tl.maximum(at + way, 0)
        next_x = load_tile(x_ptr, at, where, x_l, x_d, BLOCKS, K, DT, LD, T, ORDER, SHARED)
        next_dt = load_tile(delta_ptr, at, where, delta_l, delta_d, BLOCKS, K, DT, LD, T, ORDER, False)
        next_M = load_states(M_ptr, at, where, M_l, N, LN, NT, T, ORDER)
        if GATED:
            next_z = load_tile(z_ptr, at, where, z_l, z_d, BLOCKS, K, DT, LD, T, ORDER, False)
        total += dt
        if BACKWARD:
            given = columns(paired(dt, x), 2 * T)
            for i in tl.static_range(T - 1, -1, -1):
                state = tl.exp2(given[i] * A) * (state + Ms[i] * given[T + i])
        else:
            given = columns(paired(dt, x * dt), 2 * T)
            for i in tl.static_range(T):
                state = tl.exp2(given[i] * A) * state + given[T + i] * Ms[i]
    place = image * pieces + piece
    inside = (block % BLOCKS) * (DT * LD) + tile_channels(DT, LD)
    tl.store(sums_ptr + place * D + group * K + inside, tl.sum(total, axis=4, keep_dims=True), mask=inside < K)
    tl.store(ends_ptr + place * N * D + states * D + channels, state, mask=there & real)


@triton.jit(do_not_specialize=["L", "W", "height", "width"])
def scan_forward(
    u_ptr, delta_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, bias_ptr, out_ptr, last_ptr, kept_ptr, ends_ptr, sums_ptr,
    L, W, height, width, u_b, u_l, u_d, delta_b, delta_l, delta_d, z_b, z_l, z_d, out_b, out_l, out_d,
    B_b, B_l, B_g, C_b, C_l, C_g, GROUPS: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    NT: tl.constexpr, DT: tl.constexpr, LD: tl.constexpr, LN: tl.constexpr, BLOCKS: tl.constexpr,
    T: tl.constexpr, EVERY: tl.constexpr, SEGMENTS: tl.constexpr, PIECES: tl.constexpr, LOG_A: tl.constexpr,
    SKIP: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, KEEP: tl.constexpr,
    ORDER: tl.constexpr, SAME: tl.constexpr, FETCH: tl.constexpr,
):  # fmt: skip
    """u, delta, z, out: (b, l, d) by strides; A (d, n); B, C (b, l, g, n); last (b, d, n); kept (b, intervals, n,
    d)."""
    if SAME:  # one set of offsets for all
        delta_l, z_l, out_l = u_l, u_l, u_l
        delta_d, z_d, out_d = u_d, u_d, u_d
    D: tl.constexpr = GROUPS * K
    SHARED: tl.constexpr = ORDER == "cross"
    EVEN_N: tl.constexpr = N == NT * LN
    blocks: tl.constexpr = GROUPS * BLOCKS
    block, part = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    group = block // BLOCKS
    where = (L, group, block, height, width)
    segment, image = part % SEGMENTS, (part // SEGMENTS).to(tl.int64)
    channels, there, states, real, matrix = place_of(block, K, N, NT, DT, LD, LN, BLOCKS)
    A = decay_of(A_ptr, matrix, there & real, LOG_A)
    bias = vector_of(bias_ptr, block, K, BIAS, DT, LD, BLOCKS)
    skip = vector_of(D_ptr, block, K, SKIP, DT, LD, BLOCKS)
    u_ptr += image * u_b
    delta_ptr += image * delta_b
    z_ptr += image * z_b
    out_ptr += image * out_b
    B_ptr += image * B_b + group * B_g
    C_ptr += image * C_b + group * C_g
    kept_ptr += image * tl.cdiv(L, T * EVERY) * N * D

    h = tl.zeros([LN, LD, NT, DT], tl.float32)
    first, end = 0, tl.cdiv(L, T)
    if SEGMENTS > 1:
        place = image * ((SEGMENTS - 1) * PIECES)
        h = carried(h, A, ends_ptr, sums_ptr, place, segment * PIECES, 1, channels, states, there, real, D, N)
        first = segment * PIECES * (W // T)
        end = tl.minimum(first + PIECES * (W // T), end)
    next_u = load_tile(u_ptr, first * T, where, u_l, u_d, BLOCKS, K, DT, LD, T, ORDER, SHARED)
    next_dt = load_tile(delta_ptr, first * T, where, delta_l, delta_d, BLOCKS, K, DT, LD, T, ORDER, False)
    next_B = load_states(B_ptr, first * T, where, B_l, N, LN, NT, T, ORDER)
    next_C = load_states(C_ptr, first * T, where, C_l, N, LN, NT, T, ORDER)
    if GATE:
        next_z = load_tile(z_ptr, first * T, where, z_l, z_d, BLOCKS, K, DT, LD, T, ORDER, False)
    for chunk in range(first, end):
        if FETCH != "none":
            if chunk % (FETCHED // T) == 0:
                later = (chunk + FETCHED // T) * T
                fetch_tile(u_ptr, later, where, u_l, u_d, BLOCKS, K, DT, LD, FETCHED, ORDER, SHARED, FETCH)
                fetch_tile(delta_ptr, later, where, delta_l, delta_d, BLOCKS, K, DT, LD, FETCHED, ORDER, False, FETCH)
                if GATE:
                    fetch_tile(z_ptr, later, where, z_l, z_d, BLOCKS, K, DT, LD, FETCHED, ORDER, False, FETCH)
        if KEEP:
            if chunk % EVERY == 0:
                tl.store(kept_ptr + (image * 0 + chunk // EVERY) * N * D + states * D + channels, h, mask=there & real)
        at = chunk * T
        u = as_float32(next_u)
        dt = dt_of(next_dt, at, where, bias, BLOCKS, K, DT, LD, T, BIAS, SOFTPLUS)
        BCs = columns(paired(as_float32(next_B), as_float32(next_C)), 2 * T)
        if GATE:
            z = as_float32(next_z)
        # Load the next steps while these are computed.
        next_u = load_tile(u_ptr, at + T, where, u_l, u_d, BLOCKS, K, DT, LD, T, ORDER, SHARED)
        next_dt = load_tile(delta_ptr, at + T, where, delta_l, delta_d, BLOCKS, K, DT, LD, T, ORDER, False)
        next_B = load_states(B_ptr, at + T, where, B_l, N, LN, NT, T, ORDER)
        next_C = load_states(C_ptr, at + T, where, C_l, N, LN, NT, T, ORDER)
        if GATE:
            next_z = load_tile(z_ptr, at + T, where, z_l, z_d, BLOCKS, K, DT, LD, T, ORDER, False)
        dxs = columns(paired(dt, u * dt), 2 * T)
        ys = ()
        for i in tl.static_range(T):
            h = tl.exp2(dxs[i] * A) * h + dxs[T + i] * BCs[i]
            if not EVEN_N:
                h = tl.where(real, h, 0.0)
            ys = ys + (tl.sum(h * BCs[T + i], axis=2, keep_dims=True),)
        y = over_states(ys, LN, LD, DT, T)
        if SKIP:
            y += skip * u
        if GATE:
            y *= z * sigmoid(z)
        store_tile(out_ptr, y, at, where, out_l, out_d, BLOCKS, K, DT, LD, T, ORDER)
    if segment == SEGMENTS - 1:
        tl.store(last_ptr + image * D * N + matrix, h, mask=there & real)


@triton.jit(do_not_specialize=["L", "W", "height", "width"])
def scan_backward(
    dout_ptr, dlast_ptr, u_ptr, delta_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, bias_ptr, kept_ptr, ends_ptr, sums_ptr,
    scratch_ptr, du_ptr, ddelta_ptr, dz_ptr, dA_ptr, dD_ptr, dbias_ptr, parts_ptr, L, W, height, width,
    dout_b, dout_l, dout_d, u_b, u_l, u_d, delta_b, delta_l, delta_d, z_b, z_l, z_d, B_b, B_l, B_g, C_b, C_l, C_g,
    du_b, du_l, du_d, ddelta_b, ddelta_l, ddelta_d, dz_b, dz_l, dz_d,
    GROUPS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, NT: tl.constexpr, DT: tl.constexpr, LD: tl.constexpr,
    LN: tl.constexpr, BLOCKS: tl.constexpr, T: tl.constexpr, EVERY: tl.constexpr, SEGMENTS: tl.constexpr,
    PIECES: tl.constexpr, SHARE: tl.constexpr, LOG_A: tl.constexpr, SKIP: tl.constexpr, GATE: tl.constexpr,
    BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, LAST: tl.constexpr, NEED_A: tl.constexpr, ORDER: tl.constexpr,
    SAME: tl.constexpr, AHEAD: tl.constexpr, FETCH: tl.constexpr,
):  # fmt: skip
    """du, ddelta, dz (b, l, d) by strides; dA, dD and dbias in one row (d * n + d + d) per image and segment, to be
    summed; parts of dB and dC (b, groups * shares, l, 2, n), to be summed over the shares of a group. A program
    processes SHARE blocks of channels of one group in turn. AHEAD: load all inputs of the next T steps early, which
    needs registers; otherwise only those that are not in the cache. FETCH: as in the forward; prefetches the inputs of
    the interval before.

    With g the gradient of the state h = a h' + x B, where a = exp(dt A) and x = dt u, and dy that of y = <C, h> + D u:
    dB = g x, dC = h dy, dx = <g, B>, dA = g a h' dt, ddt = <g a h', A> + dx u, du = dx dt + D dy, dh' = a g.
    """
    if SAME:
        delta_l, z_l, dout_l, du_l, ddelta_l, dz_l = u_l, u_l, u_l, u_l, u_l, u_l
        delta_d, z_d, dout_d, du_d, ddelta_d, dz_d = u_d, u_d, u_d, u_d, u_d, u_d
    D: tl.constexpr = GROUPS * K
    SHARED: tl.constexpr = ORDER == "cross"
    EVEN_N: tl.constexpr = N == NT * LN
    EVEN_K: tl.constexpr = K % (DT * LD) == 0
    SHARES: tl.constexpr = (BLOCKS + SHARE - 1) // SHARE
    ROW: tl.constexpr = D * (N + 2)
    TILE_STATES: tl.constexpr = LN * NT * LD * DT
    shares: tl.constexpr = GROUPS * SHARES
    share, part = tl.program_id(0) % shares, tl.program_id(0) // shares
    group = share // SHARES
    segment, image = part % SEGMENTS, (part // SEGMENTS).to(tl.int64)
    dout_ptr += image * dout_b
    u_ptr += image * u_b
    delta_ptr += image * delta_b
    z_ptr += image * z_b
    B_ptr += image * B_b + group * B_g
    C_ptr += image * C_b + group * C_g
    du_ptr += image * du_b
    ddelta_ptr += image * ddelta_b
    dz_ptr += image * dz_b
    parts_ptr += (image * shares + share) * L * 2 * N
    kept_ptr += image * tl.cdiv(L, T * EVERY) * N * D
    scratch_ptr += tl.program_id(0).to(tl.int64) * (EVERY * TILE_STATES)
    pair = tl.arange(0, 2)[None, :, None]
    state = tl.arange(0, LN * NT)[None, None, :]
    row = tl.arange(0, T)[:, None, None]
    final = tl.minimum(SHARE, BLOCKS - share % SHARES * SHARE)
    for number in range(0, final):
        block = group * BLOCKS + share % SHARES * SHARE + number
        where = (L, group, block, height, width)
        channels, there, states, real, matrix = place_of(block, K, N, NT, DT, LD, LN, BLOCKS)
        A = decay_of(A_ptr, matrix, there & real, LOG_A)
        bias = vector_of(bias_ptr, block, K, BIAS, DT, LD, BLOCKS)
        skip = vector_of(D_ptr, block, K, SKIP, DT, LD, BLOCKS)
        channel = tile_channels(DT, LD)
        local = private_places(NT, DT, LD, LN)
        if LAST:
            g = tl.load(dlast_ptr + image * D * N + matrix, mask=there & real, other=0.0)
        else:
            g = tl.zeros([LN, LD, NT, DT], tl.float32)
        dA = tl.zeros([LN, LD, NT, DT], tl.float32)
        dD = tl.zeros([1, LD, 1, DT, T], tl.float32)
        dbias = tl.zeros([1, LD, 1, DT, T], tl.float32)
        first, end = 0, tl.cdiv(L, T)
        if SEGMENTS > 1:
            later = tl.cdiv(L, W) - PIECES  # pieces after the first segment
            g = carried(
                g, A, ends_ptr, sums_ptr, image * later + later - 1, later - segment * PIECES, -1, channels, states,
                there, real, D, N,
            )  # fmt: skip
            first = segment * PIECES * (W // T)
            end = tl.minimum(first + PIECES * (W // T), end)
        intervals = tl.cdiv(end, EVERY) - first // EVERY
        for back in range(0, intervals):
            interval = first // EVERY + intervals - 1 - back
            count = tl.minimum(EVERY, end - interval * EVERY)
            if FETCH != "none":
                early = (interval - 1) * (EVERY * T)
                fetch_tile(u_ptr, early, where, u_l, u_d, BLOCKS, K, DT, LD, EVERY * T, ORDER, SHARED, FETCH)
                fetch_tile(delta_ptr, early, where, delta_l, delta_d, BLOCKS, K, DT, LD, EVERY * T, ORDER, False, FETCH)
                fetch_tile(dout_ptr, early, where, dout_l, dout_d, BLOCKS, K, DT, LD, EVERY * T, ORDER, False, FETCH)
                if GATE:
                    fetch_tile(z_ptr, early, where, z_l, z_d, BLOCKS, K, DT, LD, EVERY * T, ORDER, False, FETCH)
                fetch_states(kept_ptr, tl.maximum(interval - 1, 0), where, GROUPS, BLOCKS, K, N, DT, LD, LN * NT)
            at = (interval * EVERY + count - 1) * T
            next_dout = load_tile(dout_ptr, at, where, dout_l, dout_d, BLOCKS, K, DT, LD, T, ORDER, False)
            next_C = load_states(C_ptr, at, where, C_l, N, LN, NT, T, ORDER)
            if GATE:
                next_z = load_tile(z_ptr, at, where, z_l, z_d, BLOCKS, K, DT, LD, T, ORDER, False)
            at = interval * EVERY * T
            next_u = load_tile(u_ptr, at, where, u_l, u_d, BLOCKS, K, DT, LD, T, ORDER, SHARED)
            next_dt = load_tile(delta_ptr, at, where, delta_l, delta_d, BLOCKS, K, DT, LD, T, ORDER, False)
            next_B = load_states(B_ptr, at, where, B_l, N, LN, NT, T, ORDER)
            h = tl.load(kept_ptr + (image * 0 + interval) * N * D + states * D + channels, mask=there & real, other=0.0)
            if EVERY > 1:
                for ahead in range(0, count - 1):
                    tl.store(scratch_ptr + ahead * TILE_STATES + local, h)
                    u = as_float32(next_u)
                    dt = dt_of(next_dt, at, where, bias, BLOCKS, K, DT, LD, T, BIAS, SOFTPLUS)
                    Bs = columns(as_float32(next_B), T)
                    at += T
                    next_u = load_tile(u_ptr, at, where, u_l, u_d, BLOCKS, K, DT, LD, T, ORDER, SHARED)
                    next_dt = load_tile(delta_ptr, at, where, delta_l, delta_d, BLOCKS, K, DT, LD, T, ORDER, False)
                    next_B = load_states(B_ptr, at, where, B_l, N, LN, NT, T, ORDER)
                    dxs = columns(paired(dt, u * dt), 2 * T)
                    for i in tl.static_range(T):
                        h = tl.exp2(dxs[i] * A) * h + dxs[T + i] * Bs[i]
                    if not EVEN_N:
                        h = tl.where(real, h, 0.0)
                if not AHEAD:
                    tl.store(scratch_ptr + (count - 1) * TILE_STATES + local, h)
                tl.debug_barrier()  # another lane can load what one stored
            next_h = h
            for earlier in range(0, count):
                at = (interval * EVERY + count - 1 - earlier) * T
                if not AHEAD:
                    if EVERY > 1:
                        next_h = tl.load(scratch_ptr + (count - 1 - earlier) * TILE_STATES + local)
                    next_u = load_tile(u_ptr, at, where, u_l, u_d, BLOCKS, K, DT, LD, T, ORDER, SHARED)
                    next_dt = load_tile(delta_ptr, at, where, delta_l, delta_d, BLOCKS, K, DT, LD, T, ORDER, False)
                    next_B = load_states(B_ptr, at, where, B_l, N, LN, NT, T, ORDER)
                if ORDER == "forward":
                    places = parts_ptr + (image * 0 + at) * (2 * N) + (row * (2 * N) + pair * N + state)
                else:
                    places = parts_ptr + token_of(image * 0 + at + row, where, ORDER) * (2 * N) + (pair * N + state)
                written = (row < L - at) & (state < N)
                if SHARE > 1:  # loaded early: nothing waits for them
                    others = tl.load(places, mask=written & (number > 0), other=0.0)
                h = next_h
                u, dout = as_float32(next_u), as_float32(next_dout)
                dt = dt_of(next_dt, at, where, bias, BLOCKS, K, DT, LD, T, BIAS, SOFTPLUS)
                BCs = columns(paired(as_float32(next_B), as_float32(next_C)), 2 * T)
                dy = dout
                if GATE:
                    z = as_float32(next_z)
                    gate = sigmoid(z)
                    dy = dout * z * gate
                if EVERY > 1:
                    before = tl.maximum(at - T, 0)
                    if AHEAD:
                        next_u = load_tile(u_ptr, before, where, u_l, u_d, BLOCKS, K, DT, LD, T, ORDER, SHARED)
                        next_dt = load_tile(
                            delta_ptr, before, where, delta_l, delta_d, BLOCKS, K, DT, LD, T, ORDER, False
                        )
                        next_B = load_states(B_ptr, before, where, B_l, N, LN, NT, T, ORDER)
                    next_dout = load_tile(dout_ptr, before, where, dout_l, dout_d, BLOCKS, K, DT, LD, T, ORDER, False)
                    next_C = load_states(C_ptr, before, where, C_l, N, LN, NT, T, ORDER)
                    if GATE:
                        next_z = load_tile(z_ptr, before, where, z_l, z_d, BLOCKS, K, DT, LD, T, ORDER, False)
                    if AHEAD:
                        next_h = tl.load(scratch_ptr + tl.maximum(count - 2 - earlier, 0) * TILE_STATES + local)
                given = columns(paired(paired(dt, u * dt), paired(dy, dy)), 4 * T)  # dt, x, dy, and dy again
                olds = ()
                for i in tl.static_range(T):
                    olds = olds + (h,)
                    if i < T - 1:
                        h = tl.exp2(given[i] * A) * h + given[T + i] * BCs[i]
                sums, dBCs = (), ()
                for i in tl.static_range(T - 1, -1, -1):
                    dti, x, dyi, B, C = given[i], given[T + i], given[2 * T + i], BCs[i], BCs[T + i]
                    a = tl.exp2(dti * A)
                    decayed = a * olds[i]
                    new = decayed + x * B
                    g += C * dyi
                    dC, dB, w, gB = new * dyi, g * x, g * decayed, g * B
                    if not EVEN_K:
                        dC, dB = tl.where(there, dC, 0.0), tl.where(there, dB, 0.0)
                    if not EVEN_N:
                        w, gB, new = tl.where(real, w, 0.0), tl.where(real, gB, 0.0), tl.where(real, new, 0.0)
                    dBCs = (tl.sum(dB, axis=3, keep_dims=True), tl.sum(dC, axis=3, keep_dims=True)) + dBCs
                    gBi, wAi = tl.sum(gB, axis=2, keep_dims=True), tl.sum(w * A, axis=2, keep_dims=True)
                    if GATE:
                        yi = tl.sum(new * C, axis=2, keep_dims=True)
                        sums = (gBi, wAi, yi, yi) + sums
                    else:
                        sums = (gBi, wAi) + sums
                    if NEED_A:
                        dA += w * dti
                    g = a * g
                if GATE:
                    even, odd = even_odd(over_states(sums, LN, LD, DT, 4 * T))
                    dx, y = even_odd(even)
                    wA, _ = even_odd(odd)
                else:
                    dx, wA = even_odd(over_states(sums, LN, LD, DT, 2 * T))
                ddt = LN2 * wA + dx * u
                if SOFTPLUS > 0:
                    ddt *= sigmoid_of_softplus(dt)
                du = dx * dt
                if SKIP:
                    du += skip * dy
                    dD += dy * u
                if BIAS:
                    if SOFTPLUS == 0:  # a softplus needs no mask: its derivative is zero where dt is zero
                        ddt = tl.where(tl.arange(0, T)[None, None, None, None, :] < L - at, ddt, 0.0)
                    dbias += ddt
                store_tile(du_ptr, du, at, where, du_l, du_d, BLOCKS, K, DT, LD, T, ORDER)
                store_tile(ddelta_ptr, ddt, at, where, ddelta_l, ddelta_d, BLOCKS, K, DT, LD, T, ORDER)
                if GATE:
                    if SKIP:
                        y += skip * u
                    dz = dout * y * gate * (1.0 + z * (1.0 - gate))
                    store_tile(dz_ptr, dz, at, where, dz_l, dz_d, BLOCKS, K, DT, LD, T, ORDER)
                parts = over_channels(dBCs, LN, LD, NT, T)
                if SHARE > 1:
                    parts += others
                tl.store(places, parts, mask=written)
        if NEED_A:
            if LOG_A:
                dA *= LN2 * A
            tl.store(dA_ptr + (image * SEGMENTS + segment) * ROW + matrix, dA, mask=there & real)
        inside = (block % BLOCKS) * (DT * LD) + channel
        vector = (image * SEGMENTS + segment) * ROW + group * K + inside
        if SKIP:
            tl.store(dD_ptr + vector, tl.sum(dD, axis=4, keep_dims=True), mask=inside < K)
        if BIAS:
            tl.store(dbias_ptr + vector, tl.sum(dbias, axis=4, keep_dims=True), mask=inside < K)
        if SHARE > 1:
            tl.debug_barrier()
