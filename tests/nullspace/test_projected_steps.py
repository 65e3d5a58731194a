"""The property that the null space exists for, and the projected steps of any optimizer."""

import copy

import pytest
import torch
from nullspace_help import A_LOG, OUT, X_PROJ, consolidated, images, set_random_gradients, snapshot

from mambacl.errors import UserError
from mambacl.nullspace import PAPER_KINDS, NullSpace


def train_elsewhere(model, optimizer, steps=5):
    """A few steps on other images, far enough to change every prediction."""
    wanted = torch.randn(4, model.num_features, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    for step in range(steps):
        optimizer.zero_grad()
        (model(images(4, seed=100 + step, dtype=torch.float64)) - wanted).square().sum().backward()
        optimizer.step()


EXACT = {"rank": "energy:1.0", "eta": 1.0, "A": {"trains": False}}


@pytest.mark.parametrize("tasks", [1, 2])
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD], ids=["Adam", "SGD"])
def test_in_an_exact_null_space_old_inputs_keep_their_outputs(tiny_model, make, tasks):
    """One image has 17 tokens, so that its features leave 47 of the 64 directions free; two leave 30."""
    outputs = {}
    for setting in ("protected", "free"):
        model = tiny_model().double()
        space = NullSpace(model, **EXACT)
        if setting == "free":
            space = NullSpace(model, space.setting.without_projection())
        optimizer = space.wrap(make(space.parameters(), lr=0.01))
        before, changes = [], []
        for task in range(tasks):
            old = images(1, seed=task, dtype=torch.float64)
            train_elsewhere(model, optimizer)
            space.consolidate([old])
            before.append(model(old).detach())
        weights = snapshot(model)
        train_elsewhere(model, optimizer)
        for task in range(tasks):
            changes.append((model(images(1, seed=task, dtype=torch.float64)) - before[task]).abs().max().item())
        moved = [(model.get_parameter(name) - weights[name]).norm().item() for name in space.trained_names()]
        assert min(moved) > 1e-3
        outputs[setting] = changes
    assert max(outputs["protected"]) < 1e-6 < 1e-2 < min(outputs["free"])


@pytest.mark.parametrize("kind", ["W_delta", "W_B", "W_C", "out"])
def test_each_protected_kind_alone_leaves_old_outputs_alone(tiny_model, kind):
    model = tiny_model().double()
    others = {other: {"trains": other == kind} for other in PAPER_KINDS}
    space = NullSpace(model, rank="energy:1.0", eta=1.0, **others)
    old = images(1, dtype=torch.float64)
    space.consolidate([old])
    before, weights = model(old).detach(), snapshot(model)
    train_elsewhere(model, space.wrap(torch.optim.Adam(space.parameters(), lr=0.05)))
    assert (model(old) - before).abs().max() < 1e-6
    model.load_state_dict(weights)
    train_elsewhere(model, torch.optim.Adam(space.parameters(), lr=0.05))
    assert (model(old) - before).abs().max() > 1e-3


def test_new_inputs_do_change(tiny_model):
    model = tiny_model().double()
    space = NullSpace(model, **EXACT)
    space.consolidate([images(1, dtype=torch.float64)])
    new = images(4, seed=100, dtype=torch.float64)
    before = model(new).detach()
    train_elsewhere(model, space.wrap(torch.optim.Adam(space.parameters(), lr=0.01)))
    assert (model(new) - before).abs().max() > 1e-2


OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False),
    "foreach Adam": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True, weight_decay=1e-2),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


def project_by_hand(space, before, model):
    """The change of every protected part times the dense matrix, from the paper's side."""
    for name, projector in space.projectors().items():
        parameter, _, rows = name.rstrip("]").partition("[")
        rows = slice(*map(int, rows.split(":"))) if rows else slice(None)
        new, old, P = model.get_parameter(parameter).data[rows], before[parameter][rows], projector.dense()
        new.copy_(old + (P @ (new - old) if parameter.endswith("A_log") else (new - old) @ P))


def restore_second_maps(model, before):
    """W_dt does not train unless a setting says so."""
    for name, parameter in model.named_parameters():
        if name.endswith("dt_proj.weight"):
            parameter.data.copy_(before[name])


