"""The null space in a user's own loop: compiled and wrapped models, other optimizers, mixed precision, batches of every
kind."""

import copy
import warnings

import pytest
import schedulefree
import torch
import torch.nn.functional as F
from adapter_models import build
from nullspace_help import A_LOG, OUT, X_PROJ, hooks, images, set_random_gradients, snapshot
from timm.optim import Lion
from torch import nn

from mambacl.nullspace import NullSpace, dense_projector, null_rank


def doubles(seed=0, count=1):
    return images(count, seed, torch.float64)


def wanted(model, count=4):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(count, model.num_features, generator=generator).to(next(model.parameters()).dtype)


def teach(model, optimizer, steps=5, seed=100, run=None):
    """A few steps on other images."""
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        optimizer.zero_grad()
        ((run or model)(images(4, seed + step, dtype)) - wanted(model)).square().sum().backward()
        optimizer.step()


@torch.no_grad()
def drift(model, old, before):
    return ((model(old) - before).norm() / before.norm()).item()


def protected(tiny_model, setting="exact", **overrides):
    """A model in float64, its space after one task, an old image and the output for it."""
    model = tiny_model().double()
    space = NullSpace(model, setting, **overrides)
    space.consolidate([doubles()])
    return model, space, doubles(), model(doubles()).detach()


def assert_kept(model, start, old, before, tolerance=1e-11):
    moved = [(model.get_parameter(name) - value).norm().item() for name, value in start.items()]
    assert max(moved) > 1e-3, "nothing was learned, so nothing is shown"
    assert drift(model, old, before) < tolerance


# Compiled and wrapped models


@pytest.fixture
def compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model, way, backend):
    if way == "torch.compile":
        return torch.compile(model, backend=backend)
    model.compile(backend=backend)
    return model


WAYS = [
    ("torch.compile", "eager", "compiled first"),
    ("torch.compile", "aot_eager", "space first"),
    ("model.compile", "eager", "compiled first"),
    ("model.compile", "eager", "space first"),
]


def small(tiny_model):
    """One block and five tokens, quick to compile."""
    return tiny_model(depth=1, img_size=8).double()


def little(seed=0, count=1):
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("way, backend, order", WAYS)
def test_a_compiled_model_that_ran_before_is_protected_like_the_plain_one(tiny_model, compiler, way, backend, order):
    plain = NullSpace(small(tiny_model), "exact")
    plain.consolidate([little()])
    model = small(tiny_model)
    space = NullSpace(model, "exact") if order == "space first" else None
    fast = compiled(model, way, backend)
    fast(little(5, 4))
    space = space or NullSpace(fast, "exact")
    space.consolidate([little()], forward=lambda batch: fast(batch))
    assert space.covariances().keys() == plain.covariances().keys()
    for name, covariance in plain.covariances().items():
        torch.testing.assert_close(space.covariances()[name], covariance, rtol=1e-12, atol=1e-12)
    for name, decomposition in plain.decompositions().items():
        assert space.decompositions()[name].rank == decomposition.rank
    before, start = model.forward(little()).detach(), snapshot(model)
    optimizer = space.wrap(torch.optim.Adam(space.parameters(), lr=0.01))
    for step in range(2):
        (fast(little(5 + step, 4)) - wanted(model)).square().sum().backward()
        optimizer.step()
    assert max((model.get_parameter(name) - value).norm().item() for name, value in start.items()) > 1e-3
    assert (model.forward(little()) - before).norm() < 1e-11 * before.norm()


def test_a_compiled_model_may_be_the_forward_function(tiny_model, compiler):
    model = small(tiny_model)
    NullSpace(model).consolidate([little()], forward=torch.compile(model, backend="eager"))


def test_compiled_models_have_the_names_of_plain_ones(tiny_model, compiler):
    plain = NullSpace(tiny_model())
    for wrapped in (
        torch.compile(tiny_model(), backend="eager"),
        torch.compile(nn.DataParallel(tiny_model()), backend="eager"),
        nn.DataParallel(torch.compile(tiny_model(), backend="eager")),
    ):
        space = NullSpace(wrapped)
        assert space.trained_names() == plain.trained_names()
        assert [p.name for p in space.protections()] == [p.name for p in plain.protections()]
        space.consolidate([images()])
        assert not any("_orig_mod" in name or "module" in name for name in space.state_dict())


def test_a_state_goes_from_a_plain_to_a_compiled_model(tiny_model, compiler):
    plain = NullSpace(tiny_model())
    plain.consolidate([images()])
    space = NullSpace(torch.compile(tiny_model(), backend="eager"))
    space.load_state_dict(plain.state_dict())
    assert all(torch.equal(space.covariances()[n], c) for n, c in plain.covariances().items())


