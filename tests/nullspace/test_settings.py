"""Settings: what is trained, what is protected, in which blocks."""

import dataclasses

import pytest
import torch
from nullspace_help import A_LOG, OUT, X_PROJ, images
from torch import nn

from mambacl.backbones.defocus import Mixer, MixerConfig
from mambacl.errors import UserError
from mambacl.nullspace import PAPER_KINDS, SETTINGS, NullSpace, Rule, Setting, ablation
from mambacl.nullspace.block_readers import find_blocks
from mambacl.nullspace.settings import given_rules


def test_freeze_others_leaves_gradients_to_what_is_trained(tiny_model):
    space = NullSpace(tiny_model(num_classes=2), A={"trains": False})
    space.freeze_others()
    requiring = [name for name, parameter in space.model.named_parameters() if parameter.requires_grad]
    assert requiring == space.trained_names() == [f"blocks.{i}.{name}" for i in range(2) for name in (X_PROJ, OUT)]


def test_default_trains_and_protects_every_kind(tiny_model):
    space = NullSpace(tiny_model())
    assert space.trained_names() == [f"blocks.{i}.{name}" for i in range(2) for name in (A_LOG, X_PROJ, OUT)]
    space.consolidate([images()])
    parts = [f"{X_PROJ}[0:4]", f"{X_PROJ}[4:12]", f"{X_PROJ}[12:20]", A_LOG, OUT]
    assert list(space.projectors()) == [f"blocks.{i}.{part}" for i in range(2) for part in parts]


@pytest.mark.parametrize(
    "projected", [(), ("W_delta",), ("A",), ("out",), ("W_delta", "W_B", "W_C", "A"), PAPER_KINDS], ids="+".join
)
def test_ablation_projects_the_named_kinds_and_trains_all(tiny_model, projected):
    model = tiny_model()
    space = NullSpace(model, **ablation(*projected))
    assert space.trained_names() == NullSpace(model).trained_names()
    space.consolidate([images()])
    kinds = {part.kind for _, part in space.selection.parts() if part.name in space.projectors()}
    assert kinds == set(projected)
    assert all(space.setting.rule(kind).feature == SETTINGS["paper"].rule(kind).feature for kind in PAPER_KINDS)


def test_without_projection_trains_the_same_freely(tiny_model):
    model = tiny_model()
    free = NullSpace(model, SETTINGS["paper"].without_projection())
    free.consolidate([images()])
    assert free.selection.protections == [] and free.trained_names() == NullSpace(model).trained_names()


@pytest.mark.parametrize("blocks, expected", [(None, [0, 1, 2]), (1, [0]), (2, [0, 1]), ([2], [2]), ([0, 2], [0, 2])])
def test_blocks_are_the_first_so_many_or_those_listed(tiny_model, blocks, expected):
    space = NullSpace(tiny_model(depth=3), blocks=blocks)
    assert [block.name for block in space.selection.blocks] == [f"blocks.{i}.mixer" for i in expected]
    space.consolidate([images()])
    assert {int(name.split(".")[1]) for name in space.projectors()} == set(expected)
    assert {int(name.split(".")[1]) for name in space.trained_names()} == set(expected)


@pytest.mark.parametrize("blocks", [0, -1, 4, [3], [], [-1]])
def test_blocks_that_the_model_does_not_have_are_refused(tiny_model, blocks):
    with pytest.raises(UserError, match="blocks"):
        NullSpace(tiny_model(depth=3), blocks=blocks)


def test_describe_says_what_is_trained_and_protected(tiny_model):
    model = tiny_model()
    text = NullSpace(model, eta=0.9, A={"trains": False}, out={"projected": False}).describe()
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert "2 selective SSMs; eta 0.9, rank by corner" in text
    assert "512 values in 2 parts, protected by x" in lines["W_delta"]  # 2 blocks of 4 x 64
    assert "1,024 values in 2 parts, protected by delta-x" in lines["W_B"]
    assert "1,024 values in 2 parts, protected by x" in lines["W_C"]
    assert "fixed" in lines["A"] and "4,096 values in 2 parts, trained freely" in lines["out"]
    total = sum(parameter.numel() for parameter in model.parameters())
    assert f"trains {512 + 1024 + 1024 + 4096:,} of {total:,} values" in lines["trains"]


def test_named_settings_say_what_the_paper_and_the_public_code_do():
    paper, public = SETTINGS["paper"], SETTINGS["public-code"]
    assert [paper.rule(kind).feature for kind in PAPER_KINDS] == ["x", "delta-x", "x", "delta", "out"]
    assert (paper.accumulate, paper.rank, paper.scaling, paper.eta) == ("sum", "corner", "none", 0.95)
    assert [public.rule(kind).feature for kind in PAPER_KINDS] == ["x", "delta-x-per-image", "x", "delta", "out"]
    assert (public.accumulate, public.rank, public.scaling) == ("batch-mean", "smoothed-corner", "frobenius")


