"""Models that FSDP2 has cut over 2 and 3 processes: covariances, projected updates and energies are those of the whole
model in one process, in float64 to 1e-10."""

import pytest
import torch
from block_models import PlainMamba
from processes import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from mambacl import ranks
from mambacl.nullspace import NullSpace

LIMIT = 1e-10
SETTINGS = {
    "paper": {"setting": "paper", "rank": "energy:0.9"},
    "public-code": {"setting": "public-code", "rank": "energy:0.9"},
    "exact": {"setting": "exact", "rank": "energy:0.99", "relax": 0.02},
    "every layer": {"setting": "exact", "rank": "energy:0.95", "layers": "all", "A": {"feature": "delta"}},
}
OPTIMIZERS = {"Adam": torch.optim.Adam, "SGD": torch.optim.SGD}


def small_model(dtype=torch.float64):
    """Sizes that neither 2 nor 3 divide: 15 and 30 channels, a convolution with two channels per group."""
    torch.manual_seed(0)
    first, second = PlainMamba(15, 30, 5, 3), PlainMamba(15, 30, 5, 3)
    mixing = nn.Conv1d(8, 10, 3, padding=1, groups=2)  # over tokens: a shard ends within a group
    model = nn.Sequential(first, nn.LayerNorm(15), mixing, Tokens(), second)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj.weight" in name:
                parameter.normal_(std=0.3)
    return model.to(dtype).eval()


class Tokens(nn.Module):
    def forward(self, x):
        return x[:, :8]


def images(seed, count=6):
    return torch.randn(count, 8, 15, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cut(model):
    for module in (model[0], model[4]):
        fully_shard(module)
    return fully_shard(model)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def own(batch):
    return batch[ranks.part(len(batch))]


def trained(model, space, optimizer, steps=3, share=own):
    """Steps on all images; each process has its part of them."""
    for step in range(steps):
        optimizer.zero_grad()
        model(share(images(100 + step))).square().mean().backward()
        optimizer.step()


def two_tasks(name, kind, sharded, parts=1, when="before"):
    """Everything that training and consolidating two tasks gives."""
    model = small_model()
    if sharded and when == "after":
        cut(model)
    space = NullSpace(model, **SETTINGS[name])
    if sharded and when == "before":
        cut(model)
    options = {"lr": 0.01, "weight_decay": 0.01}
    found = {}
    for task in range(2):
        optimizer = space.wrap(OPTIMIZERS[kind](space.parameters(), **options))
        trained(model, space, optimizer)
        found[f"energy {task}"] = space.update_energy()
        space.consolidate(own(images(task)).split(6 // parts))
    optimizer = space.wrap(OPTIMIZERS[kind](space.parameters(), **options))
    trained(model, space, optimizer)
    found["energy"] = space.update_energy()
    found["again"] = space.update_energy()  # reading it changes nothing
    found["step"] = dict(space.projected_step.state_dict())
    found["model"] = {name: whole(p).detach().clone() for name, p in model.named_parameters()}
    found["space"] = space.state_dict()
    return found


def same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        if isinstance(tensor, dict):
            same(actual[name], tensor)
        elif name.endswith(".basis"):  # a basis has signs and rotations of its own
            assert actual[name].shape == tensor.shape
        else:
            scale = tensor.double().abs().max().item()
            difference = (actual[name].double() - tensor.double()).abs().max().item()
            assert difference <= LIMIT * max(scale, 1e-6), (name, difference, scale)


def all_cases(processes):
    return {(name, kind): two_tasks(name, kind, True, processes) for name in SETTINGS for kind in OPTIMIZERS}


@pytest.mark.parametrize("processes", [2, 3])
def test_as_one_process(processes):
    first, *others = on_ranks(processes, all_cases, processes)
    for (name, kind), found in first.items():
        same(found, two_tasks(name, kind, False, processes))
        for other in others:
            same(other[name, kind], found)