def test_only_the_consolidation_runs_uncompiled(tiny_model, compiler):
    calls = []

    def counting(graph, _):
        def run(*arguments):
            calls.append(1)
            return graph(*arguments)

        return run

    model = small(tiny_model)
    fast = torch.compile(model, backend=counting)
    with torch.no_grad():
        fast(little())
        once = len(calls)
        space = NullSpace(fast)
        space.consolidate([little()], forward=lambda batch: fast(batch))
        assert len(calls) == once
        fast(little())
    assert len(calls) == 2 * once and hooks(model) == 0


def test_blocks_compiled_in_place_are_protected(tiny_model, compiler):
    model, plain = small(tiny_model), NullSpace(small(tiny_model))
    model.blocks[0].compile(backend="eager")
    model(little())
    space = NullSpace(model)
    for one in (space, plain):
        one.consolidate([little()])
    for name, covariance in plain.covariances().items():
        torch.testing.assert_close(space.covariances()[name], covariance, rtol=1e-12, atol=1e-12)


def test_a_mixer_compiled_by_itself_is_protected(tiny_model, compiler):
    model = tiny_model()
    model.blocks[0].mixer = torch.compile(model.blocks[0].mixer, backend="eager")
    NullSpace(model).consolidate([images()])


def test_a_block_compiled_by_itself_keeps_its_names(tiny_model, compiler):
    model = tiny_model()
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    assert NullSpace(model).trained_names() == NullSpace(tiny_model()).trained_names()


def test_data_parallel_is_looked_through(tiny_model):
    model = tiny_model().double()
    wrapped = nn.DataParallel(model)
    space = NullSpace(wrapped, "exact")
    assert space.model is model and not any("module" in name for name in space.trained_names())
    space.consolidate([doubles()], forward=wrapped)
    before, start = model(doubles()).detach(), snapshot(model)
    teach(model, space.wrap(torch.optim.Adam(wrapped.parameters(), lr=0.01)), run=wrapped)
    assert drift(model, doubles(), before) > 1e-3  # norms and the like were given to the optimizer, too
    model.load_state_dict(start)
    teach(model, space.wrap(torch.optim.Adam(space.parameters(), lr=0.01)), run=wrapped)
    assert_kept(model, start, doubles(), before)


def test_consolidate_inside_inference_mode_leaves_a_space_that_trains(tiny_model):
    model = tiny_model().double()
    space = NullSpace(model, "exact")
    with torch.inference_mode():
        space.consolidate([doubles()])
    teach(model, space.wrap(torch.optim.SGD(space.parameters(), lr=0.01)), steps=1)


def test_a_forward_in_inference_mode_may_be_given(tiny_model):
    model = tiny_model().double()
    space = NullSpace(model, "exact", relax=0.05)
    for task in range(2):
        space.consolidate([doubles(task), doubles(task + 5)], forward=torch.inference_mode()(model.forward))
        teach(model, space.wrap(torch.optim.SGD(space.parameters(), lr=0.01)), steps=1)


# The loop


def test_accumulated_gradients_are_one_big_batch(tiny_model):
    models = []
    for pieces in (1, 4):
        model, space, *_ = protected(tiny_model, "paper", rank="energy:0.9")
        optimizer = space.wrap(torch.optim.AdamW(space.parameters(), lr=0.01, eps=1e-4))
        for step in range(3):
            optimizer.zero_grad()
            inputs, targets = doubles(100 + step, 8), wanted(model, 8)
            for x, y in zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True):
                (model(x) - y).square().sum().backward()
            optimizer.step()
        models.append((model, space))
    (one, first), (other, second) = models
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(parameter, other.get_parameter(name), rtol=1e-8, atol=1e-9)
    for name, moved in first.moved_now().items():
        torch.testing.assert_close(moved, second.moved_now()[name], rtol=1e-6, atol=1e-9)


def dense_step(space, model, start, optimizer):
    """One step by the book: the optimizer's own, times whole matrices, each from its covariance by SVD."""
    optimizer.step()
    setting, boxes, covariances = space.setting, space.boxes(), space.covariances()
    for _, part in space.parts():
        parameter = model.get_parameter(part.parameter).detach()
        old, new = part.of(start[part.parameter]), part.of(parameter)
        if part.name in boxes:
            allowed = torch.where(boxes[part.name].protects(), old, new)
        elif part.name in covariances:
            Q = covariances[part.name]
            spectrum = torch.linalg.svdvals(Q).to(getattr(torch, setting.spectrum))
            P = dense_projector(Q, null_rank(spectrum, setting.rank), setting.eta, setting.scaling)
            change = new - old
            allowed = old + (P @ change if part.side == "left" else change @ P)
        else:
            allowed = old
        new.copy_(allowed)


