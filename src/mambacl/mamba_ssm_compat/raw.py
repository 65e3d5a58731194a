"""The interface of the compiled modules, below autograd: what mamba-ssm and VMamba call `selective_scan_cuda`.

`fwd` returns the output, and a tensor x from which callers read the last state as x[:, :, -1, 1::2]. `bwd` recomputes
the forward and differentiates it.
"""

from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from mambacl.mamba_ssm_compat.scan import selective_scan_fn

Tensors = list[Tensor | None]


def _forward(u, delta, A, B, C, D, delta_bias, delta_softplus, dtype):  # type: ignore[no-untyped-def]
    with torch.no_grad():
        out, last = selective_scan_fn(u.to(dtype), delta, A, B, C, D, None, delta_bias, delta_softplus, True)
        return out, torch.stack((torch.zeros_like(last), last), dim=-1).flatten(-2).unsqueeze(2)  # (b, d, 1, 2 n)


def _backward(inputs: dict[str, Tensor | None], dout: Tensor, delta_softplus: bool) -> tuple[Tensors, Tensor]:
    """The gradients of the inputs, in their dtypes (None for inputs that are None), and the output."""
    with torch.enable_grad():
        leaves = {name: None if M is None else M.detach().requires_grad_() for name, M in inputs.items()}
        u = leaves["u"]
        assert u is not None
        out = selective_scan_fn(**{**leaves, "u": u.to(dout.dtype)}, delta_softplus=delta_softplus)  # type: ignore[arg-type]
        assert isinstance(out, Tensor)
        found = iter(torch.autograd.grad(out, [M for M in leaves.values() if M is not None], dout))
    return [None if M is None else next(found) for M in leaves.values()], out.detach()


def _fwd(u, delta, A, B, C, D, z, delta_bias, delta_softplus):  # type: ignore[no-untyped-def]
    out, x = _forward(u, delta, A, B, C, D, delta_bias, delta_softplus, u.dtype)
    if z is None:
        return [out, x]
    wide = torch.promote_types(torch.float32, u.dtype)
    return [out, x, (out.to(wide) * F.silu(z.detach().to(wide))).to(u.dtype)]


def _bwd(u, delta, A, B, C, D, z, delta_bias, dout, x, out, dz, delta_softplus, recompute_out_z):  # type: ignore[no-untyped-def]
    inputs = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "delta_bias": delta_bias, "z": z}
    found, out_z = _backward(inputs, dout, delta_softplus)
    if z is None:
        found.pop()
    elif dz is not None:  # the caller's memory, e.g. half of a larger gradient
        found[-1] = dz.copy_(found[-1])
    return [*found, out_z] if recompute_out_z else found


def _fwd_oflex(u, delta, A, B, C, D, delta_bias, delta_softplus, nrows=1, out_float=True):  # type: ignore[no-untyped-def]
    dtype = torch.promote_types(torch.float32, u.dtype) if out_float else u.dtype
    return list(_forward(u, delta, A, B, C, D, delta_bias, delta_softplus, dtype))


def _bwd_core(u, delta, A, B, C, D, delta_bias, dout, x, delta_softplus, nrows=1):  # type: ignore[no-untyped-def]
    inputs = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "delta_bias": delta_bias}
    return _backward(inputs, dout, delta_softplus)[0]


selective_scan_cuda = SimpleNamespace(fwd=_fwd, bwd=_bwd)
selective_scan_cuda_core = SimpleNamespace(fwd=partial(_fwd_oflex, out_float=False), bwd=_bwd_core)
selective_scan_cuda_oflex = SimpleNamespace(fwd=_fwd_oflex, bwd=_bwd_core)
