"""Ranks over all blocks together, guards, and what training every layer means."""

import re

import numpy as np
import pytest
import torch
from block_models import build
from nullspace_help import A_LOG, OUT, X_PROJ, images, set_random_gradients, snapshot
from tasks_help import one_sentence
from torch import nn

from mambacl.errors import UserError
from mambacl.nullspace import NullSpace, null_rank, null_ranks

# One threshold for all


def test_one_threshold_by_hand():
    """Shares of the trace: 8/10, 2/10, 0 and 5/10, 4/10, 1/10."""
    spectra = [np.array([8.0, 2.0, 0.0]), np.array([50.0, 40.0, 10.0])]
    assert null_ranks(spectra, "energy:0.65", together=True) == [2, 2]  # 0.8 and 0.5 hold 1.3 of 2
    assert null_ranks(spectra, "energy:0.85", together=True) == [2, 1]  # 0.4 makes it 1.7
    assert null_ranks(spectra, "energy:0.95", together=True) == [1, 1]  # 0.2 makes it 1.9
    assert null_ranks(spectra, "energy:0.65") == [2, 1] and null_ranks(spectra, "energy:0.95") == [1, 0]
    assert null_ranks(spectra, "tolerance:0.3", together=True) == [2, 1]  # at most 0.24
    assert null_ranks(spectra, "corner", together=True) == [2, 2]  # 0.8 0.5 0.4 0.2 0.1 0 has its corner at 0.5


def test_one_threshold_does_not_see_scale():
    spectra = [np.array([8.0, 2.0, 0.5]), np.array([5.0, 4.0, 1.0])]
    for rule in ("energy:0.8", "tolerance:0.1", "corner"):
        assert null_ranks(spectra, rule, True) == null_ranks([spectra[0] * 1e6, spectra[1] * 1e-6], rule, True)


def test_one_spectrum_together_is_that_spectrum_alone():
    spectrum = np.array([9.0, 8.0, 1.0, 0.5, 0.2])
    for rule in ("corner", "smoothed-corner", "energy:0.9", "tolerance:0.1", "fraction:0.4"):
        assert null_ranks([spectrum], rule, True) == [null_rank(spectrum, rule)]


@pytest.mark.parametrize("rule", ["corner", "smoothed-corner", "energy:0.7", "energy:0.99", "tolerance:1e-2"])
def test_the_total_is_that_of_the_pooled_spectrum(rule):
    random = np.random.default_rng(0)
    for _ in range(20):
        sizes = random.integers(1, 60, size=random.integers(1, 6))
        spectra = [np.sort(random.lognormal(sigma=2, size=size))[::-1].copy() for size in sizes]
        relative = [spectrum / spectrum.sum() for spectrum in spectra]
        ranks = null_ranks(spectra, rule, together=True)
        assert sum(ranks) == null_rank(np.sort(np.concatenate(relative))[::-1], rule)
        kept = [values[: len(values) - rank] for values, rank in zip(relative, ranks, strict=True)]
        null = [values[len(values) - rank :] for values, rank in zip(relative, ranks, strict=True)]
        assert min(map(min, filter(len, kept)), default=1) >= max(map(max, filter(len, null)), default=0)


def test_a_fraction_is_a_fraction_of_each():
    spectra = [np.arange(10.0, 0, -1), np.arange(4.0, 0, -1) * 1e6]
    assert null_ranks(spectra, "fraction:0.5", together=True) == [5, 2]


@pytest.mark.parametrize("family", ["defocus", "vim", "vmamba"])
def test_a_space_pools_each_feature_over_its_blocks(family):
    model, inputs, _ = build(family)
    space = NullSpace(model, rank="energy:0.9", rank_over="all")
    space.consolidate([inputs(0, 2)])
    features = {protection.name: protection.label for protection in space.selection.protections}
    blocks = {part.name: block.name for block, part in space.selection.parts()}
    different = 0
    for feature in set(features.values()):
        alike = {}
        for name, decomposition in space.decompositions().items():
            if features[name] == feature:
                alike[blocks[name]] = decomposition
        spectra = [d.spectrum for d in alike.values()]
        pooled = np.sort(np.concatenate([(s / s.sum()).numpy() for s in spectra]))[::-1]
        assert len(spectra) == 2 and sum(d.rank for d in alike.values()) == null_rank(pooled, "energy:0.9")
        different += [d.rank for d in alike.values()] != null_ranks(spectra, "energy:0.9")
    assert different  # than each block by itself