@pytest.mark.parametrize("clipped", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("setting", ["paper", "public-code", "exact"])
def test_every_step_is_the_textbooks(tiny_model, setting, clipped):
    count = 1 if setting == "exact" else 4
    model = tiny_model().double()
    space = NullSpace(model, setting)
    space.consolidate([doubles(count=count)])
    twin = copy.deepcopy(model)
    optimizer = space.wrap(torch.optim.Adam(space.parameters(), lr=0.01))
    plain = torch.optim.Adam([twin.get_parameter(name) for name in space.trained_names()], lr=0.01)
    for step in range(4):
        for network in (model, twin):
            network.zero_grad()
            (network(doubles(100 + step, 4)) - wanted(model)).square().sum().backward()
            if clipped:
                norm = nn.utils.clip_grad_norm_([network.get_parameter(n) for n in space.trained_names()], 0.1)
                assert norm > 0.1
        optimizer.step()
        dense_step(space, twin, snapshot(twin), plain)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter, twin.get_parameter(name), rtol=1e-9, atol=1e-10, msg=name)


def test_groups_have_their_own_rates_and_may_come_later(tiny_model):
    model, space, old, before = protected(tiny_model)
    named, start = dict(model.named_parameters()), snapshot(model)
    first = [p for n, p in named.items() if n.endswith(X_PROJ)]
    optimizer = space.wrap(torch.optim.SGD([{"params": first, "lr": 0.0}], lr=0.1))
    optimizer.add_param_group({"params": [p for n, p in named.items() if n.endswith(OUT)]})
    optimizer.add_param_group({"params": [p for n, p in named.items() if n.endswith(A_LOG)], "lr": 10.0})
    teach(model, optimizer, steps=3)
    assert drift(model, old, before) < 1e-11
    moved = {n for n, p in named.items() if not torch.equal(p, start[n])}
    assert moved == {n for n in named if n.endswith(OUT)}  # x_proj by its rate, A by its box


def test_a_group_added_later_is_projected_by_the_textbook(tiny_model):
    model = tiny_model().double()
    space = NullSpace(model, "paper")
    space.consolidate([doubles(count=4)])
    twin = copy.deepcopy(model)
    optimizers = []
    for network in (model, twin):
        first, *rest = (network.get_parameter(name) for name in space.trained_names())
        optimizer = torch.optim.AdamW([first], lr=0.01)
        optimizers.append(space.wrap(optimizer) if network is model else optimizer)
        optimizer.add_param_group({"params": rest, "lr": 0.003, "weight_decay": 0.1})
    for step in range(2):
        set_random_gradients(model, step)
        set_random_gradients(twin, step)
        optimizers[0].step()
        dense_step(space, twin, snapshot(twin), optimizers[1])
    for name in space.trained_names():
        torch.testing.assert_close(model.get_parameter(name), twin.get_parameter(name), rtol=1e-9, atol=1e-10, msg=name)


def test_a_scheduler_sets_the_rate_as_ever(tiny_model):
    model, space, old, before = protected(tiny_model)
    optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=0.01))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 3 else 0.0)
        start, rates = snapshot(model), []
        for step in range(3):
            teach(model, optimizer, steps=1, seed=100 + step)
            scheduler.step()
            rates += scheduler.get_last_lr()
    assert_kept(model, start, old, before)
    still = snapshot(model)
    teach(model, optimizer, steps=1)
    assert rates == [0.01, 0.01, 0.0] and all(torch.equal(p, still[n]) for n, p in model.named_parameters())


def test_freezing_the_others_leaves_the_loop_short(tiny_model):
    model, space, old, before = protected(tiny_model)
    space.freeze_others()
    start = snapshot(model)
    teach(model, space.wrap(torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)))
    assert_kept(model, start, old, before)


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
        for name, box in space.boxes().items():
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
    torch.testing.assert_close(space.moved_now()[name][2], applied.detach())


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
    parts = {part.name: part for _, part in space.parts()}
    for name, projector in space.projectors().items():
        part, parameter = parts[name], parts[name].parameter
        tables = (start[parameter], model.get_parameter(parameter), free.get_parameter(parameter))
        old, new, unprojected = (part.of(values).detach() for values in tables)
        assert new.dtype == (A_dtype if part.kind == "A" else torch.bfloat16)
        change, P = unprojected.float() - old.float(), projector.dense()
        expected = old.float() + (P @ change if part.side == "left" else change @ P)
        assert ((new - expected).abs() <= torch.finfo(new.dtype).eps * expected.abs() + 1e-6).all(), name
    for name, box in space.boxes().items():
        assert box.lower.dtype == A_dtype and torch.equal(model.get_parameter(name), start[name])


