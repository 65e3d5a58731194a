"""Saving a null space and taking it up again."""

import pytest
import torch
from nullspace_help import X_PROJ, consolidated, images
from safetensors.torch import load_file

from mambacl.errors import UserError
from mambacl.nullspace import NullSpace


@pytest.mark.parametrize("way", ["state_dict", "file"])
@pytest.mark.parametrize("tasks", [0, 2])
def test_a_saved_state_goes_on_as_if_never_stopped(tiny_model, tmp_path, way, tasks):
    model = tiny_model()
    space, again = consolidated(model, tasks), NullSpace(model)
    if way == "file":
        space.save(tmp_path / "space.safetensors")
        again.load(tmp_path / "space.safetensors")
    else:
        again.load_state_dict(space.state_dict())
    assert again.tasks == tasks
    for one in (space, again):
        one.consolidate([images(seed=9)])
    assert again.tasks == tasks + 1 and again.projectors().keys() == space.projectors().keys()
    for name, projector in space.projectors().items():
        assert torch.equal(again.covariances()[name], space.covariances()[name])
        assert torch.equal(again.projectors()[name].dense(), projector.dense())
        assert again.decompositions()[name].rank == space.decompositions()[name].rank


def test_projectors_are_in_force_right_after_loading(tiny_model):
    model = tiny_model()
    space, again = consolidated(model), NullSpace(model)
    again.load_state_dict(space.state_dict())
    for name, projector in space.projectors().items():
        loaded = again.projectors()[name]
        assert torch.equal(loaded.basis, projector.basis)
        assert (loaded.identity, loaded.factor) == (projector.identity, projector.factor)


def test_the_state_is_named_by_parameter_and_rows(tiny_model):
    state = consolidated(tiny_model()).state_dict()
    words = ("covariance", "spectrum", "basis", "rank")
    assert {f"blocks.0.{X_PROJ}[0:4].{word}" for word in words} <= state.keys() and int(state["tasks"]) == 1
    assert all(isinstance(tensor, torch.Tensor) for tensor in state.values())


def test_a_feature_that_parts_share_is_written_once(tiny_model, tmp_path):
    consolidated(tiny_model()).save(tmp_path / "space.safetensors")
    written = load_file(tmp_path / "space.safetensors")
    assert f"blocks.0.{X_PROJ}[0:4].covariance" in written
    assert f"blocks.0.{X_PROJ}[12:20].covariance" not in written


OTHERS = {
    "fewer blocks": lambda tiny: NullSpace(tiny(), blocks=1),
    "another kind": lambda tiny: NullSpace(tiny(), A={"trains": False}),
    "another depth": lambda tiny: NullSpace(tiny(depth=3)),
    "another width": lambda tiny: NullSpace(tiny(mamba={"intermediate_size": 32})),
    "another feature": lambda tiny: NullSpace(tiny(), W_B={"feature": "x"}),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_state_of_another_model_or_setting_is_refused_and_changes_nothing(tiny_model, other, tmp_path):
    consolidated(tiny_model()).save(tmp_path / "space.safetensors")
    space = OTHERS[other](tiny_model)
    space.consolidate([images(seed=3)])
    before = {name: tensor.clone() for name, tensor in space.state_dict().items()}
    with pytest.raises(UserError, match=r"another (model|setting)"):
        space.load(tmp_path / "space.safetensors")
    after = space.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_a_damaged_state_file_is_refused(tiny_model, tmp_path):
    path = tmp_path / "space.safetensors"
    space = consolidated(tiny_model())
    space.save(path)
    damaged = bytearray(path.read_bytes())
    damaged[-9] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(UserError, match="damaged"):
        space.load(path)
