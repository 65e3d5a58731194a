"""The recurrence as PyTorch operators, each with its backward: `scan` for the backends `torch` and `native`, and
`scan_kernel` for `triton`, which also takes the softplus, goes backwards, and does nothing for a frozen A."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mambacl.fused.calling import operator
from mambacl.scan import native, torch_loop, triton_scan

BACKENDS = {"torch": torch_loop, "native": native}


def _full_precision(x: Tensor) -> Any:
    return torch.autocast(x.device.type, enabled=False)


# The backends `torch` and `native`


def _scan(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """Output, last state, and what the backend keeps for the backward besides its inputs."""
    with _full_precision(u):
        y, last, kept = BACKENDS[backend].forward(u, delta, A, B, C)
    return y.contiguous(), last.contiguous(), kept


def _scan_back(
    dy: Tensor, dlast: Tensor, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, kept: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with _full_precision(u):
        du, ddelta, dA, dB, dC = BACKENDS[backend].backward(dy, dlast, u, delta, A, B, C, kept)
    return du.contiguous(), ddelta.contiguous(), dA.contiguous(), dB.contiguous(), dC.contiguous()


def _fake_scan(u, delta, A, B, C, backend):  # type: ignore[no-untyped-def]
    kept = BACKENDS[backend].kept_shape(u, A, B)
    return u.new_empty(u.shape), u.new_empty(u.shape[0], *A.shape), u.new_empty(kept)


def _fake_scan_back(dy, dlast, u, delta, A, B, C, kept, backend):  # type: ignore[no-untyped-def]
    return tuple(tensor.new_empty(tensor.shape) for tensor in (u, delta, A, B, C))


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.backend = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.set_materialize_grads(False)  # else zeros for what nobody differentiates


def _differentiate(ctx, dy: Tensor | None, dlast: Tensor | None, dkept: None):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors  # once: checkpointing unpacks them only once
    u, _, A, *_ = saved
    dy = torch.zeros_like(u) if dy is None else dy
    dlast = u.new_zeros(u.shape[0], *A.shape) if dlast is None else dlast
    return (*_scan_backward(dy, dlast, *saved, ctx.backend), None)


_scan_backward = operator("scan_backward", _scan_back, _fake_scan_back)
scan = operator("scan", _scan, _fake_scan, _keep, _differentiate)


# The backend `triton`


def _kernel(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    log_A: bool,
    softplus: bool,
    reverse: bool,
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, last state, states for the backward, and with `softplus` the steps, all in float32. With `log_A`, A holds
    log(-A). With a weight (d, rank), delta (b, l, rank) is what its product makes the steps of, before the softplus."""
    if weight is not None:
        from mambacl.fused.steps import project_steps

        steps = project_steps(delta, weight, bias)
    else:
        steps = F.softplus(delta.float()).contiguous() if softplus else delta
    y, last, kept = triton_scan.forward(u, steps, A, B, C, reverse, log_A)
    return y, last, kept, steps if softplus else delta.new_empty(0, dtype=torch.float32)


def _kernel_back(
    dy: Tensor,
    dlast: Tensor | None,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    kept: Tensor,
    log_A: bool,
    softplus: bool,
    reverse: bool,
    need_A: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`delta` holds the steps, after the softplus."""
    du, ddelta, dA, dB, dC = triton_scan.backward(
        dy, dlast, u, delta, A, B, C, kept, reverse, log_A, softplus=softplus, need_A=need_A
    )
    return du, ddelta, dA, dB.contiguous().to(B.dtype), dC.contiguous().to(C.dtype)


def _fake_kernel(u, delta, A, B, C, log_A, softplus, reverse, weight, bias):  # type: ignore[no-untyped-def]
    def new(*shape: int) -> Tensor:
        return u.new_empty(shape, dtype=torch.float32)

    kept = triton_scan.kept_shape(u, A)
    return new(*u.shape), new(u.shape[0], *A.shape), new(*kept), new(*(u.shape if softplus else (0,)))


def _fake_kernel_back(  # type: ignore[no-untyped-def]
    dy, dlast, u, delta, A, B, C, kept, log_A, softplus, reverse, need_A
):
    return tuple(tensor.new_empty(tensor.shape) for tensor in (u, delta, A, B, C))


def _keep_kernel(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    u, delta, A, B, C, ctx.log_A, ctx.softplus, ctx.reverse, weight, _ = inputs
    ctx.dtype = delta.dtype
    low_rank = delta if weight is not None and ctx.needs_input_grad[8] else None
    ctx.save_for_backward(u, output[3] if ctx.softplus else delta, A, B, C, output[2], low_rank, weight)
    ctx.set_materialize_grads(False)  # else zeros for what nobody differentiates


def _differentiate_kernel(ctx, dy, dlast, dkept, dsteps):  # type: ignore[no-untyped-def]
    need_A, (need_weight, need_bias) = ctx.needs_input_grad[2], ctx.needs_input_grad[8:]
    *saved, low_rank, weight = ctx.saved_tensors
    u = saved[0]
    dy = torch.zeros(u.shape, dtype=torch.float32, device=u.device) if dy is None else dy
    du, ddelta, dA, dB, dC = _kernel_backward(dy, dlast, *saved, ctx.log_A, ctx.softplus, ctx.reverse, need_A)
    dweight = dbias = None
    if weight is not None:
        rows = ddelta.flatten(0, 1)
        dweight = rows.T @ low_rank.flatten(0, 1).to(rows.dtype) if need_weight else None
        dbias = rows.sum(0) if need_bias else None
        ddelta = (rows @ weight).unflatten(0, u.shape[:2])
    return du, ddelta.to(ctx.dtype), dA if need_A else None, dB, dC, None, None, None, dweight, dbias


_kernel_backward = operator("scan_kernel_backward", _kernel_back, _fake_kernel_back)
scan_kernel = operator("scan_kernel", _kernel, _fake_kernel, _keep_kernel, _differentiate_kernel)
