"""Models that FSDP2 has cut over 2 and 3 processes: covariances, projected updates and energies are those of the whole
model in one process, in float64 to 1e-10. What the caller has wrapped otherwise is accepted, too."""

import copy

import pytest
import torch
from block_models import PlainMamba, build, output
from processes import RankError, on_ranks, outcomes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from mambacl import processes
from mambacl.errors import UserError
from mambacl.nullspace import NullSpace

LIMIT = 1e-10
CALLED = ("conv1d", "x_proj", "out_proj")  # layers of a block that it does not use by their weights
SETTINGS = {
    "paper": {"setting": "paper", "rank": "energy:0.9"},
    "public-code": {"setting": "public-code", "rank": "energy:0.9"},
    "exact": {"setting": "exact", "rank": "energy:0.99", "relax": 0.02},
    "every layer": {"setting": "exact", "rank": "energy:0.95", "layers": "all", "A": {"feature": "delta"}},
}
SYSTEMS = {
    "gpm": {"rule": "gpm", "rank": "energy:0.9", "conv": {"trains": True}},
    "owm": {"rule": "owm", "conv": {"trains": True}},
    "osf": {"rule": "osf"},
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


def cut(model, how="blocks"):
    """By block, or also every layer that its block calls by itself; or only the first block."""
    modules = {
        "blocks": (model[0], model[4]),
        "layers": [m for name, m in model.named_modules() if name.endswith(CALLED)],
    }
    for module in modules.get(how, (model[0],)):
        if list(module.parameters()):
            fully_shard(module)
    return model if how == "one block" else fully_shard(model)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def own(batch):
    return batch[processes.part(len(batch))]


def trained(model, space, optimizer, steps=3, share=own):
    """Steps on all images; each process has its part of them."""
    for step in range(steps):
        optimizer.zero_grad()
        model(share(images(100 + step))).square().mean().backward()
        optimizer.step()


def two_tasks(name, kind, how=None, parts=1, built="before"):
    """Everything that training and consolidating two tasks gives. `how` the model is cut, and whether the null space is
    built before that or after it."""
    model = small_model()
    if how and built == "after":
        cut(model, how)
    space = NullSpace(model, **{**SETTINGS, **SYSTEMS}[name])
    if how and built == "before":
        cut(model, how)
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
    trained(model, space, optimizer, 1)  # counting goes on
    found["later"] = space.update_energy()
    found["again"] = space.update_energy()  # reading it changes nothing
    found["step"] = dict(space.projected_step.state_dict())
    found["model"] = {name: whole(p).detach().clone() for name, p in model.named_parameters()}
    found["space"] = space.state_dict()
    return found


def same(actual, expected, limit=LIMIT):
    """Relative to the largest value; where everything is protected, only rounding is left."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        if isinstance(tensor, dict):
            same(actual[name], tensor, limit)
        elif name.endswith(".basis"):  # a basis has signs and rotations of its own
            assert actual[name].shape == tensor.shape
        else:
            scale = tensor.double().abs().max().item()
            difference = (actual[name].double() - tensor.double()).abs().max().item()
            assert difference <= limit * max(scale, 1e-5), (name, difference, scale)


def all_cases(processes):
    cases = [(name, kind) for name in SETTINGS for kind in OPTIMIZERS] + [(name, "SGD") for name in SYSTEMS]
    return {(name, kind): two_tasks(name, kind, "blocks", processes) for name, kind in cases}


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.long)])
def test_as_one_process(processes):
    first, *others = on_ranks(processes, all_cases, processes)
    for (name, kind), found in first.items():
        same(found, two_tasks(name, kind, parts=processes))
        for other in others:
            same(other[name, kind], found)


# Ways to cut


def other_ways():
    cases = [("every layer", "layers", "before"), ("paper", "layers", "after"), ("exact", "blocks", "after")]
    return {case: two_tasks(case[0], "Adam", *case[1:2], 2, case[2]) for case in cases}


@pytest.mark.slow
def test_every_layer_cut_by_itself_and_a_space_built_afterwards():
    first, second = on_ranks(2, other_ways)
    for case, found in first.items():
        same(found, two_tasks(case[0], "Adam", parts=2))
        same(second[case], found)


def one_block_cut():
    """Gradients of what is not cut are summed by hand."""
    model = small_model()
    space = NullSpace(model, "exact", rank="energy:0.9", layers="all")
    cut(model, "one block")
    space.consolidate([own(images(0))])
    optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=0.05))
    for step in range(2):
        optimizer.zero_grad()
        model(own(images(100 + step))).square().mean().backward()
        for parameter in model.parameters():
            if parameter.grad is not None and not hasattr(parameter, "full_tensor"):
                processes.sum_([parameter.grad])
                parameter.grad /= processes.count()
        optimizer.step()
    return {"energy": space.update_energy(), "model": {n: whole(p).detach() for n, p in model.named_parameters()}}


@pytest.mark.slow
def test_a_model_of_which_one_block_is_cut():
    model = small_model()
    space = NullSpace(model, "exact", rank="energy:0.9", layers="all")
    space.consolidate([images(0)])
    optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=0.05))
    trained(model, space, optimizer, 2)
    expected = {"energy": space.update_energy(), "model": {n: p.detach() for n, p in model.named_parameters()}}
    for found in on_ranks(2, one_block_cut):
        same(found, expected)


# States and the audit


def resumed(state):
    """Half of the steps on the whole model, in one process; then on the cut one."""
    model = small_model()
    model.load_state_dict(state["model"])
    space = NullSpace(model, "exact", rank="energy:0.9", relax=0.02)
    cut(model)
    space.load_state_dict(state["space"])
    space.projected_step.load_state_dict(state["step"])
    found = {"loaded": space.state_dict(), "step": copy.deepcopy(space.projected_step.state_dict())}
    recorded = space.record(images(0))
    found["drift"] = space.audit(images(0), recorded)
    trained(model, space, space.wrap(torch.optim.SGD(space.parameters(), lr=0.05)), 2)
    found["energy"], found["later"] = space.update_energy(), space.audit(images(0), recorded)
    space.consolidate([own(images(1))])
    found["model"] = {name: whole(p).detach() for name, p in model.named_parameters()}
    return found


@pytest.mark.slow
def test_states_are_the_same_for_whole_and_cut_models(tmp_path):
    model = small_model()
    space = NullSpace(model, "exact", rank="energy:0.9", relax=0.02)
    space.consolidate([images(0)])
    optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=0.05))
    trained(model, space, optimizer, 2)
    state = {"model": copy.deepcopy(model.state_dict()), "space": space.state_dict(),
             "step": {name: t.clone() for name, t in space.projected_step.state_dict().items()}}  # fmt: skip
    recorded = space.record(images(0))
    trained(model, space, optimizer, 2)
    drift = space.audit(images(0), recorded)
    for found in on_ranks(2, resumed, state):
        assert all(torch.equal(tensor, state["space"][name]) for name, tensor in found["loaded"].items())
        assert all(torch.equal(tensor, state["step"][name]) for name, tensor in found["step"].items())
        assert all(value == 0.0 for block in found["drift"].values() for value in block.values())
        same(found["energy"], space.update_energy())
        same(found["model"], {name: p.detach() for name, p in model.named_parameters()})
        for block, quantities in drift.items():
            assert found["later"][block] == pytest.approx(quantities, rel=1e-6)


# Wrappers


def as_accelerate_does():
    """Accelerate's FSDP2 cuts the model after the optimizer was built, and gives it the new parameters by name."""
    model = small_model()
    space = NullSpace(model, "exact", rank="energy:0.9")
    optimizer = space.wrap(torch.optim.Adam(space.parameters(), lr=0.01))
    names = {id(p): name for name, p in model.named_parameters()}
    places = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    cut(model)
    named = dict(model.named_parameters())
    for group, some in zip(optimizer.param_groups, places, strict=True):
        group["params"] = [named[name] for name in some]
    wrapper = PassesOn(optimizer)
    assert space.wrap(wrapper) is wrapper
    for task in range(2):
        trained(model, space, wrapper)
        space.consolidate([own(images(task))])
        assert all(hasattr(p, "full_tensor") for p in space.parameters())
    trained(model, space, wrapper)
    return {"energy": space.update_energy(), "model": {n: whole(p).detach() for n, p in model.named_parameters()}}


class PassesOn(torch.optim.Optimizer):
    """A wrapper without hooks of its own, as Accelerate's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()


@pytest.mark.slow
def test_parameters_that_are_replaced_are_found_by_name():
    model = small_model()
    space = NullSpace(model, "exact", rank="energy:0.9")
    optimizer = space.wrap(torch.optim.Adam(space.parameters(), lr=0.01))
    for task in range(2):
        trained(model, space, optimizer)
        space.consolidate([images(task)])
    trained(model, space, optimizer)
    expected = {"energy": space.update_energy(), "model": {n: p.detach() for n, p in model.named_parameters()}}
    for found in on_ranks(2, as_accelerate_does):
        same(found, expected)


def of_another_kind(name, sharded):
    """The change of a model's parameters by one step, and the energies of its parts."""
    model, make, _ = build(name)
    old, new = (x.double() if x.is_floating_point() else x for x in (make(0, 4), make(1, 4)))
    model.double()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    if sharded:
        fully_shard(model)
    space = NullSpace(model, "exact", rank="tolerance:1e-9", layers="all")
    space.consolidate([own(old)])
    optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=10.0))
    output(model, own(new)).square().mean().backward()
    optimizer.step()
    changes = {n: whole(p).detach() - before[n] for n, p in model.named_parameters()}
    return {"energy": space.update_energy(), "changes": changes}


