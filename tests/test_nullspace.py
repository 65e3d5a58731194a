"""The null space against the recorded public code, against textbook twins, and by the property that it exists for."""

import copy
import dataclasses
import itertools
import json
import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from mambacl.backbones.defocus import Mixer, MixerConfig
from mambacl.errors import UserError
from mambacl.nullspace import KINDS, SETTINGS, NullSpace, Projector, Rule, Setting, ablation, dense_projector
from mambacl.nullspace.adapters import Part, find_blocks
from mambacl.nullspace.optimizer import project_change
from mambacl.nullspace.projectors import decompose

GOLDENS = Path(__file__).parent / "goldens"
X_PROJ, A_LOG, OUT = "mixer.x_proj.weight", "mixer.A_log", "mixer.out_proj.weight"


def images(count=4, seed=0, dtype=torch.float32):
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def snapshot(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def set_random_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def relative(actual, expected):
    assert actual.shape == expected.shape
    return ((actual - expected).norm() / expected.norm()).item()


# The recorded public code


def public_name(block, word):
    return f"blocks.{block}.mixer." + (f"{word}" if word == "A_log" else f"{word}.weight")


PUBLIC_WORDS = {  # the public code's split of x_proj, and our names of the same rows
    "x_proj_step": "x_proj.weight[0:5]",
    "x_proj_B": "x_proj.weight[5:21]",
    "x_proj_C": "x_proj.weight[21:37]",
    "A_log": "A_log",
    "out_proj": "out_proj.weight",
}
PUBLIC_PARTS = [
    (public_name(block, word), f"blocks.{block}.mixer.{ours}")
    for block, (word, ours) in itertools.product(range(2), PUBLIC_WORDS.items())
]


@pytest.fixture
def public(golden_model):
    """The recorded model, its null space after the recorded batches, and the recorded numbers."""
    model, tensors, config = golden_model("mambacl_nullspace")
    space = NullSpace(model, "public-code", eta=config["null_eta"])
    space.consolidate(tensors["images"])
    return model, space, tensors, config


def test_covariances_are_the_recorded_ones(public):
    _, space, tensors, _ = public
    covariances = space.covariances()
    assert covariances.keys() == {ours for _, ours in PUBLIC_PARTS}
    for name, ours in PUBLIC_PARTS:
        assert relative(covariances[ours], tensors[f"cov/{name}"].double()) < 2e-6, name


def test_projectors_are_the_recorded_ones(public):
    _, space, tensors, _ = public
    for name, ours in PUBLIC_PARTS:
        assert relative(space.projectors()[ours].dense(), tensors[f"proj_eta0.9/{name}"]) < 5e-6, name


def test_two_projected_adam_steps_are_the_recorded_ones(public):
    model, space, tensors, config = public
    trained = [*space.parameters(), *model.head.parameters()]
    optimizer = space.wrap(torch.optim.Adam(trained, lr=config["lr"], weight_decay=config["weight_decay"]))
    for step in range(2):
        loss = F.cross_entropy(model(tensors["images"][0]), tensors["train_targets"])
        assert loss.item() == pytest.approx(tensors[f"loss_step{step}"].item(), abs=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = dict(model.named_parameters())
    for name, ours in [*PUBLIC_PARTS, ("head.weight", "head.weight"), ("head.bias", "head.bias")]:
        parameter, _, rows = ours.rstrip("]").partition("[")
        value = after[parameter].detach()
        if rows:
            value = value[slice(*map(int, rows.split(":")))]
        torch.testing.assert_close(value, tensors[f"after2steps/{name}"], rtol=0, atol=5e-7, msg=name)


STEPS = json.loads((GOLDENS / "mambacl_run" / "modadam_step.json").read_text())


@pytest.fixture(scope="module")
def recorded_steps():
    return load_file(GOLDENS / "mambacl_run" / "modadam_step.safetensors")


def projector_of(matrix, eta):
    """The low-rank form of a recorded projector, (1 - eta) I + factor V V^T."""
    values, vectors = torch.linalg.eigh(matrix.double())
    basis = vectors[:, values > (values[0] + values[-1]) / 2]
    return Projector(basis.float(), 1 - eta, (values[-1] - (1 - eta)).item())


@pytest.mark.parametrize("case", STEPS["cases"], ids=lambda case: case["name"])
def test_a_single_projected_step_is_the_recorded_one(case, recorded_steps):
    """x_proj as one parameter, whose three groups of rows have projectors of their own."""
    names = {"x_proj": ["step", "B", "C"], "A": ["A"], "out": ["out"], "head_weight": ["head_weight"]}

    def recorded(kind, name):
        return torch.cat([recorded_steps[f"{case['name']}.{kind}.{part}"] for part in names[name]])

    parameters = {name: nn.Parameter(recorded("before.param", name)) for name in names}
    heads = [parameters.pop("head_weight")]
    groups = [{"params": list(parameters.values()), "lr": case["lr"][0]}, {"params": heads, "lr": case["lr"][1]}]
    optimizer = torch.optim.Adam(groups, betas=STEPS["betas"], eps=STEPS["eps"], weight_decay=case["wd"])
    parameters["head_weight"] = heads[0]
    for name, parameter in parameters.items():
        parameter.grad = recorded("grad", name)
        moments = {word: recorded(f"before.{word}", name) for word in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(float(case["step"])), **moments}
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    optimizer.step()

    if case["proj"]:
        parts = {
            "x_proj": [("step", (0, 4), "right"), ("B", (4, 12), "right"), ("C", (12, 20), "right")],
            "A": [("A", None, "left")],
            "out": [("out", None, "right")],
        }
        for name, pieces in parts.items():
            table = [
                (
                    Part(kind, name, rows, side),
                    projector_of(recorded_steps[f"{case['name']}.proj.{kind}"], case["eta"]),
                )
                for kind, rows, side in pieces
            ]
            project_change(before[name], parameters[name].detach(), table)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.detach(), recorded("after.param", name), rtol=0, atol=5e-7, msg=name)
        for word in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(optimizer.state[parameter][word], recorded(f"after.{word}", name))


# Projectors


def random_covariance(size=12, seed=0):
    rows = torch.randn(3 * size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = rows * torch.logspace(0, -3, size, dtype=torch.float64)
    return rows.T @ rows


@pytest.mark.parametrize("scaling", ["none", "frobenius"])
@pytest.mark.parametrize("eta", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("rank", [0, 1, 5, 6, 7, 11, 12])
def test_low_rank_projector_is_the_textbook_one(rank, eta, scaling):
    covariance = random_covariance()
    decomposition = decompose(covariance, f"fraction:{(rank + 0.5) / 12 if rank < 12 else 1.0}", torch.float64)
    assert decomposition.rank == rank
    assert decomposition.basis.shape == (12, min(rank, 12 - rank))  # the smaller of the two spaces
    projector, dense = decomposition.projector(eta, scaling), dense_projector(covariance, rank, eta, scaling)
    torch.testing.assert_close(projector.dense(), dense)
    update = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(projector.apply(update, "left"), dense @ update)
    torch.testing.assert_close(projector.apply(update.T, "right"), update.T @ dense)


def test_the_null_directions_are_those_of_the_smallest_eigenvalues():
    covariance = torch.diag(torch.tensor([1.0, 100.0, 0.01, 50.0, 0.02]))
    projector = decompose(covariance, "fraction:0.4", torch.float64).projector(1.0, "none")
    torch.testing.assert_close(projector.dense(), torch.diag(torch.tensor([0, 0, 1, 0, 1], dtype=torch.float64)))


def test_scaling_divides_by_the_frobenius_norm_alone():
    covariance = torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0]))
    dense = decompose(covariance, "fraction:0.75", torch.float64).projector(0.9, "frobenius").dense()
    expected = torch.full((4,), 0.9 / 3**0.5 + 0.1, dtype=torch.float64)
    expected[0] = 0.1
    torch.testing.assert_close(dense, torch.diag(expected))


