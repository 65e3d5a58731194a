"""Tasks taken back and brought together, where covariances are kept, one threshold for all blocks, and whole states."""

import gc
import re

import numpy as np
import pytest
import torch
from adapter_models import build
from nullspace_help import A_LOG, OUT, X_PROJ, images, set_random_gradients, snapshot
from torch import nn

from mambacl.errors import UserError
from mambacl.nullspace import NullSpace, null_rank, null_ranks

SETTINGS = {
    "paper": {"rank": "energy:0.9"},
    "public-code": {"setting": "public-code"},
    "exact": {"setting": "exact"},
    "boxes": {"setting": "exact", "relax": 0.05},
    "every layer": {"setting": "exact", "layers": "all"},
}


def space_of(model, tasks, kind="paper", **overrides):
    """A space that saw these tasks, an image or two each."""
    space = NullSpace(model, **{**SETTINGS[kind], **overrides})
    for task in tasks:
        space.consolidate([images(1 + task % 2, seed=task)])
    return space


def copied(space):
    return {name: tensor.clone() for name, tensor in space.state_dict().items()}


def same(state, other):
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


def assert_same_protection(space, other):
    """To the bit: covariances, projectors, boxes."""
    assert space.tasks == other.tasks
    assert same(space.covariances(), other.covariances())
    assert space.projectors().keys() == other.projectors().keys()
    for name, projector in other.projectors().items():
        own = space.projectors()[name]
        assert torch.equal(own.basis, projector.basis), name
        assert torch.equal(torch.as_tensor(own.factor), torch.as_tensor(projector.factor)), name
    for name, box in other.boxes().items():
        assert torch.equal(space.boxes()[name].lower, box.lower) and torch.equal(space.boxes()[name].upper, box.upper)


def one_sentence(error):
    text = str(error.value)
    return "\n" not in text and text.endswith(".") and len(re.findall(r"\.(?= [A-Z])", text)) == 0


# Forgetting


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("task", [0, 1, 2])
def test_a_forgotten_task_was_never_there(tiny_model, task, kind):
    model = tiny_model()
    space = space_of(model, range(3), kind, keep_tasks=True)
    space.forget(task)
    never = space_of(model, [number for number in range(3) if number != task], kind, keep_tasks=True)
    assert_same_protection(space, never)
    assert same(space.state_dict(), never.state_dict())


def test_after_forgetting_it_goes_on(tiny_model):
    model = tiny_model()
    space, never = (space_of(model, tasks, "boxes", keep_tasks=True) for tasks in ((0, 1, 2), (0, 2)))
    space.forget(1)
    for one in (space, never):
        one.consolidate([images(seed=7)])
    assert_same_protection(space, never)
    for _ in range(3):
        space.forget(0)
    assert space.tasks == 0 and not space.projectors() and not space.boxes() and not space.covariances()
    space.consolidate([images(seed=3)])
    assert space.tasks == 1


def test_a_forgotten_task_may_change_and_the_others_not(tiny_model):
    model = tiny_model().double()
    space = NullSpace(model, "exact", keep_tasks=True)
    old = [images(1, seed=task, dtype=torch.float64) for task in range(2)]
    for batch in old:
        space.consolidate([batch])
    space.forget(0)
    before = [model(batch).detach() for batch in old]
    optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=0.01))
    set_random_gradients(model, 0)
    optimizer.step()
    changes = [(model(batch) - y).norm() / y.norm() for batch, y in zip(old, before, strict=True)]
    assert changes[1] < 1e-12 < 1e-4 < changes[0]


def test_keeping_tasks_apart_protects_the_same(tiny_model):
    model = tiny_model()
    for kind in ("paper", "boxes"):
        assert_same_protection(
            space_of(model, range(3), kind, keep_tasks=True), space_of(model, range(3), kind, keep_tasks=False)
        )


def test_without_the_tasks_there_is_nothing_to_forget(tiny_model):
    space = space_of(tiny_model(), range(2))
    before = copied(space)
    with pytest.raises(UserError, match=r"build the NullSpace with keep_tasks=True") as error:
        space.forget(0)
    assert one_sentence(error) and same(space.state_dict(), before)


