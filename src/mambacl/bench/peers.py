"""Other implementations of the selective scan, each called as its users call it, with its best settings.

If one is not installed, it is skipped, and a line says how to install it.
"""
# mypy: disable-error-code="import-not-found, import-untyped"

import ctypes
import importlib.util
import inspect
import shutil
import subprocess
import tempfile
import timeit
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mambacl.bench import graphs
from mambacl.bench.shapes import Problem
from mambacl.errors import UserError
from mambacl.ops import selective_scan

Call = Callable[[], Tensor]
INPUTS = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
ENGINE_TRIALS = 5  # calls of each variant of a graph
PLAIN_STEPS = 256  # on a GPU, systems that launch kernels for each step are too slow for longer scans


@dataclass(frozen=True)
class Peer:
    name: str
    prepare: Callable[[Problem, int], Call]
    """makes the call to time, for a problem and a number of threads; with gradients if `differentiable`"""
    install: str = ""
    modules: tuple[str, ...] = ()
    package: str | None = None
    """the package whose version to record"""
    devices: tuple[str, ...] = ("cpu",)
    differentiable: bool = False
    plain: bool = False
    """whether it launches at least one kernel per step, in float32 and without groups"""
    one_group: bool = True
    compiler: str = ""
    """the program that compiles it when it is called"""

    def installed(self) -> bool:
        found = all(importlib.util.find_spec(module) is not None for module in self.modules)
        return found and (not self.compiler or shutil.which(self.compiler) is not None)

    def version(self) -> str:
        if self.compiler:
            command = [self.compiler, "-dumpfullversion", "-dumpversion"]
            found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
            return f"{self.compiler} {found or 'of unknown version'}"
        try:
            return version(self.package) if self.package else "unknown"
        except PackageNotFoundError:
            return "unknown"

    def suits(self, problem: Problem) -> bool:
        on_gpu = problem.device.type == "cuda"
        if problem.device.type not in self.devices or (self.one_group and problem.shape.groups > 1):
            return False
        slow = self.plain and on_gpu and problem.shape.length > PLAIN_STEPS
        return not slow and (problem.dtype == torch.float32 or (on_gpu and not self.plain))


def ours(problem: Problem, threads: int) -> Call:
    function: Callable[..., Tensor] = selective_scan  # type: ignore[assignment]
    return lambda: function(**problem.inputs, delta_softplus=True)


def mamba_ssm(problem: Problem, threads: int) -> Call:
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    return lambda: selective_scan_fn(**problem.inputs, delta_softplus=True)


class _OflexScan(torch.autograd.Function):
    """Adds autograd to VMamba's extension, which has none. Its output has the type of u, like all others'."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, bias: Tensor) -> Tensor:
        import selective_scan_cuda_oflex as kernel

        y, states, *_ = kernel.fwd(u, delta, A, B, C, D, bias, True, 1, False)
        ctx.save_for_backward(u, delta, A, B, C, D, bias, states)
        return y

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor, ...]:
        import selective_scan_cuda_oflex as kernel

        return tuple(kernel.bwd(*ctx.saved_tensors[:-1], dys[0].contiguous(), ctx.saved_tensors[-1], True, 1)[:7])


def vmamba(problem: Problem, threads: int) -> Call:
    given = problem.inputs
    u, delta, A, B, C, D, bias = (given[name] for name in ("u", "delta", "A", "B", "C", "D", "delta_bias"))
    if problem.shape.groups == 1:  # it always takes groups, and no z
        return lambda: _OflexScan.apply(u, delta, A, B[:, None], C[:, None], D, bias) * F.silu(given["z"])
    return lambda: _OflexScan.apply(u, delta, A, B, C, D, bias)


def transformers(problem: Problem, threads: int) -> Call:
    function = transformers_function()
    tensors = [problem.inputs[name] for name in INPUTS]
    return lambda: function(*tensors, delta_softplus=True)


def transformers_function() -> Callable[..., Tensor]:
    """The function that transformers uses without mamba-ssm. With it, mamba-ssm would be timed twice."""
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    return inspect.unwrap(mamba_selective_scan)


def mamba_py(problem: Problem, threads: int, method: str = "selective_scan") -> Call:
    """A call of a method of its block, which reads only the sizes from the block."""
    from mambapy.mamba import MambaBlock

    scan = getattr(MambaBlock, method)
    shape = problem.shape
    block = SimpleNamespace(config=SimpleNamespace(d_inner=shape.channels, d_state=shape.states))

    def call() -> Tensor:
        given = problem.inputs
        steps = F.softplus(given["delta"].mT + given["delta_bias"])
        y = scan(block, given["u"].mT, steps, given["A"], given["B"].mT, given["C"].mT, given["D"])
        return (y * F.silu(given["z"].mT)).mT

    return call


def onnx_runtime(problem: Problem, threads: int) -> Call:
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
    arrays, shape = _arrays(problem), problem.shape

    def made(variant: graphs.Variant) -> Call:
        graph = graphs.onnx_scan(shape, variant)
        session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        binding, y = session.io_binding(), torch.empty(shape.batch, shape.channels, shape.length)
        for name, array in arrays.items():
            binding.bind_cpu_input(name, array)
        binding.bind_output("y", "cpu", 0, np.float32, tuple(y.shape), y.data_ptr())

        def call() -> Tensor:
            session.run_with_iobinding(binding)
            return y

        return call

    return fastest(map(made, graphs.VARIANTS))


def openvino(problem: Problem, threads: int) -> Call:
    import openvino

    core, arrays = openvino.Core(), list(_arrays(problem).values())
    hints = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}

    def made(variant: graphs.Variant) -> Call:
        model = core.compile_model(graphs.openvino_scan(problem.shape, variant), "CPU", hints)
        request = model.create_infer_request()
        return lambda: torch.from_numpy(request.infer(arrays, share_inputs=True, share_outputs=True)[0])

    return fastest(map(made, graphs.VARIANTS))


def _arrays(problem: Problem) -> dict[str, Any]:
    given = {name: problem.inputs[name].detach() for name in graphs.input_shapes(problem.shape)}
    return {name: (x[:, None] if name in ("D", "delta_bias") else x).numpy() for name, x in given.items()}


def fastest(calls: Iterable[Call]) -> Call:
    """The fastest call, by the best of a few trials each."""

    def seconds(call: Call) -> float:
        call()
        return min(timeit.repeat(call, number=1, repeat=ENGINE_TRIALS))

    return min(list(calls), key=seconds)


# A plain loop in C shows what a compiler makes of the recurrence. It loops over channels, then time, then states, as
# ggml's `ssm_scan` does. With ggml's compiler flags it computes one exponential at a time; with relaxed arithmetic, GCC
# with glibc computes a vector of them.
C_COMPILER = "cc"
C_FLAGS = ("-O3", "-march=native", "-std=c11", "-shared", "-fPIC")
C_SOURCE = r"""
#include <math.h>
#include <stdlib.h>