# Covariances


FEATURES = {
    "x": lambda x, delta, out: x.flatten(0, 1),
    "delta": lambda x, delta, out: delta.flatten(0, 1),
    "out": lambda x, delta, out: out.flatten(0, 1),
    "delta-x": lambda x, delta, out: (delta[..., :, None] * x[..., None, :]).flatten(0, 2),
    "delta-x-per-image": lambda x, delta, out: torch.einsum("blc,bld->bcd", delta, x).flatten(0, 1),
}
SPLITS = {"one batch": [7], "uneven": [3, 3, 1], "one by one": [1] * 7}


def seen_features(model, batch, index):
    seen = {}
    mixer = model.blocks[index].mixer
    mixer.observer = seen.update
    with torch.no_grad():
        model(batch)
    mixer.observer = None
    return seen["x"].double(), seen["delta"].double(), seen["out"].double()


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("feature", FEATURES)
def test_streamed_sum_is_the_plain_covariance_of_all_features(tiny_model, feature, split):
    model = tiny_model()
    space = NullSpace(model, W_C={"feature": feature}, rank="fraction:0.5")
    space.consolidate(images(7).split(SPLITS[split]))
    for index in range(2):
        rows = FEATURES[feature](*seen_features(model, images(7), index))
        name = f"blocks.{index}.{X_PROJ}[12:20]"
        assert relative(space.covariances()[name], rows.T @ rows) < 1e-6