@pytest.mark.parametrize("task", [-1, 2, 99])
def test_only_tasks_that_were_can_be_forgotten(tiny_model, task):
    space = space_of(tiny_model(), range(2), keep_tasks=True)
    before = copied(space)
    with pytest.raises(UserError, match=f"There is no task {task} to forget: 2 were consolidated") as error:
        space.forget(task)
    assert one_sentence(error) and same(space.state_dict(), before)


# Merging


@pytest.mark.parametrize("keep_tasks", [False, True])
@pytest.mark.parametrize("kind", SETTINGS)
def test_merged_spaces_are_one_that_saw_both(tiny_model, kind, keep_tasks):
    model = tiny_model()
    whole = space_of(model, range(3), kind, keep_tasks=keep_tasks)
    first, second = (space_of(model, tasks, kind, keep_tasks=keep_tasks) for tasks in ((0, 1), (2,)))
    kept = copied(second)
    first.merge(second)
    assert_same_protection(first, whole)
    assert same(second.state_dict(), kept)
    first.consolidate([images(seed=5)])
    assert same(second.state_dict(), kept)  # nothing is shared


@pytest.mark.parametrize("kind", ["paper", "boxes"])
def test_either_may_be_merged_into_the_other(tiny_model, kind):
    model = tiny_model()
    pairs = [space_of(model, (task,), kind) for task in (0, 1)], [space_of(model, (task,), kind) for task in (0, 1)]
    pairs[0][0].merge(pairs[0][1])
    pairs[1][1].merge(pairs[1][0])
    assert_same_protection(pairs[0][0], pairs[1][1])


def test_after_a_merge_both_branches_are_protected(tiny_model):
    model = tiny_model().double()
    first, second = (NullSpace(model, "exact") for _ in range(2))
    old = [images(1, seed=task, dtype=torch.float64) for task in range(2)]
    first.consolidate([old[0]])
    second.consolidate([old[1]])
    first.merge(second)
    before = [model(batch).detach() for batch in old]
    optimizer = first.wrap(torch.optim.Adam(first.parameters(), lr=0.01))
    for seed in range(3):
        set_random_gradients(model, seed)
        optimizer.step()
    for batch, y in zip(old, before, strict=True):
        assert (model(batch) - y).norm() < 1e-11 * y.norm()


def test_boxes_are_intersected(tiny_model):
    model, other = tiny_model(), tiny_model()
    first = space_of(model, (0,), "boxes")
    with torch.no_grad():
        for name, limits in first.boxes().items():  # the branch moved a little, inside the first box
            other.get_parameter(name).add_(0.3 * (limits.upper - limits.lower).clamp(max=0.1) / 2)
    second = space_of(other, (1,), "boxes")
    mine, theirs = first.boxes(), second.boxes()
    first.merge(second)
    for name, limits in first.boxes().items():
        assert torch.equal(limits.lower, torch.maximum(mine[name].lower, theirs[name].lower))
        assert torch.equal(limits.upper, torch.minimum(mine[name].upper, theirs[name].upper))


def test_a_merge_with_nothing_changes_nothing(tiny_model):
    model = tiny_model()
    space, before = space_of(model, range(2)), copied(space_of(model, range(2)))
    space.merge(space_of(model, ()))
    assert same(space.state_dict(), before)
    empty = space_of(model, ())
    empty.merge(space)
    assert_same_protection(empty, space)


def test_histories_are_joined(tiny_model):
    model = tiny_model()
    spaces = [space_of(model, (task,)) for task in range(2)]
    for number, space in enumerate(spaces):
        set_random_gradients(model, number)
        space.wrap(torch.optim.SGD(space.parameters(), lr=0.01 * (number + 1))).step()
        space.consolidate([images(seed=5)])
    histories = [list(space.moved) for space in spaces]
    spaces[0].merge(spaces[1])
    assert spaces[0].tasks == 4 == len(spaces[0].moved)
    joined = [*histories[0], *histories[1]]
    assert all(same(one, other) for one, other in zip(spaces[0].moved, joined, strict=True))