def other_kinds(names):
    found = {name: of_another_kind(name, True) for name in names}
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    fully_shard(model, shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1))
    space = NullSpace(model, rule="gpm")
    optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=1e-3))
    model(torch.randn(2, 6)).sum().backward()
    with pytest.raises(UserError, match="along their first axis"):
        optimizer.step()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [("defocus", "vmamba", "mambavision"), pytest.param(("vim", "Mamba2"), marks=pytest.mark.long)], ids=str
)
def test_blocks_of_every_kind(names):
    expected = {name: of_another_kind(name, False) for name in names}
    for found in on_ranks(2, other_kinds, names):
        same(found, expected, 1e-5)  # some of their layers compute in float32


def cut_in_copies(count):
    """Two copies of the model, each cut over two processes."""
    model = small_model()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "cut"))
    fully_shard(model, mesh=mesh)
    return one_task(model, count)


def one_task(model, count):
    space = NullSpace(model, "paper", rank="energy:0.9", layers="all")
    space.consolidate([own(images(0, count))])
    optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=0.05))
    for step in range(2):
        optimizer.zero_grad()
        model(own(images(100 + step, count))).square().mean().backward()
        optimizer.step()
    return {"energy": space.update_energy(), "model": {n: whole(p).detach() for n, p in model.named_parameters()}}