@pytest.mark.parametrize("feature", FEATURES)
def test_batch_mean_is_the_sum_of_every_batchs_mean(tiny_model, feature):
    model = tiny_model()
    space = NullSpace(model, W_C={"feature": feature}, rank="fraction:0.5", accumulate="batch-mean")
    space.consolidate(images(7).split([3, 3, 1]))
    expected = 0.0
    for batch in images(7).split([3, 3, 1]):
        rows = FEATURES[feature](*seen_features(model, batch, 1))
        expected = expected + rows.T @ rows / len(rows)
    assert relative(space.covariances()[f"blocks.1.{X_PROJ}[12:20]"], expected) < 1e-6


def test_tasks_add_up(tiny_model):
    model = tiny_model()
    apart, together = NullSpace(model), NullSpace(model)
    apart.consolidate([images(2, seed=1)])
    apart.consolidate([images(3, seed=2)])
    together.consolidate([images(2, seed=1), images(3, seed=2)])
    assert apart.tasks == 2 and together.tasks == 1
    for name, covariance in together.covariances().items():
        assert covariance.dtype == torch.float64
        torch.testing.assert_close(apart.covariances()[name], covariance)


def test_products_in_float32_are_summed_in_float64(tiny_model):
    model = tiny_model()
    exact, fast = NullSpace(model), NullSpace(model, products="float32")
    for space in (exact, fast):
        space.consolidate([images()])
    for name, covariance in exact.covariances().items():
        assert fast.covariances()[name].dtype == torch.float64
        assert 0 < relative(fast.covariances()[name], covariance) < 1e-5


def test_batches_may_be_tuples_with_labels_and_forward_may_be_chosen(tiny_model):
    model = tiny_model(num_classes=3)
    plain, labelled = NullSpace(model), NullSpace(model)
    report = plain.consolidate([images(3), images(2, seed=1)])
    assert report.images == 5 and report.covariance_seconds > 0 and report.decomposition_seconds > 0
    loader = [(images(3), torch.zeros(3)), [images(2, seed=1), torch.zeros(2)]]
    assert labelled.consolidate(loader, forward=model.forward_features).images == 5
    for name, covariance in plain.covariances().items():
        assert torch.equal(covariance, labelled.covariances()[name])


# The property


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
    others = {other: {"trains": other == kind} for other in KINDS}
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


# Projected steps of any optimizer


OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False),
    "foreach Adam": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True, weight_decay=1e-2),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


def project_by_hand(space, before, model):
    """The change of every protected part times the whole matrix, from the paper's side."""
    for name, projector in space.projectors().items():
        parameter, _, rows = name.rstrip("]").partition("[")
        rows = slice(*map(int, rows.split(":"))) if rows else slice(None)
        new, old, P = model.get_parameter(parameter).data[rows], before[parameter][rows], projector.dense()
        new.copy_(old + (P @ (new - old) if parameter.endswith("A_log") else (new - old) @ P))


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
    for network, stepped in ((model, optimizer), (twin, plain)):
        set_random_gradients(network, seed=0)
        stepped.step()
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
    for network, wrap in ((model, space.wrap), (twin, lambda optimizer: optimizer)):
        set_random_gradients(network, seed=0)
        wrap(torch.optim.SGD(network.parameters(), lr=0.1)).step()
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
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, twin.get_parameter(name)) == (name not in space.trained_names()), name


