"""Tasks taken back and merged, where covariances are kept, one threshold for all blocks, and complete states."""

import gc

import pytest
import torch
from block_models import build
from nullspace_help import images, set_random_gradients, snapshot
from tasks_help import assert_same_protection, copied, one_sentence, same, space_of

from mambacl.errors import UserError
from mambacl.nullspace import NullSpace

# Forgetting


@pytest.mark.parametrize(
    "task, kind",
    [(0, "paper"), (1, "paper"), (2, "paper"), (1, "public-code"), (2, "exact"), (0, "boxes"), (1, "every layer")],
)
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
    assert space.tasks == 0 and not space.projectors() and not space.projected_step.boxes() and not space.covariances()
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


@pytest.mark.parametrize(
    "kind, keep_tasks",
    [("paper", False), ("paper", True), ("public-code", False), ("exact", True), ("boxes", False), ("boxes", True),
     ("every layer", True)],
)  # fmt: skip
def test_merged_spaces_are_one_that_saw_both(tiny_model, kind, keep_tasks):
    model = tiny_model()
    both = space_of(model, range(3), kind, keep_tasks=keep_tasks)
    first, second = (space_of(model, tasks, kind, keep_tasks=keep_tasks) for tasks in ((0, 1), (2,)))
    kept = copied(second)
    first.merge(second)
    assert_same_protection(first, both)
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
        for name, limits in first.projected_step.boxes().items():  # the branch moved a little, inside the first box
            other.get_parameter(name).add_(0.3 * (limits.upper - limits.lower).clamp(max=0.1) / 2)
    second = space_of(other, (1,), "boxes")
    mine, theirs = first.projected_step.boxes(), second.projected_step.boxes()
    first.merge(second)
    for name, limits in first.projected_step.boxes().items():
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
    histories = [list(space.memory.update_energy) for space in spaces]
    spaces[0].merge(spaces[1])
    assert spaces[0].tasks == 4 == len(spaces[0].memory.update_energy)
    joined = [*histories[0], *histories[1]]
    assert all(same(one, other) for one, other in zip(spaces[0].memory.update_energy, joined, strict=True))


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
    with pytest.raises(UserError, match=r"The other null space (has|belongs to another model)") as error:
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
    counts = space.update_energy()
    if way == "merge":
        space.merge(other)
    else:
        space.forget(0)
    for name, after in space.update_energy().items():
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


# States


MODELS = {"SSM": "defocus", "four directions": "vmamba", "depthwise convolutions": "mamba_ssm"}


@pytest.mark.parametrize(
    "kind, keep_tasks, way",
    [("SSM", False, "file"), ("SSM", True, "state_dict"), ("four directions", True, "file"),
     ("depthwise convolutions", False, "state_dict"), ("depthwise convolutions", True, "file")],
)  # fmt: skip
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
        one.projected_step.project(before, moved)
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
    assert len(again.memory.update_energy) == 3 == again.tasks
    for task in (1, 2):
        found = again.update_energy(task)
        assert same(found, space.update_energy(task)) and all(energy[0] > 0 for energy in found.values())
    assert not any(counts.any() for counts in again.update_energy(0).values())  # nothing was protected before the first


def test_an_empty_state_empties(tiny_model):
    space = space_of(tiny_model(), range(2), "exact")
    space.load_state_dict(space_of(tiny_model(), (), "exact").state_dict())
    assert space.tasks == 0 and not space.projectors() and not space.projected_step.boxes()
    assert not space.memory.update_energy


def test_a_state_of_another_architecture_is_refused_by_the_names_that_differ():
    (vim, inputs, _), (defocus, *_) = build("vim"), build("defocus")
    space, other = NullSpace(vim), NullSpace(defocus)
    for one in (space, other):
        one.consolidate([inputs(0)])
    before = copied(other)
    with pytest.raises(UserError, match="they differ in ") as error:
        other.load_state_dict(space.state_dict())
    shown = str(error.value).split("differ in ")[1].removesuffix(", ....").split(", ")
    assert set(shown) <= set(space.state_dict()) ^ set(before) and len(shown) == 6
    assert same(other.state_dict(), before)


def test_tasks_kept_apart_do_not_load_as_a_sum(tiny_model):
    apart, together = (space_of(tiny_model(), range(2), keep_tasks=keep) for keep in (True, False))
    for one, other in ((apart, together), (together, apart)):
        before = copied(one)
        with pytest.raises(UserError, match="another model or setting"):
            one.load_state_dict(other.state_dict())
        assert same(one.state_dict(), before)
