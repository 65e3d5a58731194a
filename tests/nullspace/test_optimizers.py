"""Any optimizer, in any precision: its steps stay in the null space."""

import copy

import pytest
import schedulefree
import torch
from loop_help import assert_kept, doubles, drift, protected, teach, wanted
from nullspace_help import OUT, X_PROJ, images, set_random_gradients, snapshot
from timm.optim import Lion

from mambacl.nullspace import NullSpace

# Optimizers


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.01),
    "foreach Adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "Lion": lambda p: Lion(p, lr=0.003, weight_decay=0.1),
    "cautious Lion": lambda p: Lion(p, lr=0.003, caution=True, foreach=False),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_kept_for_all_tasks_keeps_all_of_them(tiny_model, kind):
    model = tiny_model().double()
    space = NullSpace(model, "exact")
    optimizer = space.wrap(OPTIMIZERS[kind](space.parameters()))
    before = []
    for task in range(2):
        teach(model, optimizer, steps=3, seed=100 * task)
        space.consolidate([doubles(task)])
        before.append(model(doubles(task)).detach())
    start = snapshot(model)
    teach(model, optimizer)
    for task in range(2):
        assert_kept(model, start, doubles(task), before[task], 1e-10)


def test_a_step_with_a_closure_is_projected(tiny_model):
    model, space, old, before = protected(tiny_model)
    optimizer, start = space.wrap(torch.optim.LBFGS(space.parameters(), lr=0.1, max_iter=4)), snapshot(model)

    def closure():
        optimizer.zero_grad()
        loss = (model(doubles(100, 4)) - wanted(model)).square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first
    assert_kept(model, start, old, before)


SCHEDULE_FREE = {
    "AdamW": lambda p: schedulefree.AdamWScheduleFree(p, lr=0.01, weight_decay=0.1),
    "AdamW one by one": lambda p: schedulefree.AdamWScheduleFree(p, lr=0.01, foreach=False),
    "SGD": lambda p: schedulefree.SGDScheduleFree(p, lr=0.05, weight_decay=0.01),
    "RAdam": lambda p: schedulefree.RAdamScheduleFree(p, lr=0.05),
}


