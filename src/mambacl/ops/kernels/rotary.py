# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"
"""Rotary embedding over the states. The two states of a pair can have different frequencies.

    out_k = M_k cos(a_k) + s_k M_k' sin(a_k),    a_k = t f_k / scale,    k' the other of the pair, s = -1, +1, -1, ..

Backward, for fixed frequencies: dM_k = g_k cos(a_k) - s_k g_k' sin(a_k').
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mambacl.ops.kernels.launch import launch

TILE = 1024  # values per program


@triton.jit
def _rotate(
    M, freq, out, rows, length, m_b, m_l, m_m, SCALE: tl.constexpr, MATRICES: tl.constexpr, STATES: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    state = tl.arange(0, COLUMNS)[None, :]
    other = state ^ 1
    mask = (row < rows) & (state < STATES)
    token = row // MATRICES
    t = (token % length).to(tl.float32) / SCALE
    place = M + token // length * m_b + token % length * m_l + row % MATRICES * m_m
    own = tl.load(place + state, mask=mask, other=0.0).to(tl.float32)
    twin = tl.load(place + other, mask=mask, other=0.0).to(tl.float32)
    angle = t * tl.load(freq + state, mask=state < STATES, other=0.0)
    sign = tl.where(state % 2 == 0, -1.0, 1.0)
    if BACKWARD:
        far = t * tl.load(freq + other, mask=state < STATES, other=0.0)
        turned = own * tl.cos(angle) - sign * twin * tl.sin(far)
    else:
        turned = own * tl.cos(angle) + sign * twin * tl.sin(angle)
    tl.store(out + row * STATES + state, turned.to(out.dtype.element_ty), mask=mask)


def run(M: Tensor, freq: Tensor, scale: float, backward: bool, dtype: torch.dtype) -> Tensor:
    """Rotates M (b, l, m, n), or a gradient in the backward. Returns a contiguous tensor of `dtype`."""
    M = M if M.stride(3) == 1 else M.contiguous()
    out = torch.empty(M.shape, dtype=dtype, device=M.device)
    batch, length, matrices, states = M.shape
    if M.numel():
        rows, columns = batch * length * matrices, triton.next_power_of_2(states)
        block = max(1, TILE // columns)
        launch(
            _rotate, (triton.cdiv(rows, block),), *(M, freq.float().contiguous(), out),
            *(rows, length, *M.stride()[:3]), SCALE=scale, MATRICES=matrices, STATES=states, COLUMNS=columns,
            ROWS=block, BACKWARD=backward, num_warps=4,
        )  # fmt: skip
    return out