# Guards


def layer_space(features, **overrides):
    """A linear layer that saw these rows."""
    torch.manual_seed(0)
    space = NullSpace(nn.Sequential(nn.Linear(features.shape[1], 3, bias=False)), layers="all", **overrides)
    space.consolidate([features])
    return space


def test_flat_spectra_are_protected_whole():
    assert null_ranks([np.full(5, 3.0), np.array([5.0, 1.0, 1.0, 1.0])], "corner") == [0, 2]
    assert null_ranks([torch.full((5,), 3.0) + 1e-7 * torch.arange(5, 0, -1)], "corner") == [0]
    space = layer_space(2 * torch.eye(6), eta=1.0)
    assert space.decompositions()["0.weight"].protected == 6
    start = snapshot(space.model)
    set_random_gradients(space.model, 0)
    space.wrap(torch.optim.SGD(space.parameters(), lr=0.1)).step()
    torch.testing.assert_close(space.model[0].weight.detach(), start["0.weight"], rtol=0, atol=1e-6)


def test_flat_spectra_are_protected_whole_together_too():
    assert null_ranks([np.full(5, 3.0), np.full(5, 7.0)], "corner", together=True) == [0, 0]


@pytest.mark.parametrize("rule", ["corner", "smoothed-corner", "energy:0.9", "tolerance:1e-12"])
@pytest.mark.parametrize("together", [False, True])
def test_zero_spectra_are_free(rule, together):
    assert null_ranks([np.zeros(5), np.zeros(3)], rule, together) == [5, 3]
    spectra = [np.zeros(5), np.array([5.0, 4.0, 1.0, 0.5, 0.1])]
    if rule != "smoothed-corner":
        assert null_ranks(spectra, rule, together)[0] == 5
    space = layer_space(torch.zeros(4, 6), rank=rule, eta=1.0, rank_over="all" if together else "block")
    assert space.decompositions()["0.weight"].rank == 6


def test_a_feature_that_is_no_number_is_named_with_its_block():
    class Breaks(nn.Module):
        def forward(self, x):
            return x / 0 * 0

    model = nn.Sequential(nn.Linear(4, 4), Breaks(), nn.Linear(4, 2))
    space = NullSpace(model, layers="all")
    with pytest.raises(UserError, match=r"The feature in of 2 holds NaN or infinite values\.") as error:
        space.consolidate([torch.randn(3, 4)])
    assert one_sentence(error) and space.tasks == 0


def test_a_step_size_that_is_no_number_is_named_with_its_block(tiny_model):
    model = tiny_model()
    space = NullSpace(model, "exact", W_delta={"trains": False}, W_B={"trains": False}, W_C={"trains": False},
                      out={"trains": False})  # fmt: skip
    with torch.no_grad():
        model.blocks[1].mixer.dt_proj.bias[3] = float("nan")
    with pytest.raises(UserError, match=r"The feature .*delta.* of blocks\.1\.mixer holds NaN"):
        space.consolidate([images()])
    assert space.tasks == 0 and not space.projected_step.boxes()


# What every layer means


@pytest.mark.parametrize("leave", [(), ("head",)])
def test_the_description_adds_up(tiny_model, leave):
    model = tiny_model(num_classes=3)
    space = NullSpace(model, "exact", layers="all", leave=leave)
    text = space.describe()
    layers = "1 plain layer" if leave else "2 plain layers"
    assert text.startswith(f"2 selective SSMs and {layers}; eta 1.0, rank by tolerance:1e-12\n")
    kinds = dict(re.findall(r"^  (\w+) +([\d,]+) values", text, re.M))
    assert kinds.keys() == {"W_delta", "W_B", "W_C", "A", "out", "W_dt", "linear", "conv", "others"}
    total = sum(p.numel() for p in model.parameters())
    left = sum(p.numel() for p in model.head.parameters()) if leave else 0
    assert sum(int(size.replace(",", "")) for size in kinds.values()) == total - left
    assert f"  trains {total - left:,} of {total:,} values" in text
    assert sum(p.numel() for p in space.parameters()) == total - left


