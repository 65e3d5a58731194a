"""The selective scan of a single state, for tensors with time contiguous: a tile of rows and steps at a time.

    h_t = a_t h_{t-1} + b_t,  a = exp(dt A),  b = dt u B,  y = C h + D u,  out = y silu(z)

With one state there is little to compute, and the memory sets the pace. A program takes CH channels of one image and
goes through time in tiles of T steps, which it reads in long rows; within a tile the recurrence is an associative scan
over the lanes. Backward, p is the gradient of h:

    p_t = C_t dy_t + a_{t+1} p_{t+1},  dB = p dt u,  dC = h dy,  ddt = p (a_t h_{t-1} A + B u),  du = p B dt + D dy
"""
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, assignment"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mambacl.ops.kernels.launch import launch
from mambacl.ops.kernels.softplus import sigmoid_of_softplus, softplus
from mambacl.ops.scan_tiles import single_steps

ROWS = 4  # channels of a program
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INSIDE = tl.constexpr(2)  # the kernel takes the softplus


@triton.jit
def _then(a, b, a_next, b_next):
    return a * a_next, a_next * b + b_next


@triton.jit
def _column(x, index: tl.constexpr, T: tl.constexpr):
    """One step of a tile, (CH, 1)."""
    return tl.sum(tl.where(tl.arange(0, T)[None, :] == index, x, 0.0), axis=1, keep_dims=True)