def cut_alone(count):
    return one_task(cut(small_model()), count)


@pytest.mark.slow
def test_a_single_process_that_holds_all_rows():
    same(on_ranks(1, cut_alone, 8)[0], one_task(small_model(), 8))


@pytest.mark.slow
def test_a_model_in_copies_that_are_cut():
    expected = one_task(small_model(), 8)
    for found in on_ranks(4, cut_in_copies, 8):
        same(found, expected)


def test_flat_parameters_are_refused():
    class FullyShardedDataParallel(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)

    with pytest.raises(UserError, match="fully_shard"):
        NullSpace(nn.Sequential(FullyShardedDataParallel()), rule="gpm")


def failing_in_a_pass():
    space = NullSpace(cut(small_model()), "exact", rank="energy:0.9")

    def batches():
        yield images(0)
        if processes.rank() == 1:
            raise OSError("the disk is gone")
        yield images(1)

    space.consolidate(batches())


@pytest.mark.slow
def test_a_process_that_fails_in_a_pass_says_why_and_the_others_end():
    """The others wait for it inside the model, where nothing else can be exchanged."""
    first, second = outcomes(2, failing_in_a_pass, timeout=60)
    assert isinstance(first, RankError) and isinstance(second, RankError)
    assert isinstance(second.error, OSError) and str(second.error) == "the disk is gone"
