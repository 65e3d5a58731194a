"""`selective_scan`: checks the inputs, picks a backend, adds what surrounds the recurrence (D, z, bias, softplus).

The recurrence itself is one PyTorch operator with a registered backward, so that `torch.compile` takes it as a whole.
"""

import math
import os

import torch
import torch.nn.functional as F
from torch import Tensor

from mambacl.errors import UserError
from mambacl.scan import native, torch_loop
from mambacl.scan.reference import selective_scan_reference

BACKENDS = {"torch": torch_loop, "native": native}
ENVIRONMENT_VARIABLE = "MAMBACL_SCAN"  # forces a backend wherever the caller left the choice open


def available_backends() -> list[str]:
    """The values of `backend` that work on this machine."""
    return ["auto", "reference", "torch"] + (["native"] if native.library() is not None else [])


def selective_scan(
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
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The selective scan, with the meaning and the shapes of the public `selective_scan_fn`.

    u, delta (b, d, l); A (d, n); B, C (d, n), (b, n, l) or (b, g, n, l); D, delta_bias (d,); z (b, d, l).
    Computed in float32, or in float64 when an input is float64; the output has u's dtype, the last state (b, d, n) the
    dtype of the computation. `backend`: "auto", "reference", "torch" (any device) or "native" (C++, CPU).
    """
    _check_shapes(u, delta, A, B, C, D, z, delta_bias)
    if not u.is_floating_point():
        raise UserError(f"selective_scan takes floating-point tensors, got u of {u.dtype}; convert it with u.float().")
    dtype = torch.float32
    for tensor in (u, delta, A, B, C, D, z, delta_bias):
        if tensor is not None:
            dtype = torch.promote_types(dtype, tensor.dtype)
    x, dt, A, B, C = (tensor.to(dtype) for tensor in (u, delta, A, B, C))
    D, z, bias = (None if tensor is None else tensor.to(dtype) for tensor in (D, z, delta_bias))

    backend = chosen_backend(x, A, backend)
    if backend == "reference":
        with torch.autocast(u.device.type, enabled=False):
            y, last = selective_scan_reference(x, dt, A, B, C, D, z, bias, delta_softplus)
    else:
        B, C = _tokens_first(B, x), _tokens_first(C, x)
        x, dt = x.mT.contiguous(), dt.mT.contiguous()  # (b, l, d) from here on: one layout for every operation
        if bias is not None:
            dt = dt + bias
        if delta_softplus:
            dt = F.softplus(dt)
        y, last = scan_tokens(x, dt, A, B, C, backend)
        if D is not None:
            y = torch.addcmul(y, D, x)
        if z is not None:
            y = y * F.silu(z.mT.contiguous())
        y = y.mT.contiguous()
    y = y.to(u.dtype)
    return (y, last) if return_last_state else y


def scan_tokens(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """The recurrence alone, in the layout that every backend works in: tokens before channels, no copies.

    u, delta (b, l, d); A (d, n); B, C (b, l, g, n), all of one dtype, float32 or float64. Output (b, l, d), last
    state (b, d, n).
    """
    backend = chosen_backend(u, A, backend)
    if backend == "reference":
        y, last = selective_scan_reference(u.mT, delta.mT, A, B.permute(0, 2, 3, 1), C.permute(0, 2, 3, 1))
        return y.mT, last
    groups = math.lcm(B.shape[2], C.shape[2])  # a backend takes B and C in the same groups
    B, C = (M if M.shape[2] == groups else M.repeat_interleave(groups // M.shape[2], dim=2) for M in (B, C))
    y, last, _ = torch.ops.mambacl.scan(u, delta, A, B, C, backend)
    return y, last


def chosen_backend(u: Tensor, A: Tensor, backend: str = "auto") -> str:
    """The backend that serves these inputs: the caller's choice, the environment's, or the fastest that can."""
    if backend == "auto":
        backend = os.environ.get(ENVIRONMENT_VARIABLE, "auto")
    if backend == "auto":
        return "native" if native.supports(u, A) else "torch"
    if backend == "native" and not native.supports(u, A):
        raise UserError(
            f"The scan backend 'native' needs the compiled kernel, CPU tensors and at most {native.MOST_STATES} "
            "states; use backend='torch', or reinstall mambacl where a C++ compiler is present."
        )
    if backend != "reference" and backend not in BACKENDS:
        names = ", ".join(available_backends())
        raise UserError(f"There is no scan backend '{backend}'; choose one of {names}.")
    return backend


@torch.library.custom_op("mambacl::scan", mutates_args=())
def _scan(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """Output, last state, and what the backend keeps for the backward besides its inputs."""
    with torch.autocast(u.device.type, enabled=False):
        y, last, kept = BACKENDS[backend].forward(u, delta, A, B, C)
    return y.contiguous(), last.contiguous(), kept


@torch.library.custom_op("mambacl::scan_backward", mutates_args=())
def _scan_backward(
    dy: Tensor, dlast: Tensor, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, kept: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with torch.autocast(u.device.type, enabled=False):
        du, ddelta, dA, dB, dC = BACKENDS[backend].backward(dy, dlast, u, delta, A, B, C, kept)
    return du.contiguous(), ddelta.contiguous(), dA.contiguous(), dB.contiguous(), dC.contiguous()


@_scan.register_fake
def _(u, delta, A, B, C, backend):  # type: ignore[no-untyped-def]
    kept = BACKENDS[backend].kept_shape(u, A, B)
    return u.new_empty(u.shape), u.new_empty(u.shape[0], *A.shape), u.new_empty(kept)


@_scan_backward.register_fake
def _(dy, dlast, u, delta, A, B, C, kept, backend):  # type: ignore[no-untyped-def]
    return tuple(tensor.new_empty(tensor.shape) for tensor in (u, delta, A, B, C))


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.backend = inputs
    ctx.save_for_backward(*tensors, output[2])


def _differentiate(ctx, dy: Tensor, dlast: Tensor, dkept: Tensor):  # type: ignore[no-untyped-def]
    return (*torch.ops.mambacl.scan_backward(dy, dlast, *ctx.saved_tensors, ctx.backend), None)


_scan.register_autograd(_differentiate, setup_context=_keep)


def _tokens_first(M: Tensor, u: Tensor) -> Tensor:
    """B or C as (b, l, g, n)."""
    if M.dim() == 2:  # constant in time: one group a channel
        return M.expand(u.shape[0], u.shape[2], -1, -1)
    return M.mT[:, :, None] if M.dim() == 3 else M.permute(0, 3, 1, 2)


def _check_shapes(u, delta, A, B, C, D, z, delta_bias) -> None:  # type: ignore[no-untyped-def]
    if u.dim() != 3 or A.dim() != 2:
        raise UserError(f"selective_scan takes u (b, d, l) and A (d, n), got {tuple(u.shape)} and {tuple(A.shape)}.")
    batch, channels, length = u.shape
    n = A.shape[1]
    if length == 0 or batch == 0:
        raise UserError(f"selective_scan needs at least one image and one token, got u of shape {tuple(u.shape)}.")
    for name, M in (("B", B), ("C", C)):
        groups = M.shape[1] if M.dim() == 4 else 1
        wanted = {2: (channels, n), 3: (batch, n, length), 4: (batch, groups, n, length)}.get(M.dim())
        if wanted is None or tuple(M.shape) != wanted or channels % groups:
            raise UserError(
                f"selective_scan takes {name} as (d, n), (b, n, l) or (b, g, n, l) with b={batch}, d={channels}, "
                f"n={n}, l={length} and g a divisor of d, got {tuple(M.shape)}."
            )
    vectors = {"delta": (delta, u.shape), "A": (A, (channels, n)), "D": (D, (channels,)), "z": (z, u.shape)}
    for name, (tensor, shape) in {**vectors, "delta_bias": (delta_bias, (channels,))}.items():
        if tensor is not None and tuple(tensor.shape) != tuple(shape):
            raise UserError(f"selective_scan takes {name} of shape {tuple(shape)}, got {tuple(tensor.shape)}.")
