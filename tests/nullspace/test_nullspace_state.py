"""Saving a null space and taking it up again."""

import pytest
import torch
from nullspace_help import X_PROJ, consolidated, images
from safetensors.torch import load_file

from mambacl.errors import UserError
from mambacl.nullspace import NullSpace, Setting


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


# What a file says and what the caller asked for


@pytest.fixture
def saved(tiny_model, tmp_path):
    """The file of a space with a rank rule, eta and scaling that are not the defaults."""
    model = tiny_model()
    space = consolidated(model, 2, rank="energy:0.9", eta=0.7, scaling="frobenius")
    space.save(tmp_path / "space.safetensors")
    return model, space, tmp_path / "space.safetensors"


def assert_projects_alike(space, other):
    assert space.projectors().keys() == other.projectors().keys()
    for name, projector in other.projectors().items():
        assert torch.equal(space.projectors()[name].dense(), projector.dense()), name


def test_what_the_caller_did_not_give_is_the_files(saved):
    model, space, path = saved
    again = NullSpace(model)
    again.load(path)
    assert (again.setting.rank, again.setting.eta, again.setting.scaling) == ("energy:0.9", 0.7, "frobenius")
    assert_projects_alike(again, space)


ASKED = {
    "eta": {"eta": 1.0},
    "scaling": {"scaling": "none"},
    "rank": {"rank": "energy:0.5"},
    "all spectra at once": {"rank_over": "all"},
    "storage": {"storage": "float64"},
}


@pytest.mark.parametrize("asked", ASKED)
def test_what_the_caller_gave_wins_over_the_file(saved, asked):
    model, space, path = saved
    again = NullSpace(model, **ASKED[asked])
    again.load(path)
    expected = consolidated(model, 2, **{"rank": "energy:0.9", "eta": 0.7, "scaling": "frobenius", **ASKED[asked]})
    assert again.setting == expected.setting
    assert_projects_alike(again, expected)
    unlike = [not torch.equal(again.projectors()[n].dense(), p.dense()) for n, p in space.projectors().items()]
    assert any(unlike)
    ranks = {name: found.rank for name, found in again.decompositions().items()}
    assert ranks == {name: found.rank for name, found in expected.decompositions().items()}


@pytest.mark.parametrize("setting", ["paper", Setting(eta=0.3)], ids=["by name", "as a value"])
def test_a_setting_that_is_given_is_given_in_all_its_fields(saved, setting):
    model, _, path = saved
    again = NullSpace(model, setting)
    again.load(path)
    assert again.setting == NullSpace(model, setting).setting
    assert_projects_alike(again, consolidated(model, 2, setting=setting))


def test_a_box_cannot_be_made_again(tiny_model, tmp_path):
    model, path = tiny_model(), tmp_path / "space.safetensors"
    consolidated(model, setting="exact", relax=0.05).save(path)
    space = NullSpace(model, "exact", relax=0.2)
    with pytest.raises(UserError, match=r"was saved with relax 0\.05, this one has 0\.2.*with relax=0\.05"):
        space.load(path)
    assert space.tasks == 0
    with pytest.raises(UserError, match=r"saved under another setting: W_B"):
        NullSpace(model).load(path)
