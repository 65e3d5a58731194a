"""Tiles: how the scan's kernels distribute states, inputs and outputs over the lanes of a warp.

A tile of states has four axes, (LN, LD, NT, DT): each of the LN x LD = 32 lanes holds NT states of each of DT channels.
State n is NT * ln + nt, channel d is DT * ld + dt, so a lane's states and channels are contiguous in memory. Inputs and
outputs of T steps form one tile (1, LD, 1, DT, T), each value in one lane only. The mask `there` marks the channels and
steps that exist, `real` the states that exist.
"""
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, assignment"
# ruff: noqa: RUF005

import triton
import triton.language as tl

from mambacl.ops.kernels.softplus import softplus

LOG2E = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(3.0e38)
GIVEN = tl.constexpr(1)  # softplus already applied; the gradient is that of its input
INSIDE = tl.constexpr(2)  # the kernel applies the softplus


@triton.jit
def columns(x, T: tl.constexpr):
    """Splits a tile (.., T) into a tuple of T blocks with four axes."""
    if T == 1:
        return (tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2], x.shape[3]]),)
    else:
        pairs = tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2], x.shape[3], T // 2, 2])
        even, odd = tl.split(pairs)
        evens = columns(even, T // 2)
        odds = columns(odd, T // 2)
        found = ()
        for i in tl.static_range(T // 2):
            found = found + (evens[i], odds[i])
        return found


@triton.jit
def stacked(xs, T: tl.constexpr):
    """Stacks a tuple of T blocks into one tile (.., T)."""
    if T == 1:
        return tl.expand_dims(xs[0], len(xs[0].shape))
    elif T == 2:
        return tl.join(xs[0], xs[1])
    else:
        evens = ()
        odds = ()
        for i in tl.static_range(T // 2):
            evens = evens + (xs[2 * i],)
            odds = odds + (xs[2 * i + 1],)
        both = tl.join(stacked(evens, T // 2), stacked(odds, T // 2))
        return tl.reshape(both, [both.shape[0], both.shape[1], both.shape[2], both.shape[3], T])


@triton.jit
def paired(x, y):
    """Joins two tiles (.., T) into one (.., 2 T), x's steps before y's, so that `columns` moves both through shared
    memory at once. That works only because `columns` splits the steps before it splits the pair."""
    both = tl.permute(tl.join(x, y), [0, 1, 2, 3, 5, 4])
    return tl.reshape(both, [both.shape[0], both.shape[1], both.shape[2], both.shape[3], 2 * both.shape[5]])


@triton.jit
def even_odd(x):
    """Splits a tile into its values at even and at odd positions."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2], x.shape[3], x.shape[4] // 2, 2]))


@triton.jit
def summed(x, M: tl.constexpr, S: tl.constexpr):
    """The sum of (M, S) over its last axis, a power of two: (M,)."""
    if S == 1:
        return tl.reshape(x, [M])
    else:
        first, second = tl.split(tl.reshape(x, [M, S // 2, 2]))
        return summed(first + second, M, S // 2)


@triton.jit
def over_states(xs, LN: tl.constexpr, LD: tl.constexpr, DT: tl.constexpr, T: tl.constexpr):
    """Sums over the states of T blocks (LN, LD, 1, DT) of partial sums, as a tile (1, LD, 1, DT, T)."""
    x = tl.permute(stacked(xs, T), [1, 2, 3, 4, 0])
    return tl.reshape(summed(tl.reshape(x, [LD * DT * T, LN]), LD * DT * T, LN), [1, LD, 1, DT, T])


@triton.jit
def over_channels(dBCs, LN: tl.constexpr, LD: tl.constexpr, NT: tl.constexpr, T: tl.constexpr):
    """Sums over the channels of 2 T blocks (LN, LD, NT, 1) of partial sums, dB and dC of each step: (T, 2, LN * NT)."""
    x = tl.permute(tl.reshape(stacked(dBCs, 2 * T), [LN, LD, NT, 2 * T]), [3, 0, 2, 1])
    return tl.reshape(summed(tl.reshape(x, [2 * T * LN * NT, LD]), 2 * T * LN * NT, LD), [T, 2, LN * NT])


@triton.jit
def place_of(block, K, N, NT: tl.constexpr, DT: tl.constexpr, LD: tl.constexpr, LN: tl.constexpr, BLOCKS: tl.constexpr):
    """Of a block: its channels (LN, LD, 1, DT) and the mask of those that exist; its states (LN, LD, NT, 1) and their
    mask; its offsets in a matrix (channels, states)."""
    ln = tl.arange(0, LN)[:, None, None, None]
    ld = tl.arange(0, LD)[None, :, None, None]
    nt = tl.arange(0, NT)[None, None, :, None]
    dt = tl.arange(0, DT)[None, None, None, :]
    inside = (block % BLOCKS) * (DT * LD) + DT * ld + dt
    channels = tl.broadcast_to(block // BLOCKS * K + inside, [LN, LD, 1, DT])
    there = tl.broadcast_to(inside < K, [LN, LD, 1, DT])
    states = tl.broadcast_to(NT * ln + nt, [LN, LD, NT, 1])
    # Load the matrix in the layout of the computation; otherwise the compiler chooses wider loads and converts.
    matrix = tl.max_contiguous(channels * N + states, [1, 1, 1, 1])
    return channels, there, states, states < N, matrix


@triton.jit
def private_places(NT: tl.constexpr, DT: tl.constexpr, LD: tl.constexpr, LN: tl.constexpr):
    """Offsets of a tile of states in memory that only its program reads. The lanes of a warp access 32 values in a row;
    without the hint the compiler would choose another layout and convert."""
    ln = tl.arange(0, LN)[:, None, None, None]
    ld = tl.arange(0, LD)[None, :, None, None]
    nt = tl.arange(0, NT)[None, None, :, None]
    dt = tl.arange(0, DT)[None, None, None, :]
    return tl.max_contiguous(((nt * DT + dt) * LD + ld) * LN + ln, [1, 1, 1, 1])


@triton.jit
def tile_channels(DT: tl.constexpr, LD: tl.constexpr):
    """The channels of a tile within its block, (1, LD, 1, DT, 1)."""
    ld = tl.arange(0, LD)[None, :, None, None, None]
    return DT * ld + tl.arange(0, DT)[None, None, None, :, None]


@triton.jit
def vector_of(pointer, block, K, EXISTS: tl.constexpr, DT: tl.constexpr, LD: tl.constexpr, BLOCKS: tl.constexpr):
    """D or the bias of a tile's channels, (1, LD, 1, DT, 1); zeros if the scan has none."""
    channel = tile_channels(DT, LD)
    if EXISTS:
        inside = (block % BLOCKS) * (DT * LD) + channel
        return tl.load(pointer + block // BLOCKS * K + inside, mask=inside < K, other=0.0).to(tl.float32)
    else:
        return tl.zeros([1, LD, 1, DT, 1], tl.float32)


@triton.jit
def rates_of(A_ptr, places, mask, LOG_A: tl.constexpr):
    """A log2(e) of a tile, from A or log(-A): the kernels compute powers of two."""
    A = tl.load(A_ptr + places, mask=mask, other=0.0)
    if LOG_A:
        A = tl.where(mask, -tl.exp(A), 0.0)
    return A * LOG2E


@triton.jit
def decay_of(A_ptr, matrix, mask, LOG_A: tl.constexpr):
    """The rates, clamped to finite values, so that dt = 0 after the last token leaves the state unchanged."""
    A = rates_of(A_ptr, matrix, mask, LOG_A)
    A = tl.where(A < -LARGEST, -LARGEST, A)
    return tl.where(A > LARGEST, LARGEST, A)


@triton.jit
def as_float32(x):
    """Converts to float32. For two bfloat16 in a register this takes two instructions; the compiler would take
    three."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def token_of(step, where, ORDER: tl.constexpr):
    """The token of a step. With "cross", each group has one of the four orders over a map of height x width: by rows,
    by columns, both backwards."""
    L, group, _, height, width = where
    if ORDER == "forward":
        return step
    elif ORDER == "reverse":
        return L - 1 - step
    else:
        step = tl.where(group >= 2, L - 1 - step, step)
        return tl.where(group % 2 == 1, step % height * width + step // height, step)


@triton.jit
def tile_places(
    at, where, s_l, s_d, BLOCKS: tl.constexpr, K: tl.constexpr, DT: tl.constexpr, LD: tl.constexpr, T: tl.constexpr,
    ORDER: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """For T steps from `at` on of a block's channels: the first offset, the offsets relative to it, and the mask of
    those that exist. SHARED: all groups read the same channels."""
    L, group, block, _, _ = where
    zero = tl.program_id(0).to(tl.int64) * 0  # makes the offsets 64-bit
    first = zero + (block % BLOCKS) * (DT * LD)
    if not SHARED:
        first += group * K
    step = tl.arange(0, T)[None, None, None, None, :]
    channel = tile_channels(DT, LD)
    there = ((block % BLOCKS) * (DT * LD) + channel < K) & (step < L - at)
    if ORDER == "forward":
        return first * s_d + (zero + at) * s_l, channel * s_d + step * s_l, there
    elif ORDER == "reverse":
        return first * s_d + (zero + L - 1 - at) * s_l, channel * s_d - step * s_l, there
    else:
        return first * s_d, channel * s_d + (zero + token_of(at + step, where, ORDER)) * s_l, there


@triton.jit
def load_tile(
    pointer, at, where, s_l, s_d, BLOCKS: tl.constexpr, K: tl.constexpr, DT: tl.constexpr, LD: tl.constexpr,
    T: tl.constexpr, ORDER: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Loads T steps of an input without converting them, so that inputs loaded early take few registers."""
    begin, places, there = tile_places(at, where, s_l, s_d, BLOCKS, K, DT, LD, T, ORDER, SHARED)
    return tl.load(pointer + begin + places, mask=there, other=0.0)


@triton.jit
def store_tile(
    pointer, x, at, where, s_l, s_d, BLOCKS: tl.constexpr, K: tl.constexpr, DT: tl.constexpr, LD: tl.constexpr,
    T: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    begin, places, there = tile_places(at, where, s_l, s_d, BLOCKS, K, DT, LD, T, ORDER, False)
    tl.store(pointer + begin + places, x.to(pointer.dtype.element_ty), mask=there)


@triton.jit
def fetch_tile(
    pointer, at, where, s_l, s_d, BLOCKS: tl.constexpr, K: tl.constexpr, DT: tl.constexpr, LD: tl.constexpr,
    STEPS: tl.constexpr, ORDER: tl.constexpr, SHARED: tl.constexpr, FETCH: tl.constexpr,
):  # fmt: skip
    """Prefetches STEPS steps from `at` on of a block's channels into the L2 cache, 32 bytes at a time. The loads that
    fit into registers cannot hide the latency of memory. FETCH: "time" or "channels", the contiguous axis."""
    L, group, block, _, _ = where
    SECTOR: tl.constexpr = 256 // pointer.dtype.element_ty.primitive_bitwidth
    zero = tl.program_id(0).to(tl.int64) * 0
    first = (block % BLOCKS) * (DT * LD)
    if FETCH == "time":
        step = at + SECTOR * tl.arange(0, STEPS // SECTOR)[None, :]
        channel = first + tl.arange(0, DT * LD)[:, None]
    else:
        ACROSS: tl.constexpr = (DT * LD + SECTOR - 1) // SECTOR
        step = at + tl.arange(0, STEPS)[:, None]
        channel = first + SECTOR * tl.arange(0, ACROSS)[None, :]
    step = tl.minimum(tl.maximum(step, 0), L - 1)
    channel = tl.minimum(channel, K - 1)
    if not SHARED:
        channel += group * K
    places = pointer + (zero + channel) * s_d + (zero + token_of(step, where, ORDER)) * s_l
    fetch(places)


@triton.jit
def fetch_states(
    pointer, interval, where, GROUPS: tl.constexpr, BLOCKS: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    DT: tl.constexpr, LD: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """Prefetches the kept states of a block before an interval, of (intervals, n, d), like `fetch_tile`."""
    _, group, block, _, _ = where
    SECTOR: tl.constexpr = 8
    zero = tl.program_id(0).to(tl.int64) * 0
    state = tl.minimum(tl.arange(0, STATES), N - 1)[:, None]
    inside = (block % BLOCKS) * (DT * LD) + SECTOR * tl.arange(0, (DT * LD + SECTOR - 1) // SECTOR)[None, :]
    channel = group * K + tl.minimum(inside, K - 1)
    fetch(pointer + ((zero + interval) * N + state) * (GROUPS * K) + channel)


@triton.jit
def fetch(places):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def load_states(
    pointer, at, where, s_l, N: tl.constexpr, LN: tl.constexpr, NT: tl.constexpr, T: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """Loads B or C of T steps, (LN, 1, NT, 1, T), without converting them; zeros after the last token."""
    zero = tl.program_id(0).to(tl.int64) * 0
    step = tl.arange(0, T)[None, None, None, None, :]
    state = NT * tl.arange(0, LN)[:, None, None, None, None] + tl.arange(0, NT)[None, None, :, None, None]
    there = (state < N) & (step < where[0] - at)
    if ORDER == "forward":
        places = pointer + (zero + at) * s_l + (step * s_l + state)
    elif ORDER == "reverse":
        places = pointer + (zero + where[0] - 1 - at) * s_l + (state - step * s_l)
    else:
        places = pointer + (zero + token_of(at + step, where, ORDER)) * s_l + state
    return tl.load(places, mask=there, other=0.0)


@triton.jit
def dt_of(raw, at, where, bias, BLOCKS: tl.constexpr, K: tl.constexpr, DT: tl.constexpr, LD: tl.constexpr,
          T: tl.constexpr, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr):  # fmt: skip
    """dt of a tile; zero beyond the last token."""
    dt = as_float32(raw)
    if BIAS:
        dt += bias
    if SOFTPLUS == INSIDE:
        dt = softplus(dt)
    if BIAS or SOFTPLUS == INSIDE:
        step = tl.arange(0, T)[None, None, None, None, :]
        there = ((where[2] % BLOCKS) * (DT * LD) + tile_channels(DT, LD) < K) & (step < where[0] - at)
        dt = tl.where(there, dt, 0.0)
    return dt


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(x * -LOG2E))


@triton.jit
def carried(
    state, A, ends_ptr, sums_ptr, place, count, way, channels, states, there, real, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The state after `count` pieces, beginning with the one at `place`."""
    for number in range(0, count):
        piece = place + way * number
        total = tl.load(sums_ptr + piece * D + channels, mask=there, other=0.0)
        end = tl.load(ends_ptr + piece * N * D + states * D + channels, mask=there & real, other=0.0)
        through = tl.where(state == 0.0, 0.0, tl.exp2(total * A) * state)  # zero stays zero even if the decay overflows
        state = tl.where(real, through, 0.0) + end
    return state