def test_wrap_gives_back_the_same_optimizer(tiny_model):
    space = NullSpace(tiny_model())
    optimizer = torch.optim.Adam(space.parameters())
    assert space.wrap(optimizer) is optimizer


def test_an_optimizer_of_other_parameters_is_refused(tiny_model):
    space = NullSpace(tiny_model(num_classes=2))
    with pytest.raises(UserError, match=r"build it from space\.parameters\(\)"):
        space.wrap(torch.optim.Adam(space.model.head.parameters()))


# What is trained


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
    "projected", [(), ("W_delta",), ("A",), ("out",), ("W_delta", "W_B", "W_C", "A"), KINDS], ids="+".join
)
def test_ablation_projects_the_named_kinds_and_trains_all(tiny_model, projected):
    model = tiny_model()
    space = NullSpace(model, **ablation(*projected))
    assert space.trained_names() == NullSpace(model).trained_names()
    space.consolidate([images()])
    kinds = {part.kind for _, part in space.parts() if part.name in space.projectors()}
    assert kinds == set(projected)
    assert all(space.setting.rule(kind).feature == SETTINGS["paper"].rule(kind).feature for kind in KINDS)


def test_without_projection_trains_the_same_freely(tiny_model):
    model = tiny_model()
    free = NullSpace(model, SETTINGS["paper"].without_projection())
    free.consolidate([images()])
    assert free.constrained() == {} and free.trained_names() == NullSpace(model).trained_names()


@pytest.mark.parametrize("blocks, expected", [(None, [0, 1, 2]), (1, [0]), (2, [0, 1]), ([2], [2]), ([0, 2], [0, 2])])
def test_blocks_are_the_first_so_many_or_those_listed(tiny_model, blocks, expected):
    space = NullSpace(tiny_model(depth=3), blocks=blocks)
    assert [block.name for block in space.blocks] == [f"blocks.{i}.mixer" for i in expected]
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
    assert "512 values in 2 blocks, protected by x" in lines["W_delta"]  # 2 blocks of 4 x 64
    assert "1,024 values in 2 blocks, protected by delta-x" in lines["W_B"]
    assert "1,024 values in 2 blocks, protected by x" in lines["W_C"]
    assert "fixed" in lines["A"] and "4,096 values in 2 blocks, trained freely" in lines["out"]
    total = sum(parameter.numel() for parameter in model.parameters())
    assert f"trains {512 + 1024 + 1024 + 4096:,} of {total:,} values" in lines["trains"]


# Settings


def test_named_settings_say_what_the_paper_and_the_public_code_do():
    paper, public = SETTINGS["paper"], SETTINGS["public-code"]
    assert [paper.rule(kind).feature for kind in KINDS] == ["x", "delta-x", "x", "delta", "out"]
    assert (paper.accumulate, paper.rank, paper.scaling, paper.eta) == ("sum", "corner", "none", 0.95)
    assert [public.rule(kind).feature for kind in KINDS] == ["x", "delta-x-per-image", "x", "delta", "out"]
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
        ({"ranks": "corner"}, r"no 'ranks'\. Did you mean 'rank'\?"),
        ({"rank": "knee"}, "no rank rule 'knee'"),
        ({"eta": 1.5}, "eta must lie between 0"),
        ({"eta": -0.1}, "eta must lie between 0"),
        ({"W_B": {"feature": "delta_x"}}, "W_B has no feature 'delta_x'"),
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


# Finding the blocks


def test_a_model_without_selective_ssm_is_refused():
    with pytest.raises(UserError, match="no selective SSM that an adapter knows"):
        NullSpace(nn.Sequential(nn.Linear(3, 4), nn.ReLU()))