@pytest.mark.parametrize("kind", SCHEDULE_FREE)
def test_both_sequences_of_a_schedule_free_optimizer_stay_in_the_null_space(tiny_model, kind):
    model, space, old, before = protected(tiny_model)
    optimizer, start = space.wrap(SCHEDULE_FREE[kind](space.parameters())), snapshot(model)
    for epoch in range(2):
        optimizer.train()
        teach(model, optimizer, steps=7, seed=100 * (epoch + 1))
        assert drift(model, old, before) < 1e-11
        training = snapshot(model)
        optimizer.eval()
        assert_kept(model, start, old, before)
    assert any(not torch.equal(p, training[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("kind", SCHEDULE_FREE)
def test_averaged_weights_keep_a_task_that_ended_in_the_middle_of_the_optimizers_life(tiny_model, kind):
    model = tiny_model().double()
    space = NullSpace(model, "exact")
    optimizer = space.wrap(SCHEDULE_FREE[kind](space.parameters()))
    before = []
    for task in range(3):
        optimizer.train()
        start = snapshot(model)
        teach(model, optimizer, steps=5, seed=100 * task)
        optimizer.eval()
        for number, kept in enumerate(before):
            assert_kept(model, start, doubles(number), kept, 1e-10)
        space.consolidate([doubles(task)])
        before.append(model(doubles(task)).detach())


def test_averaged_weights_stay_in_their_box(tiny_model):
    model = tiny_model().double()
    space = NullSpace(model, "exact", relax=0.1)
    optimizer = space.wrap(schedulefree.AdamWScheduleFree(space.parameters(), lr=0.02))
    for task in range(2):
        optimizer.train()
        teach(model, optimizer, steps=6, seed=100 * task)
        optimizer.eval()
        for name, box in space.projected_step.boxes().items():
            A_log = model.get_parameter(name)
            assert (A_log >= box.lower - 1e-12).all() and (A_log <= box.upper + 1e-12).all()
        space.consolidate([doubles(task)])


def test_rows_that_do_not_train_stay_in_both_sequences(tiny_model):
    model = tiny_model()
    space, start = NullSpace(model, W_B={"trains": False}), snapshot(model)
    optimizer = space.wrap(schedulefree.AdamWScheduleFree(space.parameters(), lr=0.01))
    optimizer.train()
    teach(model, optimizer, steps=3)
    for mode in (optimizer.train, optimizer.eval):
        mode()
        name = f"blocks.0.{X_PROJ}"
        torch.testing.assert_close(model.get_parameter(name)[4:12], start[name][4:12], rtol=1e-6, atol=1e-7)


def test_a_schedule_free_step_is_counted_once(tiny_model):
    model, space, *_ = protected(tiny_model)
    optimizer, start = space.wrap(schedulefree.AdamWScheduleFree(space.parameters(), lr=0.01)), snapshot(model)
    optimizer.train()
    teach(model, optimizer, steps=1)
    name = f"blocks.1.{OUT}"
    applied = (model.get_parameter(name) - start[name]).square().sum()
    torch.testing.assert_close(space.update_energy()[name][2], applied.detach())


def wrapper(space, **options):
    return schedulefree.ScheduleFreeWrapper(space.wrap(torch.optim.SGD(space.parameters(), lr=0.05)), **options)


def test_the_schedule_free_wrapper_around_a_wrapped_optimizer(tiny_model):
    model, space, old, before = protected(tiny_model)
    optimizer, start = wrapper(space), snapshot(model)
    for epoch in range(2):
        optimizer.train()
        teach(model, optimizer, seed=100 * (epoch + 1))
        assert drift(model, old, before) < 1e-11
        optimizer.eval()
        assert_kept(model, start, old, before)


class Renamed(schedulefree.AdamWScheduleFree):
    pass


KEEPING_COPIES = {
    "a subclass": lambda p: Renamed(p, lr=0.01),
    "the reference": lambda p: schedulefree.AdamWScheduleFreeReference(p, lr=0.01),
}


@pytest.mark.parametrize("kind", KEEPING_COPIES)
def test_every_copy_that_an_optimizer_keeps_is_projected(tiny_model, kind):
    model, space, old, before = protected(tiny_model)
    optimizer, start = space.wrap(KEEPING_COPIES[kind](space.parameters())), snapshot(model)
    optimizer.train()
    teach(model, optimizer)
    optimizer.eval()
    assert_kept(model, start, old, before)


@pytest.mark.parametrize("kind", SCHEDULE_FREE)
def test_copies_are_projected_although_some_parameter_has_no_gradient(tiny_model, kind):
    model = tiny_model(num_classes=3).double()
    space = NullSpace(model, "exact", leave=("head",))
    space.consolidate([doubles()])
    before, start = model.forward_features(doubles()).detach(), snapshot(model)
    optimizer = space.wrap(SCHEDULE_FREE[kind]([*space.parameters(), *model.head.parameters()]))
    optimizer.train()
    for step in range(5):
        optimizer.zero_grad()
        model.forward_features(doubles(100 + step, 4)).sin().sum().backward()  # the head is not in use
        optimizer.step()
    optimizer.eval()
    assert any((p - start[n]).norm() > 1e-3 for n, p in model.named_parameters())
    assert (model.forward_features(doubles()) - before).norm() < 1e-11 * before.norm()


def refilled(optimizer, parameters):
    group = optimizer.param_groups.pop()
    group["params"] = parameters
    optimizer.add_param_group(group)


def replaced(optimizer, parameters):
    optimizer.param_groups[0]["params"] = parameters


@pytest.mark.parametrize("change", [refilled, replaced])
def test_groups_may_be_filled_anew(tiny_model, change):
    model, space, old, before = protected(tiny_model)
    mixers = [block.mixer for block in model.blocks]
    optimizer, start = space.wrap(torch.optim.SGD([m.x_proj.weight for m in mixers], lr=0.1)), snapshot(model)
    for step in range(2):
        set_random_gradients(model, step)
        optimizer.step()
        change(optimizer, [m.out_proj.weight for m in mixers])
    assert_kept(model, start, old, before)


def test_parameters_may_move_to_other_memory(tiny_model):
    model, space, old, before = protected(tiny_model)
    optimizer, start = space.wrap(torch.optim.SGD(space.parameters(), lr=0.1)), snapshot(model)
    for step in range(3):
        set_random_gradients(model, step)
        optimizer.step()
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    assert_kept(model, start, old, before)


def test_the_layout_of_weights_changes_nothing(tiny_model):
    models = []
    for layout in (torch.contiguous_format, torch.channels_last):
        model = tiny_model().double().to(memory_format=layout)
        space = NullSpace(model, "paper", layers="all")
        space.consolidate([doubles(count=4)])
        optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=0.1))
        for step in range(3):
            set_random_gradients(model, step)
            optimizer.step()
        models.append(model)
    for name, parameter in models[0].named_parameters():
        torch.testing.assert_close(parameter, models[1].get_parameter(name), rtol=1e-9, atol=1e-10, msg=name)


# Precision


def test_training_under_autocast_keeps_old_outputs(tiny_model):
    model = tiny_model()
    space = NullSpace(model, "exact", rank="tolerance:1e-9")
    space.consolidate([images(1)])
    before, start = model(images(1)).detach(), snapshot(model)

    def run(batch):
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch).float()

    teach(model, space.wrap(torch.optim.AdamW(space.parameters(), lr=0.01)), run=run)
    assert_kept(model, start, images(1), before, 1e-5)