OTHERS = {
    "feature": lambda tiny: space_of(tiny(), (1,), W_B={"feature": "x"}),
    "not projected": lambda tiny: space_of(tiny(), (1,), A={"projected": False}),
    "layers": lambda tiny: space_of(tiny(), (1,), layers="all"),
    "accumulate": lambda tiny: space_of(tiny(), (1,), accumulate="batch-mean"),
    "keep_tasks": lambda tiny: space_of(tiny(), (1,), keep_tasks=True),
    "blocks": lambda tiny: space_of(tiny(), (1,), blocks=1),
    "depth": lambda tiny: space_of(tiny(depth=3), (1,)),
    "rank of delta": lambda tiny: space_of(tiny(mamba={"time_step_rank": 2}), (1,)),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_model_or_setting_is_not_merged(tiny_model, other):
    space, stranger = space_of(tiny_model(), (0,)), OTHERS[other](tiny_model)
    before, theirs = copied(space), copied(stranger)
    with pytest.raises(UserError, match=r"The other null space (has|is of another model)") as error:
        space.merge(stranger)
    assert one_sentence(error)
    assert same(space.state_dict(), before) and same(stranger.state_dict(), theirs)


@pytest.mark.parametrize("keep_tasks", [False, True])
def test_another_width_is_not_merged(tiny_model, keep_tasks):
    space = space_of(tiny_model(), (0,), keep_tasks=keep_tasks)
    wider = space_of(tiny_model(mamba={"intermediate_size": 32}), (1,), keep_tasks=keep_tasks)
    with pytest.raises(UserError, match="another model"):
        space.merge(wider)


def test_a_merge_that_fails_changes_nothing(tiny_model):
    space, before = space_of(tiny_model(), (0,)), copied(space_of(tiny_model(), (0,)))
    with pytest.raises((UserError, RuntimeError)):
        space.merge(space_of(tiny_model(mamba={"intermediate_size": 32}), (1,)))
    assert same(space.state_dict(), before)


ONLY_A = {"setting": "exact", **{kind: {"projected": False} for kind in ("W_delta", "W_B", "W_C", "out")}}


@pytest.mark.parametrize("keep_tasks", [False, True])
def test_boxes_of_another_model_are_not_merged(tiny_model, keep_tasks):
    spaces = [NullSpace(tiny_model(depth=depth), keep_tasks=keep_tasks, **ONLY_A) for depth in (2, 3)]
    for space in spaces:
        space.consolidate([images()])
    before = copied(spaces[0])
    with pytest.raises(UserError, match="another model"):
        spaces[0].merge(spaces[1])
    assert same(spaces[0].state_dict(), before)


@pytest.mark.parametrize("way", ["merge", "forget"])
def test_counts_since_the_last_consolidation_outlive_a_merge(tiny_model, way):
    model = tiny_model()
    mine = (0,) if way == "merge" else (0, 2)  # an image each: one leaves more than half of all directions, two do not
    space, other = (space_of(model, tasks, "exact", keep_tasks=True) for tasks in (mine, (4,)))
    set_random_gradients(model, 0)
    space.wrap(torch.optim.SGD(space.parameters(), lr=0.01)).step()
    counts = space.moved_now()
    if way == "merge":
        space.merge(other)
    else:
        space.forget(0)
    for name, after in space.moved_now().items():
        torch.testing.assert_close(after, counts[name], msg=name)


def test_boxes_that_do_not_meet_move_nothing(tiny_model):
    """Branches whose A went apart: a step of rate 0 must not move A."""
    model, branch = tiny_model(), tiny_model()
    with torch.no_grad():
        branch.blocks[0].mixer.A_log.add_(1.0)
    space = space_of(model, (0,), "boxes")
    space.merge(space_of(branch, (1,), "boxes"))
    start = model.blocks[0].mixer.A_log.detach().clone()
    set_random_gradients(model, 0)
    space.wrap(torch.optim.SGD(space.parameters(), lr=0.0)).step()
    torch.testing.assert_close(model.blocks[0].mixer.A_log.detach(), start)


# Where covariances are kept


@pytest.mark.parametrize("keep_tasks", [False, True])
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_the_place_of_covariances_changes_no_bit(tiny_model, tmp_path, place, keep_tasks):
    model = tiny_model()
    for kind in ("paper", "every layer"):
        space = space_of(model, range(3), kind, covariances=place, folder=tmp_path, keep_tasks=keep_tasks)
        usual = space_of(model, range(3), kind, keep_tasks=keep_tasks)
        assert_same_protection(space, usual)
        assert same(space.state_dict(), usual.state_dict())


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_files_are_in_the_folder_and_go_with_the_space(tiny_model, tmp_path):
    space = space_of(tiny_model(), (0,), covariances="disk", folder=str(tmp_path))
    wanted = {tensor.data_ptr(): tensor.nbytes for tensor in space.covariances().values()}
    assert sum(path.stat().st_size for path in files(tmp_path)) == sum(wanted.values())
    space.consolidate([images(seed=1)])
    gc.collect()
    assert len(files(tmp_path)) == len(wanted)  # those of the first task are gone
    state = space.state_dict()
    before = {name: tensor.sum().item() for name, tensor in state.items()}
    del space
    gc.collect()
    assert not list(tmp_path.iterdir())
    assert {name: tensor.sum().item() for name, tensor in state.items()} == before  # a state that was taken stays


def test_files_of_a_forgotten_task_go(tiny_model, tmp_path):
    space = space_of(tiny_model(), range(3), covariances="disk", folder=tmp_path, keep_tasks=True)
    count = len(files(tmp_path))
    space.forget(1)
    gc.collect()
    assert len(files(tmp_path)) == count * 2 // 3
    space.merge(space_of(space.model, (5,), keep_tasks=True))
    assert len(files(tmp_path)) == count


def test_without_disk_there_are_no_files(tiny_model, tmp_path):
    space_of(tiny_model(), (0,), folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_consolidation_that_fails_leaves_no_files(tiny_model, tmp_path):
    space = space_of(tiny_model(), (0,), covariances="disk", folder=tmp_path)
    count = len(files(tmp_path))
    with pytest.raises(UserError):
        space.consolidate([images() * float("nan")])
    gc.collect()
    assert len(files(tmp_path)) == count


def test_states_go_from_one_place_to_another(tiny_model, tmp_path):
    model = tiny_model()
    disk = space_of(model, range(2), covariances="disk", folder=tmp_path)
    disk.save(tmp_path / "space.safetensors")
    usual, again = space_of(model, ()), space_of(model, (), covariances="disk", folder=tmp_path)
    usual.load(tmp_path / "space.safetensors")
    again.load_state_dict(usual.state_dict())
    assert_same_protection(usual, disk)
    assert_same_protection(again, disk)


# One threshold for all


def test_one_threshold_by_hand():
    """Shares of the trace: 8/10, 2/10, 0 and 5/10, 4/10, 1/10."""
    spectra = [np.array([8.0, 2.0, 0.0]), np.array([50.0, 40.0, 10.0])]
    assert null_ranks(spectra, "energy:0.65", together=True) == [2, 2]  # 0.8 and 0.5 hold 1.3 of 2
    assert null_ranks(spectra, "energy:0.85", together=True) == [2, 1]  # 0.4 makes it 1.7
    assert null_ranks(spectra, "energy:0.95", together=True) == [1, 1]  # 0.2 makes it 1.9
    assert null_ranks(spectra, "energy:0.65") == [2, 1] and null_ranks(spectra, "energy:0.95") == [1, 0]
    assert null_ranks(spectra, "tolerance:0.3", together=True) == [2, 1]  # at most 0.24
    assert null_ranks(spectra, "corner", together=True) == [2, 3]  # 0.8 0.5 0.4 0.2 0.1 0 has its corner at 0.5


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
    features = {protection.name: protection.feature for protection in space.protections()}
    blocks = {part.name: block.name for block, part in space.parts()}
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
    assert null_ranks([np.full(5, 3.0), np.array([5.0, 1.0, 1.0, 1.0])], "corner") == [0, 3]
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
    assert space.tasks == 0 and not space.boxes()


# States


MODELS = {"SSM": "defocus", "four directions": "vmamba", "depthwise convolutions": "mamba_ssm"}


@pytest.mark.parametrize("way", ["state_dict", "file"])
@pytest.mark.parametrize("keep_tasks", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_a_state_comes_back_whole(tmp_path, kind, keep_tasks, way):
    model, inputs, _ = build(MODELS[kind])
    options = {"keep_tasks": keep_tasks, "relax": 0.05, "layers": "all" if "conv" in kind else "ssm"}
    space, again = (NullSpace(model, "exact", **options) for _ in range(2))
    optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=1e-4))
    for task in range(3):
        space.consolidate([inputs(task)])
        set_random_gradients(model, task)
        optimizer.step()
    if way == "file":
        space.save(tmp_path / "space.safetensors")
        again.load(tmp_path / "space.safetensors")
    else:
        again.load_state_dict(copied(space))
    assert_same_protection(again, space)
    assert same(again.state_dict(), space.state_dict())
    after = []
    for one in (space, again):
        if keep_tasks:
            one.forget(1)
        one.consolidate([inputs(9)])
        before = {name: tensor.clone() for name, tensor in snapshot(model).items()}
        moved = {name: tensor + 0.01 for name, tensor in before.items()}
        one.project(before, moved)
        after.append(moved)
    assert_same_protection(again, space)
    assert same(*after)


def test_a_state_with_a_convolution_of_one_group_comes_back(tiny_model):
    model = tiny_model()
    space = space_of(model, range(2), "every layer")
    again = space_of(model, (), "every layer")
    again.load_state_dict(space.state_dict())
    assert_same_protection(again, space)


def test_the_history_of_updates_comes_back(tiny_model):
    model = tiny_model()
    space = space_of(model, (), "boxes")
    optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=0.01))
    for task in range(3):
        set_random_gradients(model, task)
        optimizer.step()
        space.consolidate([images(1, seed=task)])
    again = space_of(model, (), "boxes")
    again.load_state_dict(copied(space))
    assert len(again.moved) == 3 == again.tasks
    for task in (1, 2):
        assert same(again.moved[task], space.moved[task]) and all(m[0] > 0 for m in again.moved[task].values())
    assert not any(counts.any() for counts in again.moved[0].values())  # nothing was protected before the first