def test_blocks_are_found_anywhere_in_a_model():
    def mixer():
        return Mixer(8, MixerConfig(intermediate_size=16, state_size=4, time_step_rank=2, group_norm_size=4), True)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), mixer(), nn.ModuleDict({"inner": mixer()})["inner"])
    space = NullSpace(model)
    assert [block.name for block in space.blocks] == ["1", "2"]
    space.consolidate([torch.randn(3, 4, 5)])
    assert "1.x_proj.weight[0:2]" in space.projectors() and "2.A_log" in space.projectors()
    assert [part.name for part in find_blocks(mixer())[0].parts][-1] == "out_proj.weight"


# Consolidation and failure


def test_modes_come_back_and_observers_go(tiny_model):
    model = tiny_model().train()
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    NullSpace(model).consolidate([images()])
    assert [module.training for module in model.modules()] == modes
    assert all(block.mixer.observer is None for block in model.blocks)


def test_features_are_those_of_evaluation_mode(tiny_model):
    model = tiny_model(depth=3, drop_path_rate=0.9)
    evaluated, trained = NullSpace(model), NullSpace(model)
    evaluated.consolidate([images()])
    model.train()
    trained.consolidate([images()])
    for name, covariance in evaluated.covariances().items():
        assert torch.equal(covariance, trained.covariances()[name])


def broken_loader():
    yield images(2, seed=5)
    raise OSError("the disk is gone")


def not_finite():
    yield images(2, seed=5)
    yield images(2) * float("nan")


@pytest.mark.parametrize(
    "loader, error",
    [(broken_loader, OSError), (not_finite, UserError), (list, UserError)],
    ids=["disk", "NaN", "empty"],
)
@pytest.mark.parametrize("first", [True, False], ids=["first task", "second task"])
def test_a_consolidation_that_fails_changes_nothing(tiny_model, loader, error, first):
    model = tiny_model().train()
    space = NullSpace(model)
    if not first:
        space.consolidate([images()])
    before = {name: tensor.clone() for name, tensor in space.state_dict().items()}
    dense = {name: projector.dense() for name, projector in space.projectors().items()}
    with pytest.raises(error):
        space.consolidate(loader())
    after = space.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert all(torch.equal(space.projectors()[name].dense(), matrix) for name, matrix in dense.items())
    assert model.training and all(block.mixer.observer is None for block in model.blocks)


# Saving


def consolidated(model, tasks=1, **overrides):
    space = NullSpace(model, **overrides)
    for task in range(tasks):
        space.consolidate([images(seed=task)])
    return space


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


def test_a_setting_can_be_given_as_a_value(tiny_model):
    own = Setting(eta=0.3, rank="fraction:0.5", blocks=[1])
    space = NullSpace(tiny_model(), own, eta=0.4)
    assert space.setting == dataclasses.replace(own, eta=0.4)


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


def test_a_forward_that_skips_the_blocks_is_noticed(tiny_model):
    model = tiny_model()
    with pytest.raises(UserError, match="saw no features of blocks"):
        NullSpace(model).consolidate([images()], forward=lambda batch: batch)


@pytest.mark.parametrize("wrong", [{"blocks": [0, -1]}, {"blocks": "2"}, {"blocks": []}, {"eta": "0.9"}])
def test_values_of_the_wrong_kind_are_refused(tiny_model, wrong):
    with pytest.raises(UserError, match=r"blocks must|eta must"):
        NullSpace(tiny_model(), **wrong)


def test_an_unknown_kind_in_an_ablation_is_refused():
    with pytest.raises(UserError, match="no kind 'W_x'"):
        ablation("W_x")


def test_it_says_how_much_is_protected(tiny_model, caplog):
    caplog.set_level("INFO", logger="mambacl")
    logging.getLogger("mambacl").propagate = True
    NullSpace(tiny_model(), rank="corner").consolidate([images()])
    assert "energy:0.9 would protect more" in caplog.text
    caplog.clear()
    NullSpace(tiny_model(), rank="energy:0.9").consolidate([images()])
    assert "protected after task 1: " in caplog.text and "would protect more" not in caplog.text