@pytest.mark.parametrize(
    "others, words",
    [("first-task", "trained in the first task, then fixed"), ("fixed", "fixed"), ("free", "trained freely")],
)
def test_others_train_when_they_should(tiny_model, others, words):
    model = tiny_model()
    space = NullSpace(model, layers="all", others=others)
    assert re.search(rf"^  others .* tensors, {words}$", space.describe(), re.M)
    names = [name for name in snapshot(model) if not any(part.parameter == name for _, part in space.selection.parts())]
    assert "cls_token" in names and "blocks.0.norm.weight" in names and "blocks.0.mixer.D" in names
    assert set(names).isdisjoint(space.trained_names()) == (others == "fixed")
    optimizer = space.wrap(torch.optim.AdamW(model.parameters(), lr=0.01))
    for task, moves in enumerate([others != "fixed", others == "free", others == "free"]):
        start = snapshot(model)
        set_random_gradients(model, task)
        optimizer.step()
        assert all(torch.equal(model.get_parameter(name), start[name]) != moves for name in names)
        assert not torch.equal(model.get_parameter(f"blocks.0.{OUT}"), start[f"blocks.0.{OUT}"])
        space.consolidate([images(seed=task)])


def test_others_stay_fixed_after_loading():
    model, inputs, _ = build("mamba_ssm")
    space, again = NullSpace(model, layers="all"), NullSpace(model, layers="all")
    space.consolidate([inputs(0)])
    again.load_state_dict(space.state_dict())
    start = snapshot(model)
    set_random_gradients(model, 0)
    again.wrap(torch.optim.SGD(model.parameters(), lr=0.1)).step()
    assert torch.equal(model[1].weight, start["1.weight"]) and torch.equal(model[0].D, start["0.D"])


def test_without_every_layer_others_are_none_of_its_business(tiny_model):
    model = tiny_model()
    for others in ("first-task", "fixed", "free"):
        space = NullSpace(model, others=others)
        assert "others" not in space.describe()
        assert {name.split(".", 2)[2] for name in space.trained_names()} == {X_PROJ, A_LOG, OUT}


# Parameters that a model gets later


@pytest.mark.parametrize("way", ["a new optimizer", "a new group"])
@pytest.mark.parametrize("others", ["first-task", "fixed"])
def test_a_head_added_later_trains_freely_and_is_named(tiny_model, caplog, others, way):
    caplog.set_level("WARNING", logger="mambacl")
    model = tiny_model().double()
    space = NullSpace(model, "exact", layers="all", others=others)
    optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=0.1))
    space.consolidate([images(1, dtype=torch.float64)])
    assert not caplog.text
    model.second = nn.Linear(model.num_features, 3).double()
    if way == "a new group":
        optimizer.add_param_group({"params": list(model.second.parameters())})
    else:
        optimizer = space.wrap(torch.optim.SGD([*space.parameters(), *model.second.parameters()], lr=0.1))
    space.freeze_others()
    assert model.second.weight.requires_grad and "second.weight" not in space.trained_names()
    start = snapshot(model)
    set_random_gradients(model, 0)
    optimizer.step()
    for name in ("second.weight", "second.bias"):  # the optimizer's step
        parameter = model.get_parameter(name)
        torch.testing.assert_close(parameter.detach(), start[name] - 0.1 * parameter.grad)
    assert torch.equal(model.blocks[0].norm.weight, start["blocks.0.norm.weight"])  # others stay
    assert "2 new parameters since the NullSpace was built (second.weight, second.bias)" in caplog.text
    assert "leave=[...]" in caplog.text
    space.consolidate([images(1, seed=1, dtype=torch.float64)])  # nobody asks the new layer for its features


def test_a_head_added_to_a_module_that_is_left_needs_no_warning(tiny_model, caplog):
    caplog.set_level("WARNING", logger="mambacl")
    model = tiny_model()
    model.heads = nn.ModuleList()
    space = NullSpace(model, layers="all", leave="heads")
    model.heads.append(nn.Linear(model.num_features, 2))
    space.wrap(torch.optim.SGD([*space.parameters(), *model.heads.parameters()], lr=0.1))
    assert not caplog.text
