"""The null space in a user's own loop: compiled and wrapped models, other optimizers, mixed precision, batches of every
kind."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from block_models import build
from loop_help import assert_kept, doubles, drift, protected, teach, wanted
from nullspace_help import A_LOG, OUT, X_PROJ, hooks, images, set_random_gradients, snapshot
from torch import nn

from mambacl.nullspace import NullSpace, dense_projector, null_rank

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
        assert [p.name for p in space.selection.protections] == [p.name for p in plain.selection.protections]
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
    for name, moved in first.update_energy().items():
        torch.testing.assert_close(moved, second.update_energy()[name], rtol=1e-6, atol=1e-9)


def dense_step(space, model, start, optimizer):
    """One step by the book: the optimizer's own, times dense matrices, each from its covariance by SVD."""
    optimizer.step()
    setting, boxes, covariances = space.setting, space.projected_step.boxes(), space.covariances()
    for _, part in space.selection.parts():
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


# What is trained


def test_a_head_that_is_left_trains_freely_while_every_layer_is_protected(tiny_model):
    model = tiny_model(num_classes=3).double()
    space = NullSpace(model, "exact", layers="all", leave=("head",))
    assert not any(name.startswith("head") for name in space.trained_names())
    assert not any(p.name.startswith("head") for p in space.selection.protections) and "head" not in str(
        space.describe()
    )
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
