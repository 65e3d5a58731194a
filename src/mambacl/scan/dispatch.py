"""`selective_scan`: checks the inputs, picks a backend, adds what surrounds the recurrence (D, z, bias, softplus).

The recurrence itself is a PyTorch operator with a registered backward (`operators`), so that `torch.compile` takes it
as a whole.
"""

import math
import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl import fused
from mambacl.errors import UserError
from mambacl.fused.halves import is_plain
from mambacl.scan import native, operators, triton_scan
from mambacl.scan.reference import selective_scan_reference

ENVIRONMENT_VARIABLE = "MAMBACL_SCAN"  # forces a backend wherever the caller left the choice open


def available_backends() -> list[str]:
    """The values of `backend` that work on this machine."""
    compiled = ["native"] if native.library() is not None else []
    return ["auto", "reference", "torch", *compiled] + (["triton"] if _triton_runs() else [])


def _triton_runs() -> bool:
    return fused.switch.available() and (torch.cuda.is_available() or triton_scan.interpreted())


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
    dtype of the computation. `backend`: "auto", "reference", "torch" (any device), "native" (C++, CPU) or "triton"
    (CUDA).
    """
    _check_shapes(u, delta, A, B, C, D, z, delta_bias)
    if not u.is_floating_point():
        raise UserError(f"selective_scan takes floating-point tensors, got u of {u.dtype}; convert it with u.float().")
    dtype = _common_dtype(u, delta, A, B, C, D, z, delta_bias)
    backend = chosen_backend(u, A, backend, dtype)
    if backend == "reference":
        x, dt, A, B, C = (tensor.to(dtype) for tensor in (u, delta, A, B, C))
        D, z, bias = (None if tensor is None else tensor.to(dtype) for tensor in (D, z, delta_bias))
        with torch.autocast(u.device.type, enabled=False):
            y, last = selective_scan_reference(x, dt, A, B, C, D, z, bias, delta_softplus)
    else:
        B, C = _tokens_first(B, u), _tokens_first(C, u)
        x, dt = u.mT.contiguous(), delta.mT.contiguous()  # (b, l, d) from here on: one layout for every operation
        if delta_bias is not None:
            dt = dt.to(dtype) + delta_bias.to(dtype)
        y, last = scan_tokens(x, dt, A.to(dtype), B, C, backend, softplus=delta_softplus)
        if z is not None and D is not None:
            y = fused.skip_gate(y, x, D, z.mT.contiguous())
        else:
            y = y if D is None else torch.addcmul(y, D.to(dtype), x.to(dtype))
            y = y if z is None else y * F.silu(z.mT.contiguous().to(dtype))
        y = y.mT.contiguous()
    y = y.to(u.dtype)
    return (y, last) if return_last_state else y


def scan_tokens(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    backend: str = "auto",
    *,
    log_A: bool = False,
    softplus: bool = False,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """The recurrence alone, in the layout that every backend works in: tokens before channels, no copies.

    u, delta (b, l, d); A (d, n); B, C (b, l, g, n), of any floating types: computed in float32, or in float64 when one
    is float64. Output (b, l, d) and last state (b, d, n) in that dtype. With `log_A`, A holds log(-A), as models keep
    it; with `softplus` the steps are softplus(delta); `reverse` goes from the last token to the first.
    """
    dtype = _common_dtype(u, delta, A, B, C)
    groups = math.lcm(B.shape[2], C.shape[2])  # a backend takes B and C in the same groups
    B, C = (M if M.shape[2] == groups else M.repeat_interleave(groups // M.shape[2], dim=2) for M in (B, C))
    backend = chosen_backend(u, A, backend, dtype)
    if backend == "triton":
        y, last, _, _ = operators.scan_kernel(u, delta, A.float(), B, C, log_A, softplus, reverse, None, None)
        return y, last
    u, delta, A, B, C = (tensor.to(dtype) for tensor in (u, delta, A, B, C))
    if log_A:
        A = -torch.exp(A)
    if softplus:
        delta = F.softplus(delta)
    if reverse:
        u, delta, B, C = (tensor.flip(1) for tensor in (u, delta, B, C))
    if backend == "reference":
        y, last = selective_scan_reference(u.mT, delta.mT, A, B.permute(0, 2, 3, 1), C.permute(0, 2, 3, 1))
        y = y.mT
    else:
        y, last, _ = operators.scan(u, delta, A, B, C, backend)
    return (y.flip(1) if reverse else y), last


def scan_low_rank(
    u: Tensor,
    dt: Tensor,
    to_steps: nn.Linear,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    backend: str = "auto",
    *,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """`scan_tokens` with the steps softplus(to_steps(dt)), a linear layer's. A kernel writes them at once; a layer that
    is no plain one is called as it is."""
    weight = to_steps.weight
    direct = not torch.compiler.is_compiling() and is_plain(to_steps) and _multiplies(weight, dt, u)
    dtype = _common_dtype(u, A_log, B, C)
    if direct and B.shape[2] == C.shape[2] and chosen_backend(u, A_log, backend, dtype) == "triton":
        y, last, _, _ = operators.scan_kernel(u, dt, A_log.float(), B, C, True, True, reverse, weight, to_steps.bias)
        return y, last
    steps = to_steps(dt.to(weight.dtype))
    steps = steps.to(torch.promote_types(torch.float32, steps.dtype))
    return scan_tokens(u, steps, A_log, B, C, backend, log_A=True, softplus=True, reverse=reverse)


def _multiplies(weight: Tensor, dt: Tensor, u: Tensor) -> bool:
    """Whether the kernel takes a weight: of float32, where u is, (d, rank). Any other is its layer's to take or to
    refuse."""
    there = weight.dtype == torch.float32 and weight.device == u.device
    return there and weight.shape == (u.shape[-1], dt.shape[-1])


def scans_by_kernel(u: Tensor, A: Tensor) -> bool:
    """Whether a Triton kernel scans u, where the backend is left open."""
    return chosen_backend(u, A, dtype=_common_dtype(u, A)) == "triton"


def chosen_backend(u: Tensor, A: Tensor, backend: str = "auto", dtype: torch.dtype = torch.float32) -> str:
    """The backend that serves these inputs, computed in `dtype`: the caller's choice, the environment's, or the fastest
    that can."""
    states = A.shape[1]
    on_gpu = dtype == torch.float32 and states <= triton_scan.MOST_STATES
    on_cpu = native.supports(u, dtype, states)
    if backend == "auto":
        backend = os.environ.get(ENVIRONMENT_VARIABLE, "auto")
    if backend == "auto":
        if on_gpu and fused.switch.takes_kernel(u, "auto"):
            return "triton"
        return "native" if on_cpu else "torch"
    if backend == "native" and not on_cpu:
        raise UserError(
            f"The scan backend 'native' needs the compiled kernel, CPU tensors and at most {native.MOST_STATES} "
            "states; use backend='torch', or reinstall mambacl where a C++ compiler is present."
        )
    if backend == "triton" and not (on_gpu and fused.switch.takes_kernel(u, "triton")):
        raise UserError(
            f"The scan backend 'triton' needs CUDA tensors below float64 and at most {triton_scan.MOST_STATES} states; "
            "use backend='torch'."
        )
    if backend not in ("reference", "torch", "native", "triton"):
        names = ", ".join(available_backends())
        raise UserError(f"There is no scan backend '{backend}'; choose one of {names}.")
    return backend


def _common_dtype(*tensors: Tensor | None) -> torch.dtype:
    """What is computed in: float32, or float64 where an input is."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = dtype if tensor is None else torch.promote_types(dtype, tensor.dtype)
    return dtype


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