def test_an_empty_state_empties(tiny_model):
    space = space_of(tiny_model(), range(2), "exact")
    space.load_state_dict(space_of(tiny_model(), (), "exact").state_dict())
    assert space.tasks == 0 and not space.projectors() and not space.boxes() and not space.moved


def test_a_state_of_another_architecture_is_refused_by_the_names_that_differ():
    (vim, inputs, _), (defocus, *_) = build("vim"), build("defocus")
    space, other = NullSpace(vim), NullSpace(defocus)
    for one in (space, other):
        one.consolidate([inputs(0)])
    before = copied(other)
    with pytest.raises(UserError, match="names on one side only: ") as error:
        other.load_state_dict(space.state_dict())
    listed = str(error.value).split("only: ")[1].removesuffix(", ....").split(", ")
    assert set(listed) <= set(space.state_dict()) ^ set(before) and len(listed) == 6
    assert same(other.state_dict(), before)


def test_tasks_kept_apart_do_not_load_as_a_sum(tiny_model):
    apart, together = (space_of(tiny_model(), range(2), keep_tasks=keep) for keep in (True, False))
    for one, other in ((apart, together), (together, apart)):
        before = copied(one)
        with pytest.raises(UserError, match="another model or setting"):
            one.load_state_dict(other.state_dict())
        assert same(one.state_dict(), before)


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
    names = [name for name in snapshot(model) if not any(part.parameter == name for _, part in space.parts())]
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
