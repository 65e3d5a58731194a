"""The scan as one PyTorch operator with a backward, for every backend."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mambacl.ops import cpu, kernels, scan_tiles, scan_torch, scan_triton
from mambacl.ops.operator import nothing, operator, wants_gradient
from mambacl.ops.precision import full_precision

NONE, GIVEN, INSIDE = 0, 1, 2  # no softplus; delta already had it; the kernel applies it (ops.kernels.tiles)


def _run(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, bias: Tensor | None,
    weight: Tensor | None, log_A: bool, softplus: bool, order: str, height: int, dtype: torch.dtype, backend: str,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the output in `dtype`, the last state, what the backward needs besides the inputs (empty unless `keep`),
    and dt if it was computed before the scan (else empty). With a weight (d, rank), delta (b, l, rank) is multiplied by
    it before the softplus."""
    dt = nothing(u)
    with full_precision(u):
        if backend == "torch":
            out, last, kept = scan_torch.forward(u, delta, A, B, C)
            return out.contiguous(), last.contiguous(), kept, dt
        if backend == "native":
            reverse = order == "reverse"
            out, last, kept = cpu.forward(
                u, delta, A, B, C, D, z, bias, log_A=log_A, softplus=softplus, reverse=reverse, keep=keep
            )
            return out, last, kept, dt
        bare = _bare(u, delta, D, z, order, weight is not None)
        if weight is not None:
            dt = kernels.delta.delta_projection(delta, weight, bias)
        elif softplus and bare:
            dt = F.softplus(delta.float() if bias is None else delta.float() + bias.float()).contiguous()
        if bare:
            given = dt if softplus else delta if bias is None else delta.float() + bias.float()
            out, last, kept = scan_triton.forward(u, given, A, B, C, order == "reverse", log_A, keep)
            return out.to(dtype), last, kept, dt
        inside = (GIVEN if weight is not None else INSIDE) if softplus else NONE
        given, bias = (dt, None) if weight is not None else (delta, bias)
        out, last, kept = scan_tiles.forward(
            u, given, A, B, C, D, z, bias, log_A=log_A, softplus=inside, order=order, height=height, dtype=dtype,
            keep=keep,
        )  # fmt: skip
        return out, last, kept, dt


def _bare(u: Tensor, delta: Tensor, D: Tensor | None, z: Tensor | None, order: str, low_rank: bool) -> bool:
    """Whether the kernels of the bare recurrence apply; they are the fastest if channels are contiguous."""
    plain = D is None and z is None and order != "cross"
    return plain and u.stride(2) == 1 and (low_rank or delta.stride(2) == 1)