@pytest.mark.parametrize("setting", ["paper", "public-code"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_wrapped_step_is_the_optimizers_own_step_projected(tiny_model, kind, setting):
    model = tiny_model().double()
    space = NullSpace(model, setting, rank="fraction:0.6")
    space.consolidate([images(dtype=torch.float64)])
    twin = copy.deepcopy(model)
    optimizer = space.wrap(OPTIMIZERS[kind](list(model.parameters())))
    plain = OPTIMIZERS[kind](list(twin.parameters()))
    for step in range(3):
        set_random_gradients(model, seed=step)
        set_random_gradients(twin, seed=step)
        optimizer.step()
        before = snapshot(twin)
        plain.step()
        project_by_hand(space, before, twin)
        restore_second_maps(twin, before)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, twin.get_parameter(name), rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_moments_never_see_the_projection(tiny_model, kind):
    model = tiny_model()
    twin = copy.deepcopy(model)
    space = NullSpace(model)
    space.consolidate([images()])
    names = space.trained_names()
    optimizer = space.wrap(OPTIMIZERS[kind](space.parameters()))
    plain = OPTIMIZERS[kind]([twin.get_parameter(name) for name in names])
    if plain.defaults["weight_decay"]:
        for group in [*optimizer.param_groups, *plain.param_groups]:
            group["weight_decay"] = 0.0  # decay feeds the parameters back into the moments
    for step in range(3):
        set_random_gradients(model, seed=step)
        set_random_gradients(twin, seed=step)
        optimizer.step()
        plain.step()
    for name in names:
        ours, theirs = optimizer.state[model.get_parameter(name)], plain.state[twin.get_parameter(name)]
        assert ours.keys() == theirs.keys()
        for word, value in theirs.items():
            assert torch.equal(torch.as_tensor(ours[word]), torch.as_tensor(value)), (name, word)
        assert not torch.equal(model.get_parameter(name), twin.get_parameter(name))


def test_the_first_task_is_not_projected(tiny_model):
    model = tiny_model()
    twin = copy.deepcopy(model)
    space = NullSpace(model)
    optimizer = space.wrap(torch.optim.Adam(model.parameters(), lr=0.1))
    plain = torch.optim.Adam(twin.parameters(), lr=0.1)
    before = snapshot(twin)
    for network, stepped in ((model, optimizer), (twin, plain)):
        set_random_gradients(network, seed=0)
        stepped.step()
    restore_second_maps(twin, before)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_consolidation_takes_effect_on_an_optimizer_wrapped_before_it(tiny_model):
    model = tiny_model()
    space = NullSpace(model, eta=1.0, rank="fraction:0.0")  # nothing is null: no protected value may move
    optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=0.1))
    space.consolidate([images()])
    before = snapshot(model)
    set_random_gradients(model, seed=0)
    optimizer.step()
    for name in space.trained_names():
        torch.testing.assert_close(model.get_parameter(name).detach(), before[name], rtol=0, atol=1e-6)


def test_eta_zero_is_no_protection(tiny_model):
    model = tiny_model().double()
    twin = copy.deepcopy(model)
    space = NullSpace(model, eta=0.0)
    space.consolidate([images(dtype=torch.float64)])
    before = snapshot(twin)
    for network, wrap in ((model, space.wrap), (twin, lambda optimizer: optimizer)):
        set_random_gradients(network, seed=0)
        wrap(torch.optim.SGD(network.parameters(), lr=0.1)).step()
    restore_second_maps(twin, before)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, twin.get_parameter(name))


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("kind, fixed", [("W_delta", (0, 4)), ("W_B", (4, 12)), ("W_C", (12, 20))])
def test_rows_that_do_not_train_stay_as_they_are_to_the_bit(tiny_model, kind, fixed, consolidated):
    model = tiny_model()
    space = NullSpace(model, A={"trains": False}, **{kind: {"trains": False}})
    assert space.trained_names() == [f"blocks.{i}.{name}" for i in range(2) for name in (X_PROJ, OUT)]
    if consolidated:
        space.consolidate([images()])
    before = snapshot(model)
    optimizer = space.wrap(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1))
    set_random_gradients(model, seed=0)
    optimizer.step()
    for index in range(2):
        same = (model.get_parameter(f"blocks.{index}.{X_PROJ}") == before[f"blocks.{index}.{X_PROJ}"]).all(1)
        assert same.nonzero().flatten().tolist() == list(range(*fixed))
        assert torch.equal(model.get_parameter(f"blocks.{index}.{A_LOG}"), before[f"blocks.{index}.{A_LOG}"])


def test_parameters_of_no_kind_are_left_to_the_optimizer(tiny_model):
    model = tiny_model(num_classes=3)
    twin = copy.deepcopy(model)
    space = NullSpace(model)
    space.consolidate([images()])
    for network, wrap in ((model, space.wrap), (twin, lambda optimizer: optimizer)):
        set_random_gradients(network, seed=0)
        wrap(torch.optim.Adam(network.parameters(), lr=0.1)).step()
    known = {part.parameter for _, part in space.selection.parts()}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, twin.get_parameter(name)) == (name not in known), name


def test_wrap_gives_back_the_same_optimizer(tiny_model):
    space = NullSpace(tiny_model())
    optimizer = torch.optim.Adam(space.parameters())
    assert space.wrap(optimizer) is optimizer


def test_an_optimizer_of_other_parameters_is_refused(tiny_model):
    space = NullSpace(tiny_model(num_classes=2))
    with pytest.raises(UserError, match=r"build it from space\.parameters\(\)"):
        space.wrap(torch.optim.Adam(space.model.head.parameters()))


def test_wrapping_twice_projects_once(tiny_model):
    changes = []
    for times in (1, 2):
        model = tiny_model()
        space = consolidated(model)
        optimizer = torch.optim.SGD(space.parameters(), lr=0.1)
        for _ in range(times):
            assert space.wrap(optimizer) is optimizer
        before = model.blocks[0].mixer.out_proj.weight.detach().clone()
        model(images(seed=5)).square().sum().backward()
        optimizer.step()
        changes.append(model.blocks[0].mixer.out_proj.weight.detach() - before)
    assert torch.equal(changes[0], changes[1]) and changes[0].abs().max() > 0
