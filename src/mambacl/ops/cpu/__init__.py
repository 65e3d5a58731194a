"""The selective scan on the CPU: a C++ library, if the package was built with it, called through ctypes.

Shapes: u, delta, z (b, l, d); A (d, n); B, C (b, l, g, n); D, bias (d,); all of one dtype, float32 or float64. u,
delta, z and the gradient of the output are read in place, with any strides.
"""

import ctypes
import functools
import os
import struct
from pathlib import Path

import torch
from torch import Tensor

from mambacl.errors import UserError
from mambacl.ops.scan_tiles import out_like

ENVIRONMENT_VARIABLE = "MAMBACL_CPU"  # selects an instruction set
TILE = 16  # time steps between kept states, as in problem.h
MOST_STATES = 256
SETS = {"avx512": 2, "avx2": 1, "neon": 3, "baseline": 0}  # numbers as in scan.cpp, fastest first
FAILURES = {
    1: "the compiled scan lacks this instruction set, or this CPU does",
    2: f"the compiled scan supports 1 to {MOST_STATES} states",
    3: "the compiled scan ran out of memory",
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled library, or None if the package was built without it."""
    for path in sorted(Path(__file__).parent.glob("_scan*")):
        if path.suffix in (".so", ".pyd", ".dylib"):
            try:
                found = ctypes.CDLL(str(path))
            except OSError:  # built for another machine
                continue
            for function in (found.mambacl_scan_f32, found.mambacl_scan_f64):
                function.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int] * 2 + [ctypes.c_void_p]
            return found
    return None


def built() -> bool:
    return library() is not None


built._dynamo_marked_constant = True  # type: ignore[attr-defined]  # `assume_constant_result` imports all of the compiler


def supports(u: Tensor, dtype: torch.dtype, states: int) -> bool:
    fits = u.is_cpu and dtype in (torch.float32, torch.float64) and states <= MOST_STATES
    return fits and built()


def suits(channels: int, groups: int) -> bool:
    """Whether this is likely faster than the backend `torch`. With one channel per group (B and C constant in time), a
    vector holds a single number, and it can be slower."""
    return groups < channels or channels == 1


@functools.cache
def _available() -> dict[str, int]:
    found = library()
    return {} if found is None else {name: number for name, number in SETS.items() if found.mambacl_scan_has(number)}


def instruction_sets() -> list[str]:
    """The instruction sets that the library was compiled for and this machine supports, fastest first."""
    return list(_available())


def instruction_set() -> str:
    """The instruction set in use: the fastest, or the one that the environment names."""
    available = _available()
    name = os.environ.get(ENVIRONMENT_VARIABLE)
    if not name:
        return next(iter(available))
    if name not in available:
        names = ", ".join(available) or "none: the package was built without the compiled scan"
        raise UserError(f"{ENVIRONMENT_VARIABLE}={name} does not run here; unset it or choose one of: {names}.")
    return name


def kept_shape(u: Tensor, A: Tensor, B: Tensor) -> tuple[int, ...]:
    """Shape of the states that the forward keeps for the backward, (b, tiles, n, d)."""
    return u.shape[0], -(-u.shape[1] // TILE), A.shape[1], u.shape[2]


def forward(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    bias: Tensor | None = None, *, log_A: bool = False, softplus: bool = False, reverse: bool = False,
    keep: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the output laid out like u, the last state (b, d, n) and, if `keep`, the states for the backward.

    dt = delta + bias, or its softplus; h_t = exp(dt_t A) h_{t-1} + dt_t u_t B_t;
    y_t = <C_t, h_t> + D u_t; out = y silu(z). `log_A`: A holds log(-A). `reverse`: scan from the last token to the
    first.
    """
    kept = u.new_empty(kept_shape(u, A, B) if keep else 0)
    out, last = _forward(u, delta, A, B, C, D, z, bias, log_A, softplus, reverse, kept if keep else None)
    return out, last, kept


def infer(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, bias: Tensor | None,
    log_A: bool, softplus: bool, reverse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`forward` for callers that want no gradients."""
    return _forward(u, delta, A, B, C, D, z, bias, log_A, softplus, reverse, None)


def infer_channels_first(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, bias: Tensor | None,
    softplus: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`infer` for u, delta, z (b, d, l) and B, C (b, n, l) or (b, g, n, l). The views that turn them take
    noticeable time beside a short scan."""
    return _forward(u, delta, A, B, C, D, z, bias, False, softplus, False, None, True)


def _forward(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, bias: Tensor | None,
    log_A: bool, softplus: bool, reverse: bool, kept: Tensor | None, channels_first: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if channels_first:
        out = u.new_empty(u.shape) if u.stride(2) == 1 != u.stride(1) else out_like(u.mT).mT
    else:
        out = out_like(u)
    last = u.new_empty((u.shape[0], *A.shape))
    call = _Call(u, delta, A, B, C, D, z, bias, log_A, softplus, reverse, kept, channels_first)
    call.views(u, delta, z, None)
    call.pointers.append(last.data_ptr())
    call.views(out)
    call.run()
    return out, last


def backward(
    dout: Tensor, dlast: Tensor | None, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
    z: Tensor | None, bias: Tensor | None, kept: Tensor, *, log_A: bool = False, softplus: bool = False,
    reverse: bool = False, need_A: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of u, delta, A, B, C, D, z and bias; None for inputs that are None. Those of u, delta and z have the
    inputs' layouts."""
    du, ddelta, dz = out_like(u), out_like(delta), None if z is None else out_like(z)
    dA = A.new_empty(A.shape) if need_A else None
    dB, dC = B.new_empty(B.shape), C.new_empty(C.shape)
    dD, dbias = (None if x is None else x.new_empty(x.shape) for x in (D, bias))
    dlast = None if dlast is None else dlast.contiguous()
    call = _Call(u, delta, A, B, C, D, z, bias, log_A, softplus, reverse, kept)
    call.views(u, delta, z, dout)
    call.pointers += [_address(x) for x in (dlast, dA, dB, dC, dD, dbias)]
    call.views(du, ddelta, dz)
    call.run()
    return du, ddelta, dA, dB, dC, dD, dz, dbias


class _Call:
    """The arguments of one call, in the order that `call` in scan.cpp reads them."""

    def __init__(
        self, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
        bias: Tensor | None, log_A: bool, softplus: bool, reverse: bool, kept: Tensor | None,
        channels_first: bool = False,
    ) -> None:  # fmt: skip
        D, bias = _contiguous(D), _contiguous(bias)
        self.double = u.dtype == torch.float64
        self.channels_first = channels_first
        self.kept_alive = D, bias
        self.pointers = [A.data_ptr(), B.data_ptr(), C.data_ptr(), _address(D), _address(bias), _address(kept)]
        if channels_first:
            batch, channels, length = u.shape
            groups, states = B.shape[1] if B.dim() == 4 else 1, A.shape[1]
            of_B, of_C = _shared(B), _shared(C)
        else:
            (batch, length, channels), (groups, states) = u.shape, B.shape[2:]
            of_B, of_C = B.stride(), C.stride()
        self.numbers: list[int] = [batch, length, channels, groups, states, log_A, softplus, reverse]
        self.numbers += (*A.stride(), *of_B, *of_C)

    def views(self, *tensors: Tensor | None) -> None:
        for x in tensors:
            self.pointers.append(0 if x is None else x.data_ptr())
            self.numbers += (0, 0, 0) if x is None else _turned(x) if self.channels_first else x.stride()

    def run(self) -> None:
        found = library()
        assert found is not None
        function = found.mambacl_scan_f64 if self.double else found.mambacl_scan_f32
        pointers = struct.pack(f"{len(self.pointers)}P", *self.pointers)
        numbers = struct.pack(f"{len(self.numbers)}q", *self.numbers)
        failure = function(pointers, numbers, SETS[instruction_set()], torch.get_num_threads(), _parallel())
        if failure:
            raise RuntimeError(FAILURES[failure])


def _contiguous(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.stride(0) == 1 else x.contiguous()


def _turned(x: Tensor) -> tuple[int, ...]:
    """The strides of (b, d, l) in the order (b, l, d)."""
    batch, channel, time = x.stride()
    return batch, time, channel


def _shared(M: Tensor) -> tuple[int, ...]:
    """The strides of (b, n, l) or (b, g, n, l) in the order (b, l, g, n)."""
    batch, *group, state, time = M.stride()
    return batch, time, *(group or (0,)), state


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


@functools.cache
def _parallel() -> int | None:
    """The address of GOMP_parallel in PyTorch's OpenMP library, so that the scan runs on PyTorch's threads."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return ctypes.cast(ctypes.CDLL(str(path)).GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):  # not Linux, or PyTorch without OpenMP
        return None