def test_a_consolidation_under_autocast_sees_the_same_features(tiny_model):
    model = tiny_model()
    plain, mixed = NullSpace(model), NullSpace(model)
    plain.consolidate([images()])
    with torch.autocast("cpu", torch.bfloat16):
        mixed.consolidate([images()])
    for name, covariance in plain.covariances().items():
        assert mixed.covariances()[name].dtype == torch.float64
        assert (mixed.covariances()[name] - covariance).norm() < 0.03 * covariance.norm(), name
    for name, projector in mixed.projectors().items():
        V = projector.basis
        torch.testing.assert_close(V.mT @ V, torch.eye(V.shape[-1]), rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("A_dtype", [torch.bfloat16, torch.float32], ids=["all bfloat16", "A in float32"])
@pytest.mark.parametrize("setting", ["paper", "exact"])
def test_parameters_in_bfloat16_move_by_the_projected_step_rounded(tiny_model, setting, A_dtype):
    model = tiny_model(mamba={"residual_in_fp32": False}).bfloat16()
    for block in model.blocks:
        block.mixer.A_log.data = block.mixer.A_log.data.to(A_dtype)
    space = NullSpace(model, setting, rank="fraction:0.5")
    space.consolidate([images().bfloat16()])
    free, start = copy.deepcopy(model), snapshot(model)
    set_random_gradients(model, 0)
    set_random_gradients(free, 0)
    space.wrap(torch.optim.SGD(model.parameters(), lr=0.1)).step()
    torch.optim.SGD(free.parameters(), lr=0.1).step()
    parts = {part.name: part for _, part in space.selection.parts()}
    for name, projector in space.projectors().items():
        part, parameter = parts[name], parts[name].parameter
        tables = (start[parameter], model.get_parameter(parameter), free.get_parameter(parameter))
        old, new, unprojected = (part.of(values).detach() for values in tables)
        assert new.dtype == (A_dtype if part.kind == "A" else torch.bfloat16)
        change, P = unprojected.float() - old.float(), projector.dense()
        expected = old.float() + (P @ change if part.side == "left" else change @ P)
        assert ((new - expected).abs() <= torch.finfo(new.dtype).eps * expected.abs() + 1e-6).all(), name
    for name, box in space.projected_step.boxes().items():
        assert box.lower.dtype == A_dtype and torch.equal(model.get_parameter(name), start[name])
