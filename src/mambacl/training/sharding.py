"""FSDP2: each process keeps a part of the backbone's weights, and has a block's whole weights only while it runs."""

import warnings

import torch
from torch import nn

from mambacl import processes
from mambacl.config import RunConfig
from mambacl.errors import UserError
from mambacl.methods import Method
from mambacl.tuning.recomputing import blocks_of

ENTRANCES = ("forward_features", "forward_intermediates", "forward_head", "run_depths", "final_norm")  # and `forward`


def shards(config: RunConfig) -> bool:
    """Whether this run cuts its weights. A single process keeps them whole."""
    return config.shard and processes.count() > 1


def cut(model: nn.Module, device: torch.device) -> None:
    """Moves the parameters of each block to the device and cuts them along their first axis, then those of the rest
    together: a GPU never holds the whole model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # features do not change in place
    mesh = init_device_mesh(device.type, (processes.count(),))
    for module in (*blocks_of(model), model):
        fully_shard(module, mesh=mesh)
    for name in ENTRANCES:
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)


def check_sharded(method: Method) -> None:
    """Refuses a method that does not work with parameters that are cut."""
    if not method.takes_shards:
        raise UserError(f"The method '{method.name}' needs whole weights in every process: leave out --shard.")
