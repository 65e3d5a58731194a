"""`selective_scan`: checks the inputs, chooses a backend and runs it.

A backend is a module with `forward`, `backward` and `kept_shape`. The recurrence is one PyTorch operator with a
registered backward, so `torch.compile` treats it as a unit. The kernels of `triton` and `native` also apply D, z, bias
and softplus; `torch` computes only the recurrence, and plain PyTorch does the rest.
"""

import math
import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambacl.errors import UserError
from mambacl.ops import cpu, scan_traced, scan_triton, switch
from mambacl.ops.linear import is_plain
from mambacl.ops.operator import is_direct, wants_gradient
from mambacl.ops.precision import full_precision
from mambacl.ops.scan_operator import differentiable_scan
from mambacl.ops.scan_reference import selective_scan_reference

ENVIRONMENT_VARIABLE = "MAMBACL_SCAN"  # the backend to use where the caller passes "auto"


def available_backends() -> list[str]:
    """The values of `backend` that work on this machine."""
    compiled = ["native"] if cpu.built() else []
    triton_runs = switch.available() and (torch.cuda.is_available() or scan_triton.interpreted())
    return ["auto", "reference", "torch", *compiled] + (["triton"] if triton_runs else [])


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
    """The selective scan, with the semantics and shapes of the public `selective_scan_fn`.

    u, delta (b, d, l); A (d, n); B, C (d, n), (b, n, l) or (b, g, n, l); D, delta_bias (d,); z (b, d, l).
    Computes in float32, or in float64 if an input is float64. The output has u's dtype; the last state (b, d, n) has
    the dtype of the computation. `backend`: "auto", "reference", "torch" (any device), "native" (C++, CPU) or "triton"
    (CUDA).
    """
    groups = _check_shapes(u, delta, A, B, C, D, z, delta_bias)
    if not u.is_floating_point():
        raise UserError(f"selective_scan needs floating-point tensors, got u of {u.dtype}; convert it with u.float().")
    inputs = (u, delta, A, B, C, D, z, delta_bias)
    dtype = _common_dtype(*inputs)
    chosen = chosen_backend(u, A, backend, dtype, math.lcm(*groups))
    if chosen == "native" and groups[0] == groups[1] < u.shape[1] and _goes_as_given(inputs, dtype):
        y, last = cpu.infer_channels_first(*inputs, delta_softplus)
    elif chosen == "reference":
        x, dt, A, B, C, D, z, bias = (_in_dtype(tensor, dtype) for tensor in inputs)
        with full_precision(u):
            y, last = selective_scan_reference(x, dt, A, B, C, D, z, bias, delta_softplus)
        y = _in_dtype(y, u.dtype)
    else:
        gate = None if z is None else z.mT
        B_tokens, C_tokens = _same_groups(_tokens_first(B, u), _tokens_first(C, u))
        y, last = _scan_by(
            *(chosen, dtype, u.mT, delta.mT, A, B_tokens, C_tokens, D, gate, delta_bias),
            *(False, delta_softplus, False, u.dtype),
        )
        y = y.mT
    return (y, last) if return_last_state else y


