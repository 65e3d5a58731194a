"""The selective scan and the operators around it: one file per operator, with its plain twin.

`kernels` holds the Triton kernels for NVIDIA GPUs, `cpu` the C++ code. Operators compute in float32, or in float64 if
an input is float64. `backend="auto"` uses the kernel if it can run (`ops.switch`), otherwise the plain twin.
"""

from mambacl.ops import switch
from mambacl.ops.conv import causal_conv_silu
from mambacl.ops.cross import scan_map
from mambacl.ops.gate import gated_group_norm, skip_gate
from mambacl.ops.linear import split_linear
from mambacl.ops.norm import rms_norm
from mambacl.ops.rotary import rotate
from mambacl.ops.scan import available_backends, scan_low_rank, scan_tokens, scans_by_kernel, selective_scan
from mambacl.ops.scan_reference import selective_scan_reference

__all__ = [
    "available_backends", "causal_conv_silu", "gated_group_norm", "rms_norm", "rotate", "scan_low_rank", "scan_map",
    "scan_tokens", "scans_by_kernel", "selective_scan", "selective_scan_reference", "skip_gate", "split_linear",
    "switch",
]  # fmt: skip