def _back(
    dout: Tensor, dlast: Tensor | None, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
    z: Tensor | None, bias: Tensor | None, kept: Tensor, log_A: bool, softplus: int, order: str, height: int,
    backend: str, need_A: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of u, delta, A, B, C, D, z and bias, in the inputs' dtypes; empty for inputs that are None."""
    found: tuple[Tensor | None, ...]
    with full_precision(u):
        if backend == "torch":
            dlast = u.new_zeros(u.shape[0], *A.shape) if dlast is None else dlast
            grads = scan_torch.backward(dout, dlast, u, delta, A, B, C, kept)
            found = (*(grad.contiguous() for grad in grads), None, None, None)
        elif backend == "native":
            found = cpu.backward(
                *(dout, dlast, u, delta, A, B, C, D, z, bias, kept),
                log_A=log_A, softplus=bool(softplus), reverse=order == "reverse", need_A=need_A,
            )  # fmt: skip
        elif _bare(u, delta, D, z, order, False):
            given = delta if softplus or bias is None else delta.float() + bias.float()
            du, ddelta, dA, dB, dC = scan_triton.backward(
                dout, dlast, u, given, A, B, C, kept, order == "reverse", log_A, softplus=softplus > 0, need_A=need_A
            )
            dbias = None if bias is None else ddelta.float().sum((0, 1))
            found = (du, ddelta, dA if need_A else None, dB, dC, None, None, dbias)
        else:
            found = scan_tiles.backward(
                *(dout, dlast, u, delta, A, B, C, D, z, bias, kept),
                log_A=log_A, softplus=softplus, order=order, height=height, need_A=need_A,
            )  # fmt: skip
    inputs = (u, delta, A, B, C, D, z, bias)
    return tuple(_typed(*pair, u) for pair in zip(found, inputs, strict=True))  # type: ignore[return-value]


def _typed(grad: Tensor | None, given: Tensor | None, u: Tensor) -> Tensor:
    """A gradient in its input's dtype; only those of u, delta and z can be non-contiguous."""
    if grad is None or given is None:
        return nothing(u)
    grad = grad.to(given.dtype)
    return grad if given.dim() == 3 else grad.contiguous()


def _fake(u, delta, A, B, C, D, z, bias, weight, log_A, softplus, order, height, dtype, backend, keep):  # type: ignore[no-untyped-def]
    state = torch.float32 if backend == "triton" else u.dtype
    dt = (0,)
    if backend == "torch":
        out, kept = u.new_empty(u.shape), scan_torch.kept_shape(u, A, B)
    elif backend == "native":
        out, kept = scan_tiles.out_like(u), cpu.kept_shape(u, A, B)
    elif _bare(u, delta, D, z, order, weight is not None):
        out, kept = u.new_empty(u.shape, dtype=dtype), scan_triton.kept_shape(u, A)
        dt = u.shape if softplus else dt
    else:
        out = scan_tiles.out_like(u, A.shape[0], dtype)
        kept = scan_tiles.kept_shape(u, u if weight is not None else delta, A, z, order)
        dt = (*u.shape[:2], A.shape[0]) if weight is not None else dt
    kept = kept if keep or backend == "torch" else (0,)
    return out, *(u.new_empty(shape, dtype=state) for shape in ((u.shape[0], *A.shape), kept, dt))


def _fake_back(  # type: ignore[no-untyped-def]
    dout, dlast, u, delta, A, B, C, D, z, bias, kept, log_A, softplus, order, height, backend, need_A
):
    def like(x: Tensor | None) -> Tensor:
        if x is None:
            return nothing(u)
        return scan_tiles.out_like(x) if x.dim() == 3 else x.new_empty(x.shape)

    return like(u), like(delta), like(A if need_A else None), like(B), like(C), like(D), like(z), like(bias)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    u, delta, A, B, C, D, z, bias, weight, ctx.log_A, softplus, ctx.order, ctx.height, _, ctx.backend, _ = inputs
    computed = output[3].numel() > 0  # dt, before the recurrence
    ctx.softplus = (GIVEN if computed else INSIDE) if softplus else NONE
    ctx.dtype = delta.dtype
    low_rank = delta if weight is not None and ctx.needs_input_grad[8] else None
    kept_bias = None if weight is not None else bias
    ctx.save_for_backward(u, output[3] if computed else delta, A, B, C, D, z, kept_bias, output[2], low_rank, weight)
    ctx.set_materialize_grads(False)  # None, not zeros, for outputs that have no gradient


def _differentiate(ctx, dout, dlast, dkept, ddt):  # type: ignore[no-untyped-def]
    needs = ctx.needs_input_grad
    *saved, low_rank, weight = ctx.saved_tensors  # read once: checkpointing unpacks them only once
    u, A = saved[0], saved[2]
    if dout is None:
        dtype = torch.promote_types(torch.float32, u.dtype)
        dout = torch.zeros((*u.shape[:2], A.shape[0]), dtype=dtype, device=u.device)
    flags = (ctx.log_A, ctx.softplus, ctx.order, ctx.height, ctx.backend, needs[2])
    du, ddelta, dA, dB, dC, dD, dz, dbias = _backward(dout, dlast, *saved, *flags)
    dweight = None
    if weight is not None:
        rows = ddelta.flatten(0, 1)
        dweight = rows.T @ low_rank.flatten(0, 1).to(rows.dtype) if needs[8] else None
        dbias = rows.sum(0)
        ddelta = (rows @ weight).unflatten(0, u.shape[:2])
    ddelta = ddelta.to(ctx.dtype)
    grads = (du, ddelta, dA, dB, dC, dD, dz, dbias, dweight)
    return *(grad if need else None for grad, need in zip(grads, needs[:9], strict=True)), *[None] * 7


_backward = operator("scan_backward", _back, _fake_back)
scan = operator("scan", _run, _fake, _keep, _differentiate)


def differentiable_scan(*inputs: Any) -> Any:
    """Calls the operator; states for the backward are kept only if an input requires a gradient."""
    return scan(*inputs, wants_gradient(inputs))
