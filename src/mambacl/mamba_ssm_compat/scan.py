"""mamba-ssm's functions on top of `mambacl.selective_scan`: the scan, one step of it, and the block around it."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mambacl.errors import UserError
from mambacl.mamba_ssm_compat.conv import causal_conv1d_fn
from mambacl.mamba_ssm_compat.norms import rms_norm_fn
from mambacl.ops import selective_scan


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    *,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`mambacl.selective_scan`. Unlike in mamba-ssm, the last state has a gradient."""
    refuse_complex(A, B, C)
    return selective_scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state, backend)


def selective_scan_ref(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
    """`selective_scan_fn` by the plain recurrence, step by step."""
    return selective_scan_fn(*args, **kwargs, backend="reference")


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """One step of the recurrence: updates state (b, d, n) in place, returns the output (b, d).

    x, dt, z (b, d); A (d, n); B, C (b, n); D, dt_bias (d,). With heads, one more dimension comes before d, and B and C
    are (b, g, n) in groups of heads. state_batch_indices (b,) selects each sequence's row of a larger state.
    """
    refuse_complex(A, B, C)
    heads = state.dim() == 4
    if not heads:  # one head, one group
        x, dt, B, C = (tensor.unsqueeze(1) for tensor in (x, dt, B, C))
        A, z = A[None], None if z is None else z.unsqueeze(1)
        D, dt_bias = (None if tensor is None else tensor[None] for tensor in (D, dt_bias))
    rows = None if state_batch_indices is None else state_batch_indices.long()
    all_states = state if heads else state.unsqueeze(1)  # (b, h, d, n), a view
    before = all_states if rows is None else all_states[rows]
    _check_step(before, x, dt, A, B, C, D, z, dt_bias)

    wide = torch.promote_types(torch.float32, torch.promote_types(state.dtype, x.dtype))
    if torch.is_grad_enabled():
        before = before.clone()  # the backward needs the old values
    step = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias.to(wide)
    step = (F.softplus(step) if dt_softplus else step).unsqueeze(-1)  # (b, h, d, 1)
    B, C = _per_head(B.to(wide), x.shape[1]), _per_head(C.to(wide), x.shape[1])  # (b, h, n)
    added = (step * x.to(wide).unsqueeze(-1)) * B.unsqueeze(2)
    after = torch.addcmul(added, torch.exp(step * A.to(wide)), before.to(wide))
    if rows is None:
        all_states.copy_(after)
    else:
        all_states[rows] = after.to(state.dtype)
    y = (after * C.unsqueeze(2)).sum(-1)
    if D is not None:
        y = torch.addcmul(y, D.to(wide), x.to(wide))
    if z is not None:
        y = y * F.silu(z.to(wide))
    y = y.to(x.dtype)
    return y if heads else y.squeeze(1)


def _per_head(M: Tensor, heads: int) -> Tensor:
    return M if M.shape[1] == heads else M.repeat_interleave(heads // M.shape[1], dim=1)


def mamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
) -> Tensor:
    """A Mamba block from the output of in_proj, xz (b, 2 d, l), to that of out_proj, (b, l, e).

    checkpoint_lvl has no effect: each operator keeps what its backward needs.
    """
    y = mamba_inner_fn_no_out_proj(
        xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, A, B, C, D, delta_bias, B_proj_bias,
        C_proj_bias, delta_softplus, rms_weights=(b_rms_weight, c_rms_weight, dt_rms_weight), eps=b_c_dt_rms_eps,
    )  # fmt: skip
    return _project(y, out_proj_weight, out_proj_bias)


def mamba_inner_fn_no_out_proj(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    *,
    rms_weights: Sequence[Tensor | None] = (None, None, None),
    eps: float = 1e-6,
    A_b: Tensor | None = None,
) -> Tensor:
    """`mamba_inner_fn` without out_proj; returns (b, d, l). Used by Vim's two directions.

    rms_weights: those of the norms of B, C and delta. A_b: A of a second scan, backwards over the same tokens.
    """
    refuse_complex(A, B, C, A_b)
    x, z = xz.chunk(2, dim=1)
    x = causal_conv1d_fn(x, conv1d_weight.squeeze(1), conv1d_bias, activation="silu")  # type: ignore[assignment]
    projected = F.linear(x.mT, x_proj_weight)  # (b, l, rank + 2 n)
    rank, states = delta_proj_weight.shape[1], A.shape[1]
    delta = F.linear(projected[..., :rank], delta_proj_weight).mT
    if B is None:
        B = projected[..., rank : rank + states]
        B = (B if B_proj_bias is None else B + B_proj_bias.to(B.dtype)).mT
    if C is None:
        C = projected[..., -states:]
        C = (C if C_proj_bias is None else C + C_proj_bias.to(C.dtype)).mT
    # The norm's dimension is the second-to-last one; the last one is time.
    B, C, delta = (
        M if weight is None else rms_norm_fn(M.mT, weight, None, eps=eps).mT  # type: ignore[union-attr]
        for M, weight in zip((B, C, delta), rms_weights, strict=True)
    )
    y = selective_scan(x, delta, A, B, C, D, z, delta_bias, delta_softplus)
    assert isinstance(y, Tensor)
    if A_b is None:
        return y
    x, delta, z = (tensor.flip(-1) for tensor in (x, delta, z))
    B, C = (M if M.dim() == 2 else M.flip(-1) for M in (B, C))
    backward = selective_scan(x, delta, A_b, B, C, D, z, delta_bias, delta_softplus)
    assert isinstance(backward, Tensor)
    return y + backward.flip(-1)


def bimamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    A_b: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
) -> Tensor:
    """`mamba_inner_fn` with scans in both directions that differ only in A: Vim's first version."""
    y = mamba_inner_fn_no_out_proj(
        xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, A, B, C, D, delta_bias, B_proj_bias,
        C_proj_bias, delta_softplus, A_b=A_b,
    )  # fmt: skip
    return _project(y, out_proj_weight, out_proj_bias)


def _project(y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(y.mT, weight, None if bias is None else bias.to(weight.dtype))


def refuse_complex(*tensors: Tensor | None) -> None:
    if any(tensor is not None and tensor.is_complex() for tensor in tensors):
        raise UserError(
            "mambacl's scan supports only real A, B and C, got a complex one: use mamba-ssm for complex states."
        )


def _check_step(state, x, dt, A, B, C, D, z, dt_bias) -> None:  # type: ignore[no-untyped-def]
    batch, heads, width, n = state.shape
    groups = B.shape[1] if B.dim() == 3 else 0
    token, vector, matrix = (batch, heads, width), (heads, width), (batch, groups, n)
    wanted = {"x": (x, token), "dt": (dt, token), "A": (A, (heads, width, n)), "B": (B, matrix), "C": (C, matrix),
              "D": (D, vector), "z": (z, token), "dt_bias": (dt_bias, vector)}  # fmt: skip
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise UserError(
                f"selective_state_update with a state of {tuple(state.shape)} takes {name} of shape {shape}, "
                f"got {tuple(tensor.shape)}."
            )
    if heads % groups:
        raise UserError(f"B and C must have groups that divide the {heads} heads, got {groups} of them.")