@triton.jit
def _following(x, edge, CH: tl.constexpr, T: tl.constexpr):
    """The next step's value at each step, `edge` (CH, 1) after the last. Four steps in a row are a lane's own, so that
    only every fourth value changes lanes."""
    even, odd = tl.split(tl.reshape(x, [CH, T // 2, 2]))
    first, third = tl.split(tl.reshape(even, [CH, T // 4, 2]))
    second, fourth = tl.split(tl.reshape(odd, [CH, T // 4, 2]))
    place = tl.arange(0, T // 4)[None, :]
    later = tl.gather(first, tl.broadcast_to(tl.minimum(place + 1, T // 4 - 1), [CH, T // 4]), 1)
    later = tl.where(place == T // 4 - 1, edge, later)
    even = tl.reshape(tl.join(second, fourth), [CH, T // 2])
    odd = tl.reshape(tl.join(third, later), [CH, T // 2])
    return tl.reshape(tl.join(even, odd), [CH, T])


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(x * -LOG2E))


@triton.jit
def _decays(A_ptr, channel, there, LOG_A: tl.constexpr):
    A = tl.load(A_ptr + channel, mask=there, other=0.0)
    if LOG_A:
        A = tl.where(there, -tl.exp(A), 0.0)
    return A * LOG2E


@triton.jit
def _steps(raw, bias, mask, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr):
    dt = raw.to(tl.float32)
    if BIAS:
        dt += bias
    if SOFTPLUS == INSIDE:
        dt = softplus(dt)
    return tl.where(mask, dt, 0.0)


@triton.jit(do_not_specialize=["L"])
def _forward(
    u_ptr, delta_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, bias_ptr, out_ptr, last_ptr, kept_ptr, L,
    u_b, u_l, u_d, delta_b, delta_l, delta_d, z_b, z_l, z_d, out_b, out_l, out_d, B_b, B_l, B_g, C_b, C_l, C_g,
    GROUPS: tl.constexpr, K: tl.constexpr, CH: tl.constexpr, T: tl.constexpr, LOG_A: tl.constexpr, SKIP: tl.constexpr,
    GATE: tl.constexpr, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, KEEP: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """kept: (b, tiles, d), the state before each tile."""
    BLOCKS: tl.constexpr = (K + CH - 1) // CH
    block, image = tl.program_id(0) % (GROUPS * BLOCKS), (tl.program_id(0) // (GROUPS * BLOCKS)).to(tl.int64)
    group = block // BLOCKS
    inside = block % BLOCKS * CH + tl.arange(0, CH)[:, None]
    channel, there = group * K + inside, inside < K
    A = _decays(A_ptr, channel, there, LOG_A)
    bias, skip = tl.zeros([CH, 1], tl.float32), tl.zeros([CH, 1], tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + channel, mask=there, other=0.0).to(tl.float32)
    if SKIP:
        skip = tl.load(D_ptr + channel, mask=there, other=0.0).to(tl.float32)
    rows = image * 0 + channel
    u_ptr += image * u_b + rows * u_d
    delta_ptr += image * delta_b + rows * delta_d
    z_ptr += image * z_b + rows * z_d
    out_ptr += image * out_b + rows * out_d
    B_ptr += image * B_b + group * B_g
    C_ptr += image * C_b + group * C_g
    h0 = tl.zeros([CH, 1], tl.float32)
    tiles = tl.cdiv(L, T)
    for tile in range(0, tiles):
        step = tile * T + tl.arange(0, T)[None, :]
        exists = step < L
        mask = there & exists
        token = L - 1 - step if REVERSE else step
        if KEEP:
            tl.store(kept_ptr + (image * tiles + tile) * (GROUPS * K) + channel, h0, mask=there)
        u = tl.load(u_ptr + token * u_l, mask=mask, other=0.0).to(tl.float32)
        dt = _steps(tl.load(delta_ptr + token * delta_l, mask=mask, other=0.0), bias, mask, BIAS, SOFTPLUS)
        B = tl.load(B_ptr + token * B_l, mask=exists, other=0.0).to(tl.float32)
        C = tl.load(C_ptr + token * C_l, mask=exists, other=0.0).to(tl.float32)
        through, fresh = tl.associative_scan((tl.exp2(dt * A), dt * u * B), 1, _then)
        h = through * h0 + fresh
        h0 = _column(h, T - 1, T)
        y = h * C
        if SKIP:
            y += skip * u
        if GATE:
            z = tl.load(z_ptr + token * z_l, mask=mask, other=0.0).to(tl.float32)
            y *= z * _sigmoid(z)
        tl.store(out_ptr + token * out_l, y.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(last_ptr + image * (GROUPS * K) + channel, h0, mask=there)


@triton.jit(do_not_specialize=["L"])
def _backward(
    dout_ptr, dlast_ptr, u_ptr, delta_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, bias_ptr, kept_ptr, du_ptr, ddelta_ptr,
    dz_ptr, dA_ptr, dD_ptr, dbias_ptr, parts_ptr, L, dout_b, dout_l, dout_d, u_b, u_l, u_d, delta_b, delta_l, delta_d,
    z_b, z_l, z_d, B_b, B_l, B_g, C_b, C_l, C_g, du_b, du_l, du_d, ddelta_b, ddelta_l, ddelta_d, dz_b, dz_l, dz_d,
    GROUPS: tl.constexpr, K: tl.constexpr, CH: tl.constexpr, T: tl.constexpr, LOG_A: tl.constexpr, SKIP: tl.constexpr,
    GATE: tl.constexpr, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, LAST: tl.constexpr, NEED_A: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """dA, dD, dbias (b, d), to be summed; parts of dB and dC (b, groups * blocks, 2, l), to be summed over the
    blocks."""
    BLOCKS: tl.constexpr = (K + CH - 1) // CH
    block, image = tl.program_id(0) % (GROUPS * BLOCKS), (tl.program_id(0) // (GROUPS * BLOCKS)).to(tl.int64)
    group = block // BLOCKS
    inside = block % BLOCKS * CH + tl.arange(0, CH)[:, None]
    channel, there = group * K + inside, inside < K
    A = _decays(A_ptr, channel, there, LOG_A)
    bias, skip = tl.zeros([CH, 1], tl.float32), tl.zeros([CH, 1], tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + channel, mask=there, other=0.0).to(tl.float32)
    if SKIP:
        skip = tl.load(D_ptr + channel, mask=there, other=0.0).to(tl.float32)
    rows = image * 0 + channel
    dout_ptr += image * dout_b + rows * dout_d
    u_ptr += image * u_b + rows * u_d
    delta_ptr += image * delta_b + rows * delta_d
    z_ptr += image * z_b + rows * z_d
    du_ptr += image * du_b + rows * du_d
    ddelta_ptr += image * ddelta_b + rows * ddelta_d
    dz_ptr += image * dz_b + rows * dz_d
    B_ptr += image * B_b + group * B_g
    C_ptr += image * C_b + group * C_g
    parts_ptr += (image * (GROUPS * BLOCKS) + block) * 2 * L
    row = image * (GROUPS * K) + channel
    p0, a0 = tl.zeros([CH, 1], tl.float32), tl.zeros([CH, 1], tl.float32) + 1.0
    if LAST:
        p0 = tl.load(dlast_ptr + row, mask=there, other=0.0)
    dA, dD, dbias = (tl.zeros([CH, 1], tl.float32), tl.zeros([CH, 1], tl.float32), tl.zeros([CH, 1], tl.float32))
    tiles = tl.cdiv(L, T)
    place = tl.arange(0, T)[None, :]
    for back in range(0, tiles):
        tile = tiles - 1 - back
        step = tile * T + place
        exists = step < L
        mask = there & exists
        token = L - 1 - step if REVERSE else step
        h0 = tl.load(kept_ptr + (image * tiles + tile) * (GROUPS * K) + channel, mask=there, other=0.0)
        u = tl.load(u_ptr + token * u_l, mask=mask, other=0.0).to(tl.float32)
        dt = _steps(tl.load(delta_ptr + token * delta_l, mask=mask, other=0.0), bias, mask, BIAS, SOFTPLUS)
        dout = tl.load(dout_ptr + token * dout_l, mask=mask, other=0.0).to(tl.float32)
        B = tl.load(B_ptr + token * B_l, mask=exists, other=0.0).to(tl.float32)
        C = tl.load(C_ptr + token * C_l, mask=exists, other=0.0).to(tl.float32)
        dy = dout
        if GATE:
            z = tl.load(z_ptr + token * z_l, mask=mask, other=0.0).to(tl.float32)
            gate = _sigmoid(z)
            dy = dout * z * gate
        a = tl.exp2(dt * A)
        x = dt * u
        b = x * B
        through, fresh = tl.associative_scan((a, b), 1, _then)
        h = through * h0 + fresh
        through, fresh = tl.associative_scan((_following(a, a0, CH, T), C * dy), 1, _then, reverse=True)
        p = through * p0 + fresh
        p0, a0 = _column(p, 0, T), _column(a, 0, T)
        decayed = p * (h - b)  # a_t h_{t-1}, to the rounding of h_t
        ddt = decayed * (A * LN2) + p * B * u
        if SOFTPLUS > 0:
            ddt *= sigmoid_of_softplus(dt)
        du = p * B * dt
        if SKIP:
            du += skip * dy
            dD += tl.sum(dy * u, axis=1, keep_dims=True)
        if BIAS:
            dbias += tl.sum(tl.where(mask, ddt, 0.0), axis=1, keep_dims=True)
        if NEED_A:
            dA += tl.sum(tl.where(mask, decayed * dt, 0.0), axis=1, keep_dims=True)
        tl.store(du_ptr + token * du_l, du.to(du_ptr.dtype.element_ty), mask=mask)
        tl.store(ddelta_ptr + token * ddelta_l, ddt.to(ddelta_ptr.dtype.element_ty), mask=mask)
        if GATE:
            y = h * C
            if SKIP:
                y += skip * u
            dz = dout * y * gate * (1.0 + z * (1.0 - gate))
            tl.store(dz_ptr + token * dz_l, dz.to(dz_ptr.dtype.element_ty), mask=mask)
        dB = tl.sum(tl.where(there, p * x, 0.0), axis=0, keep_dims=True)
        dC = tl.sum(tl.where(there, h * dy, 0.0), axis=0, keep_dims=True)
        tl.store(parts_ptr + token, dB, mask=exists)
        tl.store(parts_ptr + L + token, dC, mask=exists)
    if NEED_A:
        if LOG_A:
            dA *= A * LN2
        tl.store(dA_ptr + row, dA, mask=there)
    if SKIP:
        tl.store(dD_ptr + row, dD, mask=there)
    if BIAS:
        tl.store(dbias_ptr + row, dbias, mask=there)


def _constants(call, L: int) -> dict[str, Any]:
    names = ("GROUPS", "K", "LOG_A", "GATE", "BIAS", "SOFTPLUS")
    given = {name: call.constants[name] for name in names}
    return {**given, "CH": ROWS, "T": single_steps(L), "REVERSE": call.constants["ORDER"] == "reverse", "num_warps": 1}


def _programs(call) -> int:
    return len(call.u) * call.constants["GROUPS"] * triton.cdiv(call.constants["K"], ROWS)


def forward(call, out: Tensor, last: Tensor, kept: Tensor, skip: bool, keep: bool) -> None:
    L = call.u.shape[1]
    launch(
        _forward, (_programs(call),),
        *(call.u, call.delta, call.A, call.B, call.C, call.D, call.z, call.bias, out, last, kept, L),
        *(*call.u.stride(), *call.delta.stride(), *call.z.stride(), *out.stride()),
        *(*call.B.stride()[:3], *call.C.stride()[:3]),
        **_constants(call, L), SKIP=skip, KEEP=keep,
    )  # fmt: skip


def backward(call, dout, dlast, kept, du, ddelta, dz, dA, dD, dbias, skip, need_A) -> tuple[Tensor, Tensor]:
    """Fills the gradients, and returns dB and dC (b, l, g, 1)."""
    batch, L, _ = call.u.shape
    groups = call.constants["GROUPS"]
    parts = call.new(batch, groups, triton.cdiv(call.constants["K"], ROWS), 2, L)
    launch(
        _backward, (_programs(call),),
        *(dout, dout if dlast is None else dlast.contiguous(), call.u, call.delta, call.A, call.B, call.C, call.D),
        *(call.z, call.bias, kept, du, ddelta, dz, dA, dD, dbias, parts, L),
        *(*dout.stride(), *call.u.stride(), *call.delta.stride(), *call.z.stride()),
        *(*call.B.stride()[:3], *call.C.stride()[:3], *du.stride(), *ddelta.stride(), *dz.stride()),
        **_constants(call, L), SKIP=skip, LAST=dlast is not None, NEED_A=need_A,
    )  # fmt: skip
    dB, dC = torch.sum(parts, 2).transpose(1, 3).unsqueeze(4).unbind(2)  # (b, l, g, 1)
    return dB, dC
