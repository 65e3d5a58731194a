"""Replacements for mamba-ssm and causal-conv1d, whose kernels need a CUDA toolchain to build: the same names,
arguments, shapes and results, with gradients, on CPU and GPU.

Importing this package has no side effects. `install()` makes the functions available under mamba-ssm's and
causal-conv1d's import names; `accelerate_transformers()` makes transformers' models call them.
"""

from mambacl.mamba_ssm_compat.block import Mamba
from mambacl.mamba_ssm_compat.conv import causal_conv1d_fn, causal_conv1d_update
from mambacl.mamba_ssm_compat.hugging_face import accelerate_transformers, restore_transformers
from mambacl.mamba_ssm_compat.names import install, installed, uninstall
from mambacl.mamba_ssm_compat.norms import RMSNorm, layer_norm_fn, rms_norm_fn
from mambacl.mamba_ssm_compat.scan import (
    bimamba_inner_fn,
    mamba_inner_fn,
    mamba_inner_fn_no_out_proj,
    selective_scan_fn,
    selective_state_update,
)

__all__ = [
    "Mamba",
    "RMSNorm",
    "accelerate_transformers",
    "bimamba_inner_fn",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "install",
    "installed",
    "layer_norm_fn",
    "mamba_inner_fn",
    "mamba_inner_fn_no_out_proj",
    "restore_transformers",
    "rms_norm_fn",
    "selective_scan_fn",
    "selective_state_update",
    "uninstall",
]