def test_overrides_change_only_what_they_name():
    changed = SETTINGS["paper"].override(eta=0.5, W_B={"trains": False}, out=Rule(projected=False, feature="x"))
    assert Rule(trains=False, projected=True, feature="delta-x") == changed.W_B and changed.out.feature == "x"
    back = dataclasses.replace(changed, eta=0.95, W_B=SETTINGS["paper"].W_B, out=SETTINGS["paper"].out)
    assert back == SETTINGS["paper"]


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"setting": "papre"}, r"no setting 'papre'\. Did you mean 'paper'\? Known: paper, public-code"),
        ({"ranks": "corner"}, r"no option 'ranks'\. Did you mean 'rank'\?"),
        ({"rank": "knee"}, "no rank rule 'knee'"),
        ({"eta": 1.5}, "eta must lie between 0"),
        ({"eta": -0.1}, "eta must lie between 0"),
        ({"W_B": {"feature": "delta_x"}}, "W_B.feature takes one of x, delta"),
        ({"W_B": {"projectd": False}}, "projectd"),
        ({"scaling": "frobenious"}, "scaling"),
        ({"accumulate": "mean"}, "accumulate"),
        ({"spectrum": "float16"}, "spectrum"),
        ({"products": "double"}, "products"),
    ],
    ids=str,
)
def test_wrong_settings_are_named_with_the_remedy(tiny_model, overrides, message):
    with pytest.raises(UserError, match=message):
        NullSpace(tiny_model(), **overrides)


def test_a_model_without_selective_ssm_is_refused():
    with pytest.raises(UserError, match="no selective SSM that a block reader knows"):
        NullSpace(nn.Sequential(nn.Linear(3, 4), nn.ReLU()))


def test_blocks_are_found_anywhere_in_a_model():
    def mixer():
        return Mixer(8, MixerConfig(intermediate_size=16, state_size=4, time_step_rank=2, group_norm_size=4), True)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), mixer(), nn.ModuleDict({"inner": mixer()})["inner"])
    space = NullSpace(model)
    assert [block.name for block in space.selection.blocks] == ["1", "2"]
    space.consolidate([torch.randn(3, 4, 5)])
    assert "1.x_proj.weight[0:2]" in space.projectors() and "2.A_log" in space.projectors()
    assert [part.name for part in find_blocks(mixer())[0].parts][-1] == "out_proj.weight"


def test_a_setting_can_be_given_as_a_value(tiny_model):
    own = Setting(eta=0.3, rank="fraction:0.5", blocks=[1])
    space = NullSpace(tiny_model(), own, eta=0.4)
    assert space.setting == dataclasses.replace(own, eta=0.4)


@pytest.mark.parametrize("wrong", [{"blocks": [0, -1]}, {"blocks": "2"}, {"blocks": []}, {"eta": "0.9"}])
def test_values_of_the_wrong_kind_are_refused(tiny_model, wrong):
    with pytest.raises(UserError, match=r"blocks must|blocks takes|eta takes"):
        NullSpace(tiny_model(), **wrong)


def test_an_unknown_kind_in_an_ablation_is_refused():
    with pytest.raises(UserError, match="no kind 'W_x'"):
        ablation("W_x")


# What a user says about W_dt


@pytest.mark.parametrize("given", [{"trains": False}, Rule(trains=False, feature="dt")], ids=["mapping", "Rule"])
def test_W_dt_stays_fixed_with_every_layer_if_the_user_says_so(tiny_model, given):
    model = tiny_model()
    names = [name for name, _ in model.named_parameters() if name.endswith("dt_proj.weight")]
    usual, fixed = NullSpace(model, layers="all"), NullSpace(model, layers="all", W_dt=given)
    assert set(names) <= set(usual.trained_names()) and set(names).isdisjoint(fixed.trained_names())
    start = {name: model.get_parameter(name).detach().clone() for name in names}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    fixed.wrap(torch.optim.SGD(model.parameters(), lr=0.1)).step()
    assert all(torch.equal(model.get_parameter(name), start[name]) for name in names)
    free = NullSpace(model, fixed.setting.without_projection())
    assert set(names).isdisjoint(free.trained_names())
    assert set(names) <= set(NullSpace(model, usual.setting.without_projection()).trained_names())


@pytest.mark.parametrize("text, trains", [("false", False), ("true", True), (False, False), (None, None)])
def test_W_dt_is_understood_as_text(text, trains):
    given = given_rules({"eta": 0.5, "W_dt": {"trains": text}})
    assert given == {"eta": 0.5, "W_dt": {"trains": text} | ({} if trains is None else {"projected": trains})}


def test_options_and_stored_runs_say_it_alike():
    """A run's config.yaml of before has W_dt as it was by default, which trains with every layer."""
    from mambacl.config import from_dict, resolve

    usual = resolve(None, {"nullspace.layers": "all"})
    assert usual.nullspace.W_dt == Rule(trains=False, feature="dt") and usual.nullspace.rule("W_dt").trains
    fixed = resolve(None, {"nullspace.layers": "all", "nullspace.W_dt.trains": False})
    assert not fixed.nullspace.rule("W_dt").trains
    again = resolve({"nullspace": dataclasses.asdict(fixed.nullspace)}, {"nullspace.W_dt.trains": True})
    assert again.nullspace.rule("W_dt") == Rule(trains=True, projected=True, feature="dt")
    for config in (usual, fixed):
        assert from_dict(dataclasses.asdict(config)).nullspace == config.nullspace
        assert resolve(dataclasses.asdict(config), {}).nullspace == config.nullspace