def scan_tokens(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    backend: str = "auto",
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    bias: Tensor | None = None,
    log_A: bool = False,
    softplus: bool = False,
    reverse: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`selective_scan` with tokens before channels, the layout of this package's models.

    u, delta, z (b, l, d); A (d, n); B, C (b, l, g, n); D, bias (d,), with any floating dtypes and strides; nothing is
    copied if channels or tokens are contiguous. Computes in float32, or in float64 if an input is float64. Returns the
    output (b, l, d) in `out_dtype` (default: the dtype of the computation) and the last state (b, d, n).

    `log_A`: A holds log(-A), as models store it. `softplus`: dt is softplus(delta + bias), not delta + bias.
    `reverse`: scan from the last token to the first.
    """
    dtype = _common_dtype(u, delta, A, B, C, D, z, bias)
    B, C = _same_groups(B, C)
    chosen = chosen_backend(u, A, backend, dtype, B.shape[2])
    return _scan_by(chosen, dtype, u, delta, A, B, C, D, z, bias, log_A, softplus, reverse, out_dtype or dtype)


def _scan_by(
    backend: str, dtype: torch.dtype, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
    z: Tensor | None, bias: Tensor | None, log_A: bool, softplus: bool, reverse: bool, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`scan_tokens` by the backend that was chosen, computed in `dtype`; B and C have the same groups."""
    order = "reverse" if reverse else "forward"
    if backend == "triton":
        out, last, _, _ = differentiable_scan(
            u, delta, A.float(), B, C, D, z, bias, None, log_A, softplus, order, 1, out_dtype, backend
        )
        return out, last
    given = u
    if any(x is not None and x.dtype != dtype for x in (u, delta, A, B, C, D, z, bias)):
        u, delta, A, B, C, D, z, bias = (_in_dtype(x, dtype) for x in (u, delta, A, B, C, D, z, bias))
    if backend == "native":
        tensors = (u, delta, A, B, C, D, z, bias)
        if not wants_gradient(tensors) and is_direct(tensors):  # the operator would take a third of a short scan's time
            out, last = cpu.infer(*tensors, log_A, softplus, reverse)
        else:
            out, last, _, _ = differentiable_scan(*tensors, None, log_A, softplus, order, 1, dtype, backend)
        return _in_dtype(out, out_dtype), last
    if log_A:
        A = -torch.exp(A)
    if bias is not None:
        delta = delta + bias
    if softplus:
        delta = F.softplus(delta)
    x = u
    if reverse:
        x, delta, B, C = (tensor.flip(1) for tensor in (x, delta, B, C))
    if backend == "reference":
        y, last = selective_scan_reference(x.mT, delta.mT, A, B.permute(0, 2, 3, 1), C.permute(0, 2, 3, 1))
        y = y.mT
    elif backend == scan_traced.BACKEND:
        y, last = scan_traced.scan(x, delta, A, B, C)
    else:
        none = (None, None, None, None)
        y, last, _, _ = differentiable_scan(x, delta, A, B, C, *none, False, False, "forward", 1, dtype, backend)
    y = y.flip(1) if reverse else y
    y = y if D is None else torch.addcmul(y, D, u)
    y = y if z is None else y * F.silu(z)
    y = y.to(out_dtype)
    if backend == scan_traced.BACKEND:
        return y, last
    return (y.mT.contiguous().mT if _time_last(given) else y.contiguous()), last


def _time_last(x: Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(2) != 1


def scan_low_rank(
    u: Tensor,
    dt: Tensor,
    dt_proj: nn.Linear,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    backend: str = "auto",
    *,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """`scan_tokens` with softplus(dt_proj(dt)) for delta. One kernel computes it; a `dt_proj` that is not a plain
    linear layer is called instead."""
    weight = dt_proj.weight
    direct = not torch.compiler.is_compiling() and is_plain(dt_proj)
    direct = direct and weight.dtype == torch.float32 and weight.device == u.device  # what the kernel multiplies by
    direct = direct and weight.shape == (u.shape[-1], dt.shape[-1])
    dtype = _common_dtype(u, A_log, B, C)
    if direct and B.shape[2] == C.shape[2] and chosen_backend(u, A_log, backend, dtype) == "triton":
        order = "reverse" if reverse else "forward"
        y, last, _, _ = differentiable_scan(
            *(u, dt, A_log.float(), B, C, None, None, dt_proj.bias, weight),
            *(True, True, order, 1, torch.float32, "triton"),
        )
        return y, last
    delta = dt_proj(dt.to(weight.dtype))
    delta = delta.to(torch.promote_types(torch.float32, delta.dtype))
    return scan_tokens(u, delta, A_log, B, C, backend, log_A=True, softplus=True, reverse=reverse)


def scans_by_kernel(u: Tensor, A: Tensor) -> bool:
    """Whether backend="auto" scans u with a Triton kernel."""
    return chosen_backend(u, A, dtype=_common_dtype(u, A)) == "triton"


def chosen_backend(
    u: Tensor, A: Tensor, backend: str = "auto", dtype: torch.dtype = torch.float32, groups: int = 1
) -> str:
    """The backend for these inputs, computed in `dtype`: the caller's choice, then the environment's, then the fastest
    that supports them. The number of groups of B and C decides which is faster on a CPU."""
    if scan_traced.active():
        return scan_traced.BACKEND
    states = A.shape[1]
    on_gpu = dtype == torch.float32 and states <= scan_triton.MOST_STATES
    on_cpu = cpu.supports(u, dtype, states)
    if backend == "auto":
        backend = os.environ.get(ENVIRONMENT_VARIABLE, "auto")
    if backend == "auto":
        if on_gpu and u.is_cuda and switch.takes_kernel(u, "auto"):
            return "triton"
        return "native" if on_cpu and cpu.suits(A.shape[0], groups) else "torch"
    if backend == "native" and not on_cpu:
        raise UserError(
            f"The scan backend 'native' needs the compiled kernel, CPU tensors and at most {cpu.MOST_STATES} "
            "states; use backend='torch', or reinstall mambacl with a C++ compiler on the PATH."
        )
    if backend == "triton" and not (on_gpu and switch.takes_kernel(u, "triton")):
        raise UserError(
            f"The scan backend 'triton' needs CUDA tensors below float64 and at most {scan_triton.MOST_STATES} states; "
            "use backend='torch'."
        )
    if backend not in ("reference", "torch", "native", "triton"):
        names = ", ".join(available_backends())
        raise UserError(f"There is no scan backend '{backend}'; choose one of {names}.")
    return backend


def _goes_as_given(inputs: tuple[Tensor | None, ...], dtype: torch.dtype) -> bool:
    """Whether the compiled kernel can take the inputs of `selective_scan` as they are, because no gradients are wanted.
    What Python does around a short scan takes a noticeable part of its time."""
    for x in inputs:
        if x is not None and x.dtype != dtype:
            return False
    return not wants_gradient(inputs) and is_direct(inputs)


def _common_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype to compute in: float32, or float64 if an input is float64."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor is not None and tensor.dtype != dtype:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _in_dtype(x, dtype):  # type: ignore[no-untyped-def]
    """x, converted if it has another dtype; `Tensor.to` takes a microsecond even if there is nothing to do."""
    return x if x is None or x.dtype == dtype else x.to(dtype)


def _same_groups(B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """B and C (b, l, g, n) with the same number of groups, which backends need."""
    if B.shape[2] == C.shape[2]:
        return B, C
    groups = math.lcm(B.shape[2], C.shape[2])
    B, C = (M if M.shape[2] == groups else M.repeat_interleave(groups // M.shape[2], dim=2) for M in (B, C))
    return B, C


def _tokens_first(M: Tensor, u: Tensor) -> Tensor:
    """B or C as (b, l, g, n)."""
    if M.dim() == 2:  # constant in time: one group per channel
        return M.expand(u.shape[0], u.shape[2], -1, -1)
    return M.mT.unsqueeze(2) if M.dim() == 3 else M.permute(0, 3, 1, 2)


def _check_shapes(u, delta, A, B, C, D, z, delta_bias) -> list[int]:  # type: ignore[no-untyped-def]
    """Returns the numbers of groups of B and C."""
    if u.dim() != 3 or A.dim() != 2:
        raise UserError(f"selective_scan takes u (b, d, l) and A (d, n), got {tuple(u.shape)} and {tuple(A.shape)}.")
    of_u = batch, channels, length = u.shape
    n = A.shape[1]
    if length == 0 or batch == 0:
        raise UserError(f"selective_scan needs at least one image and one token, got u of shape {tuple(u.shape)}.")
    found = []
    for name, M in (("B", B), ("C", C)):
        shape = M.shape
        dims = len(shape)
        groups = shape[1] if dims == 4 else max(1, channels) if dims == 2 else 1
        wanted = (batch, n, length) if dims == 3 else (batch, groups, n, length) if dims == 4 else (channels, n)
        if shape != wanted or channels % groups:
            raise UserError(
                f"selective_scan takes {name} as (d, n), (b, n, l) or (b, g, n, l) with b={batch}, d={channels}, "
                f"n={n}, l={length} and g a divisor of d, got {tuple(shape)}."
            )
        found.append(groups)
    of_channels = (channels,)
    for name, tensor, needed in (
        ("delta", delta, of_u),
        ("A", A, (channels, n)),
        ("D", D, of_channels),
        ("z", z, of_u),
        ("delta_bias", delta_bias, of_channels),
    ):
        if tensor is not None and tensor.shape != needed:
            raise UserError(f"selective_scan takes {name} of shape {tuple(needed)}, got {tuple(tensor.shape)}.")
    return found