static float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/* u, delta, z, y (b, d, l); A (d, n); B, C (b, n, l); D, bias (d). 1 where memory is short. */
int scan(const float *u, const float *delta, const float *A, const float *B, const float *C, const float *D,
         const float *z, const float *bias, float *y, long batch, long channels, long length, long states) {
    float *tokens = malloc(sizeof(float) * (2 * length * states + states));
    if (!tokens) return 1;
    float *b = tokens, *c = tokens + length * states, *h = tokens + 2 * length * states;
    for (long image = 0; image < batch; image++) {
        for (long n = 0; n < states; n++)
            for (long t = 0; t < length; t++) { /* states next to each other */
                b[t * states + n] = B[(image * states + n) * length + t];
                c[t * states + n] = C[(image * states + n) * length + t];
            }
        for (long d = 0; d < channels; d++) {
            const long row = (image * channels + d) * length;
            for (long n = 0; n < states; n++) h[n] = 0.0f;
            for (long t = 0; t < length; t++) {
                const float step = softplus(delta[row + t] + bias[d]), x = step * u[row + t];
                float sum = 0.0f;
                for (long n = 0; n < states; n++) {
                    const float state = h[n] * expf(step * A[d * states + n]) + x * b[t * states + n];
                    sum += state * c[t * states + n];
                    h[n] = state;
                }
                const float gate = z[row + t];
                y[row + t] = (sum + D[d] * u[row + t]) * gate / (1.0f + expf(-gate));
            }
        }
    }
    free(tokens);
    return 0;
}
"""


def compiled_loop(problem: Problem, threads: int, flags: Sequence[str] = C_FLAGS) -> Call:
    tensors = [problem.inputs[name].detach() for name in INPUTS]
    y = torch.empty_like(tensors[0])
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "scan.c", Path(folder) / "scan.so"
        source.write_text(C_SOURCE, encoding="utf-8")
        command = [C_COMPILER, *flags, str(source), "-o", str(library), "-lm"]
        subprocess.run(command, check=True, capture_output=True)
        scan = ctypes.CDLL(str(library)).scan  # it stays loaded after the file is deleted
    shape = problem.shape
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (*tensors, y)]
    sizes = [ctypes.c_long(size) for size in (shape.batch, shape.channels, shape.length, shape.states)]

    def call() -> Tensor:
        if scan(*pointers, *sizes) != 0:
            raise UserError("The loop in C ran out of memory: close other programs.")
        return y

    return call


BOTH = ("cpu", "cuda")
OURS = Peer("mambacl", ours, devices=BOTH, differentiable=True, package="mambacl", one_group=False)
PEERS: tuple[Peer, ...] = (
    Peer(
        "mamba-ssm", mamba_ssm, "MAMBA_KEEP_CUDA_BUILD=TRUE pip install mamba-ssm --no-build-isolation",
        ("mamba_ssm", "selective_scan_cuda"), "mamba-ssm", ("cuda",), True, one_group=False,
    ),
    Peer(
        "VMamba", vmamba, "pip install --no-build-isolation ./kernels/selective_scan in a clone of MzeroMiko/VMamba",
        ("selective_scan_cuda_oflex",), "selective-scan", ("cuda",), True, one_group=False,
    ),
    Peer("transformers", transformers, "pip install transformers", ("transformers",), "transformers", BOTH, True, True),
    Peer("mamba.py", mamba_py, "pip install mambapy", ("mambapy",), "mambapy", BOTH, True, True),
    Peer(
        "mamba.py sequential", partial(mamba_py, method="selective_scan_seq"), "pip install mambapy", ("mambapy",),
        "mambapy", BOTH, True, True,
    ),
    Peer("ONNX Runtime", onnx_runtime, "pip install onnx onnxruntime", ("onnx", "onnxruntime"), "onnxruntime"),
    Peer("OpenVINO", openvino, "pip install openvino", ("openvino",), "openvino"),
    Peer("loop in C", compiled_loop, "a C compiler named cc", compiler=C_COMPILER),
    Peer(
        "loop in C, -ffast-math", partial(compiled_loop, flags=(*C_FLAGS, "-ffast-math")), "a C compiler named cc",
        compiler=C_COMPILER,
    ),
)  # fmt: skip