# What is trained


def test_a_head_that_is_left_trains_freely_while_every_layer_is_protected(tiny_model):
    model = tiny_model(num_classes=3).double()
    space = NullSpace(model, "exact", layers="all", leave=("head",))
    assert not any(name.startswith("head") for name in space.trained_names())
    assert not any(p.name.startswith("head") for p in space.protections()) and "head" not in str(space.describe())
    space.consolidate([doubles()])
    space.freeze_others()
    assert model.head.weight.requires_grad
    with torch.no_grad():
        before = model.forward_features(doubles())
    twin, start = copy.deepcopy(model), snapshot(model)
    parameters = [*space.parameters(), *model.head.parameters()]
    optimizer = space.wrap(torch.optim.Adam(parameters, lr=0.01))
    plain = torch.optim.Adam(twin.head.parameters(), lr=0.01)
    for stepped, network in ((optimizer, model), (plain, twin)):
        F.cross_entropy(network(doubles(3, 4)), torch.tensor([0, 1, 2, 0])).backward()
        stepped.step()
    assert torch.equal(model.head.weight, twin.head.weight)
    assert any(not torch.equal(model.get_parameter(n), start[n]) for n in space.trained_names())
    with torch.no_grad():
        after = model.forward_features(doubles())
    assert (after - before).norm() / before.norm() < 1e-11


def test_a_module_inside_a_block_can_be_left(tiny_model):
    space = NullSpace(tiny_model(), leave=("blocks.0.mixer.out_proj",))
    assert f"blocks.0.{OUT}" not in space.trained_names()


def test_blocks_that_are_not_listed_do_not_train_with_every_layer(tiny_model):
    space = NullSpace(tiny_model(), layers="all", blocks=1)
    assert not any(name.startswith("blocks.1.mixer") for name in space.trained_names())


@pytest.mark.parametrize("layers", ["ssm", "all"])
def test_what_the_model_knew_before_any_training_is_kept(tiny_model, layers):
    model = tiny_model().double()
    space = NullSpace(model, "exact", layers=layers)
    optimizer = space.wrap(torch.optim.Adam(space.parameters(), lr=0.01))
    old = doubles()
    space.consolidate([old])
    before = model(old).detach()
    for task in range(1, 3):
        start = snapshot(model)
        teach(model, optimizer, steps=3, seed=100 * task)
        assert_kept(model, start, old, before, 1e-10)
        space.consolidate([doubles(task)])
    assert space.tasks == 3


# Batches


def sentences(seed=0, count=2, length=8):
    ids = torch.randint(0, 40, (count, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def test_batches_may_be_arguments_by_name():
    from transformers import BatchEncoding

    model = build("MambaForCausalLM")[0]
    batch = sentences()
    kinds = {
        "dict": [batch],
        "BatchEncoding": [BatchEncoding(batch)],
        "with other values": [{**batch, "use_cache": False}],
        "with labels": [{**batch, "labels": batch["input_ids"]}],
    }
    covariances = {}
    for kind, loader in kinds.items():
        space = NullSpace(model)
        assert space.consolidate(loader).images == 2
        covariances[kind] = space.covariances()
    for found in covariances.values():
        assert all(torch.equal(found[name], c) for name, c in covariances["dict"].items())


def test_tensors_and_tuples_are_one_argument():
    model = build("MambaForCausalLM")[0]
    ids = sentences()["input_ids"]
    first = NullSpace(model)
    first.consolidate([{"input_ids": ids}])
    for loader in ([ids], [(ids,)], [[ids, torch.zeros(2)]], torch.utils.data.DataLoader(ids, batch_size=2)):
        space = NullSpace(model)
        assert space.consolidate(loader).images == 2
        assert all(torch.equal(space.covariances()[name], c) for name, c in first.covariances().items())


def test_a_language_model_keeps_a_padded_batch():
    model = build("MambaForCausalLM")[0].double()
    space = NullSpace(model, "exact")
    old = sentences()
    space.consolidate([old])
    start = snapshot(model)
    with torch.no_grad():
        before = model(**old).logits
    optimizer = space.wrap(torch.optim.AdamW(space.parameters(), lr=0.01))
    for step in range(5):
        optimizer.zero_grad()
        batch = sentences(100 + step, 4)
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
    with torch.no_grad():
        after = model(**old).logits
    assert any((model.get_parameter(n) - start[n]).norm() > 1e-2 for n in space.trained_names())
    assert (after - before).norm() / before.norm() < 1e-11
