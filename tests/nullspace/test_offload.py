"""Projectors in CPU memory and on disk: the same steps, bit for bit unless a stack is cut."""

import gc

import pytest
import torch
from block_models import build
from nullspace_help import images, set_random_gradients
from processes import on_ranks
from tasks_help import assert_same_protection, same, space_of
from test_fsdp import SETTINGS, two_tasks

from mambacl.errors import UserError
from mambacl.methods import METHODS, Setup
from mambacl.nullspace import NullSpace, Setting
from mambacl.nullspace.offload import Carrier

CPU = torch.device("cpu")


def steps(model, inputs, place, folder, **overrides):
    """Three steps of Adam between tasks; the values afterwards and the null space's state."""
    space = NullSpace(model, rank="fraction:0.7", projectors=place, folder=folder, **overrides)
    optimizer = space.wrap(torch.optim.Adam(space.parameters(), lr=1e-2))
    for task in range(2):
        space.consolidate([inputs(task, 3)])
        for step in range(3):
            set_random_gradients(model, 10 * task + step)
            optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, space


@pytest.mark.parametrize("name", ["defocus", "vmamba", "mambavision"])
@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("most", [1, 1 << 28])
def test_the_place_of_projectors_changes_nothing(name, place, most, tmp_path, monkeypatch):
    monkeypatch.setattr("mambacl.nullspace.projected_step.STACK_BYTES", most)
    found = []
    for where in ("device", place):
        model, inputs, _ = build(name)
        found.append(steps(model, inputs, where, tmp_path, layers="all"))
    (expected, usual), (values, space) = found
    for key, tensor in expected.items():  # products of a smaller stack can be rounded differently
        assert torch.equal(values[key], tensor) if most > 1 else torch.allclose(values[key], tensor, 0, 1e-5), key
    assert most == 1 or same(space.state_dict(), usual.state_dict())
    assert space.projected_step.nbytes() == usual.projected_step.nbytes()
    stacks = {id(c.bases): c.bases for c in space.projected_step.constraints if hasattr(c, "bases")}.values()
    assert all(stack.basis.device == CPU and stack.carrier is not None for stack in stacks)
    assert most > 1 or all(len(stack.basis) == 1 for stack in stacks)


def cut_model(place):
    """What two tasks give on a model that FSDP2 has cut."""
    SETTINGS["here"] = {**SETTINGS["every layer"], "projectors": place}
    return {name: found for name, found in two_tasks("here", "Adam", True, 2).items() if name in ("energy", "model")}


@pytest.mark.slow
def test_the_place_changes_no_bit_of_a_model_that_fsdp2_has_cut():
    """With projectors from the left, too."""
    (usual, _), (found, other) = (on_ranks(2, cut_model, place) for place in ("device", "cpu"))
    for name, tensor in usual["model"].items():
        assert torch.equal(found["model"][name], tensor) and torch.equal(other["model"][name], tensor), name
    assert same(found["energy"], usual["energy"])


def test_half_precision_can_be_elsewhere_too(tiny_model, tmp_path):
    found = [steps(tiny_model(), images_of, place, tmp_path, storage="bfloat16")[0] for place in ("device", "disk")]
    assert all(torch.equal(found[1][name], tensor) for name, tensor in found[0].items())


def images_of(seed, count=1):
    return images(count, seed=seed)


def test_files_go_with_the_space(tiny_model, tmp_path):
    space = space_of(tiny_model(), (0,), projectors="disk", folder=tmp_path)

    def files():
        return [path for path in tmp_path.rglob("*") if path.is_file()]

    held = files()
    assert sum(path.stat().st_size for path in held) == space.projected_step.nbytes()
    space.consolidate([images(seed=1)])
    gc.collect()
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == len(
        held
    )  # those of the first task are gone
    del space
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_a_state_goes_from_one_place_to_another(tiny_model, tmp_path):
    model = tiny_model()
    usual, elsewhere = space_of(model, range(2)), space_of(model, (), projectors="cpu")
    elsewhere.load_state_dict(usual.state_dict())
    assert_same_protection(elsewhere, usual)


def test_a_carrier_brings_what_was_added():
    carrier, tensors = Carrier(), [torch.full((2,), float(i)) for i in range(3)]
    assert [carrier.add(tensor) for tensor in tensors] == [0, 1, 2]
    assert [carrier.bring(number, CPU) is tensors[number] for number in (0, 1, 2, 0)] == [True] * 4


def test_steps_that_bring_projectors_are_not_recorded(tiny_model):
    assert METHODS.get("mamba-cl")(tiny_model(), Setup()).recordable
    assert not METHODS.get("mamba-cl")(tiny_model(), Setup(Setting(projectors="cpu"))).recordable


def test_recursive_projectors_stay_on_the_device(tiny_model):
    with pytest.raises(UserError, match="set projectors to device"):
        NullSpace(tiny_model(), rule="owm", projectors="cpu")
    with pytest.raises(UserError, match="set projectors to device"):
        METHODS.get("owm")(tiny_model(), Setup(Setting(projectors="disk")))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_on_a_gpu_they_come_and_go(place, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr("mambacl.nullspace.projected_step.STACK_BYTES", 1)
    found = [steps(tiny_model().cuda(), images_of, where, tmp_path)[0] for where in ("device", place)]
    assert all(torch.equal(found[1][name], tensor) for name, tensor in found[0].items())
    carrier = Carrier()
    carrier.add(torch.ones(2))
    with pytest.raises(UserError, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        carrier.bring(0, torch.device("cuda"))
