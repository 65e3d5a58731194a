"""All projectors at once against one at a time, and the counts that come with them."""

import io

import pytest
import torch
from block_models import build, output
from nullspace_help import OUT, X_PROJ, images, set_random_gradients, snapshot
from tolerance import rounding
from torch import nn

from mambacl.nullspace import Decomposition, NullSpace, Part, dense_projector, null_rank
from mambacl.nullspace.block_readers import find_blocks
from mambacl.nullspace.projected_step import PADDING, ProjectedStep, projected_parts
from mambacl.nullspace.projectors import decompose, project_part

CPU = torch.device("cpu")


def directions(size, seed):
    """An orthonormal basis of everything, null directions first."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]


def smaller(basis, rank):
    size = len(basis)
    return basis[:, :rank] if rank < size - rank else basis[:, rank:]


def made(size, ranks, seed=0):
    """A decomposition with these null ranks: a number, or one for each group; and its null projectors, by group."""
    several = isinstance(ranks, list)
    bases = [directions(size, seed + 31 * g) for g in range(len(ranks) if several else 1)]
    each = ranks if several else [ranks]
    null = [basis[:, :rank] @ basis[:, :rank].T for basis, rank in zip(bases, each, strict=True)]
    kept = [smaller(basis, rank) for basis, rank in zip(bases, each, strict=True)]
    width = max(own.shape[1] for own in kept)
    padded = torch.stack([nn.functional.pad(own, (0, width - own.shape[1])) for own in kept])
    spectrum = torch.arange(size, 0, -1, dtype=torch.float64)
    if not several:
        return Decomposition(spectrum, torch.tensor(ranks), padded[0]), null
    return Decomposition(spectrum.repeat(len(each), 1), torch.tensor(each), padded), null


def matrices(null, eta, scaling):
    """eta H + (1 - eta) I, written out."""
    found = []
    for H in null:
        norm = H.norm() if scaling == "frobenius" and H.norm() > 0 else 1.0
        found.append(eta * H / norm + (1 - eta) * torch.eye(len(H), dtype=H.dtype))
    return found


def by_hand(before, after, part, dense):
    """The projection of one part by dense matrices, group after group."""
    old, new = part.of(before), part.of(after)
    change = new - old
    if part.side == "left":
        new.copy_(old + dense[0] @ change)
        return
    rows = len(change) // part.groups
    for group, P in enumerate(dense):
        own = slice(group * rows, (group + 1) * rows)
        new[own] = old[own] + (change[own].flatten(1) @ P).view_as(change[own])


def random_like(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def clones(table):
    return {name: tensor.clone() for name, tensor in table.items()}


def assert_same(ours, theirs, **tolerance):
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, msg=name, **(tolerance or {"rtol": 1e-12, "atol": 1e-12}))


def projection(uses, shapes, eta, scaling, dtype, device):
    return ProjectedStep(projected_parts(uses, shapes, eta, scaling, dtype, device))


MODELS = ["defocus", "vim", "vmamba", "vanilla_vmamba", "mambavision", "Mamba2", "FalconMamba"]


def case(name, layers=True, seed=0, eta=0.9, scaling="none", dtype=torch.float64, device=CPU):
    """Every part of a model with a projector of its own, of null ranks 0, 1, all and some between."""
    model = build(name)[0]
    shapes = {n: p.shape for n, p in model.named_parameters()}
    parts = [part for block in find_blocks(model, layers) for part in block.parts]
    generator = torch.Generator().manual_seed(seed)
    uses, dense = [], {}
    for number, part in enumerate(parts):
        groups, _, size = part.matrix(torch.empty(shapes[part.parameter])).shape
        choices = [
            0,
            1,
            size,
            size // 2,
            max(size - 1, 0),
            *torch.randint(0, size + 1, (3,), generator=generator).tolist(),
        ]
        picked = [choices[(number + g) % len(choices)] for g in range(groups)]
        decomposition, null = made(size, picked if groups > 1 else picked[0], seed + number)
        uses.append((decomposition, [part]))
        dense[part.name] = matrices(null, eta, scaling)
    return projection(uses, shapes, eta, scaling, dtype, device), parts, shapes, dense, uses


@pytest.mark.parametrize("scaling", ["none", "frobenius"])
@pytest.mark.parametrize("name", MODELS)
def test_stacked_parts_are_projected_as_by_dense_matrices(name, scaling):
    """Linear maps, rows of them, convolutions of many groups, A from the left, 1-D and 3-D parameters."""
    step, parts, shapes, dense, _ = case(name, scaling=scaling)
    before, after = random_like(shapes, 1), random_like(shapes, 2)
    expected = clones(after)
    step.project(before, after)
    for part in parts:
        by_hand(before[part.parameter], expected[part.parameter], part, dense[part.name])
    assert_same(after, expected)


@pytest.mark.parametrize("name", MODELS)
def test_stacked_parts_are_projected_as_one_at_a_time(name):
    step, parts, shapes, _, uses = case(name, layers=False)
    parts = [part for part in parts if part.groups == 1]
    projectors = {part.name: decomposition.projector(0.9, "none") for decomposition, [part] in uses}
    before, after = random_like(shapes, 1), random_like(shapes, 2)
    expected = clones(after)
    step.project(before, after)
    for part in parts:
        project_part(before[part.parameter], expected[part.parameter], part, projectors[part.name])
        assert part.of(after[part.parameter]).shape == part.of(expected[part.parameter]).shape
        torch.testing.assert_close(
            part.of(after[part.parameter]), part.of(expected[part.parameter]), rtol=1e-12, atol=1e-12, msg=part.name
        )


def test_the_plain_twin_takes_a_convolution_of_one_group():
    part, shapes = Part("conv", "w"), {"w": torch.Size((5, 2, 3, 3))}
    decomposition, _ = made(18, 7)
    step = projection([(decomposition, [part])], shapes, 1.0, "none", torch.float64, CPU)
    before, after = random_like(shapes, 1), random_like(shapes, 2)
    expected = clones(after)
    step.project(before, after)
    project_part(before["w"], expected["w"], part, decomposition.projector(1.0, "none"))
    assert_same(after, expected)


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("kernel", [(3,), (2, 3)], ids=["1-D", "2-D"])
def test_groups_of_a_convolution_are_projected_each_by_itself(groups, kernel):
    layer = (nn.Conv1d if len(kernel) == 1 else nn.Conv2d)(6, 12, kernel, groups=groups)
    shapes = {"w": layer.weight.shape}
    size = layer.weight[0].numel()
    ranks = [(3 * g + 1) % (size + 1) for g in range(groups)]
    decomposition, null = made(size, ranks if groups > 1 else ranks[0])
    part = Part("conv", "w", groups=groups)
    step = projection([(decomposition, [part])], shapes, 0.7, "none", torch.float64, CPU)
    before, after = random_like(shapes, 1), random_like(shapes, 2)
    expected = clones(after)
    step.project(before, after)
    by_hand(before["w"], expected["w"], part, matrices(null, 0.7, "none"))
    assert_same(after, expected)


def random_groups(ranks, size=6, seed=0):
    """Covariances of so many directions each."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(rank, size, generator=generator, dtype=torch.float64) for rank in ranks]
    return torch.stack([J.T @ J for J in rows])


@pytest.mark.parametrize("rule", ["tolerance:1e-12", "energy:0.8", "corner", "smoothed-corner"])
def test_groups_are_decomposed_each_by_itself(rule):
    covariances = random_groups([1, 2, 4, 6])
    [together] = decompose([covariances], rule)
    for group, covariance in enumerate(covariances):
        [alone] = decompose([covariance], rule)
        torch.testing.assert_close(together.spectrum[group], alone.spectrum)
        assert together.ranks[group] == alone.ranks
        torch.testing.assert_close(
            together.projector(0.9, "none").dense()[group], alone.projector(0.9, "none").dense(), rtol=1e-9, atol=1e-9
        )


def test_a_group_without_input_frees_no_other():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 3, 2, groups=3, bias=False)).double()
    old = torch.randn(4, 3, 8, dtype=torch.float64)
    old[:, 0] = 0
    space = NullSpace(model, "exact", layers="all")
    space.consolidate([old])
    assert space.decompositions()["0.weight"].ranks.tolist() == [2, 0, 0]
    before = model(old).detach()
    set_random_gradients(model, 0)
    space.wrap(torch.optim.SGD(space.parameters(), lr=0.1)).step()
    torch.testing.assert_close(model(old), before)


def test_parameters_that_are_missing_are_left_out():
    step, parts, shapes, dense, _ = case("vim")
    before, after = random_like(shapes, 1), random_like(shapes, 2)
    missing = {part.parameter for part in parts[::3]}
    given = {name: tensor for name, tensor in before.items() if name not in missing}
    expected = clones(after)
    step.project(given, after)
    for part in parts:
        if part.parameter not in missing:
            by_hand(before[part.parameter], expected[part.parameter], part, dense[part.name])
    assert_same(after, expected)
    moved = step.update_energy()
    assert all((moved[part.name][0] == 0) == (part.parameter in missing) for part in parts)


def test_nothing_given_is_nothing_done():
    step, _, shapes, *_ = case("defocus")
    after = random_like(shapes, 2)
    expected = clones(after)
    step.project({}, after)
    assert all(torch.equal(after[name], tensor) for name, tensor in expected.items())
    assert not any(moved.any() for moved in step.update_energy().values())


def test_parts_that_share_a_projector_are_projected_by_it():
    """Three rows of one parameter and one of another, two of them of the same shape."""
    shapes = {"a": torch.Size((12, 8)), "b": torch.Size((4, 8)), "c": torch.Size((3, 5, 8))}
    parts = [
        Part("W_delta", "a", ((0, 4),)),
        Part("W_B", "a", ((4, 8),)),
        Part("W_C", "a", ((8, 11),)),
        Part("out", "b"),
        Part("W_B", "c", (1, (1, 5))),
        Part("W_C", "c", (2, (0, 4))),
    ]
    (first, null), (second, other) = made(8, 3), made(8, 6, seed=5)
    step = projection([(first, parts[:4]), (second, parts[4:])], shapes, 0.8, "none", torch.float64, CPU)
    before, after = random_like(shapes, 1), random_like(shapes, 2)
    expected = clones(after)
    step.project(before, after)
    for part in parts:
        by_hand(
            before[part.parameter],
            expected[part.parameter],
            part,
            matrices(null if part in parts[:4] else other, 0.8, "none"),
        )
    assert_same(after, expected)
    torch.testing.assert_close(after["a"][11], expected["a"][11], rtol=0, atol=0)  # rows of no part


ERRORS = {  # relative to the norm of the update: in half precision V is rounded, twice in V V^T; otherwise the sums are
    torch.float64: rounding(64, torch.float64),
    torch.float32: rounding(64),
    torch.float16: 2 * 2**-11,
    torch.bfloat16: 2 * 2**-8,
}


@pytest.mark.parametrize("storage", ERRORS, ids=str)
def test_the_error_of_a_projection_is_that_of_its_storage(storage):
    step, parts, shapes, dense, _ = case("vim", eta=1.0, dtype=storage)
    parameters = torch.float64 if storage == torch.float64 else torch.float32
    before = {name: tensor.to(parameters) for name, tensor in random_like(shapes, 1).items()}
    after = {name: tensor.to(parameters) for name, tensor in random_like(shapes, 2).items()}
    start, expected = clones(after), {name: tensor.double().clone() for name, tensor in after.items()}
    step.project(before, after)
    twice = clones(after)
    step.project(before, twice)
    errors, again = [], []
    for part in parts:
        by_hand(before[part.parameter].double(), expected[part.parameter], part, dense[part.name])
        size = part.of(start[part.parameter] - before[part.parameter]).norm()
        errors.append((part.of(after[part.parameter] - expected[part.parameter]).norm() / size).item())
        again.append((part.of(twice[part.parameter] - after[part.parameter]).norm() / size).item())
    print(f"{storage}: error {max(errors):.1e}, projected twice {max(again):.1e}")
    assert max(errors) < ERRORS[storage] and max(again) < ERRORS[storage]
    if storage in (torch.float16, torch.bfloat16):
        assert max(errors) > ERRORS[storage] / 20  # what half precision costs is seen


@pytest.mark.parametrize("storage", ERRORS, ids=str)
def test_a_space_projects_twice_as_once(tiny_model, storage):
    model = tiny_model()
    space = NullSpace(model, eta=1.0, rank="fraction:0.4", storage=str(storage).removeprefix("torch."))
    space.consolidate([images()])
    before = snapshot(model)
    set_random_gradients(model, 0)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    change = {name: (p - before[name]).norm().item() for name, p in model.named_parameters()}
    once = snapshot(model)
    space.projected_step.project(before, once)
    twice = clones(once)
    space.projected_step.project(before, twice)
    tolerance = max(ERRORS[storage], ERRORS[torch.float32])  # the parameters are float32
    for name in space.trained_names():
        assert (twice[name] - once[name]).norm() < tolerance * change[name], name
        assert (once[name] - before[name]).norm() < 0.95 * change[name]


def test_bytes_stay_within_the_padding():
    sizes = {torch.float64: 8, torch.float32: 4, torch.bfloat16: 2}
    generator = torch.Generator().manual_seed(0)
    for seed in range(5):
        ranks = torch.randint(0, 41, (12,), generator=generator).tolist()
        shapes = {f"{i}": torch.Size((3, 40)) for i in range(len(ranks))}
        uses = [(made(40, rank, seed + i)[0], [Part("out", f"{i}")]) for i, rank in enumerate(ranks)]
        needed = sum(40 * min(rank, 40 - rank) for rank in ranks)
        for dtype, size in sizes.items():
            step = projection(uses, shapes, 1.0, "none", dtype, CPU)
            assert needed * size <= step.nbytes() <= PADDING * needed * size


def test_a_space_of_full_or_empty_null_spaces_needs_no_bytes(tiny_model):
    for rank in ("fraction:0.0", "fraction:1.0"):
        space = NullSpace(tiny_model(), rank=rank)
        space.consolidate([images()])
        assert space.projected_step.nbytes() == 0


# What is counted


def counts_by_hand(steps, part, P, null):
    """Sums of squares of the updates, of their protected share, of what is applied, of its protected share."""
    total = torch.zeros(4, dtype=torch.float64)
    for change in steps:
        rows = part.matrix(change)[0]
        applied, protects = rows @ P, torch.eye(len(null), dtype=null.dtype) - null
        total += torch.stack([t.square().sum() for t in (rows, rows @ protects, applied, applied @ protects)])
    return total


@pytest.mark.parametrize("scaling", ["none", "frobenius"])
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("rank", ["fraction:0.3", "fraction:0.8"], ids=["basis of the null space", "of the other"])
def test_counts_are_the_sums_over_all_steps(tiny_model, rank, eta, scaling):
    model = tiny_model().double()
    space = NullSpace(model, rank=rank, eta=eta, scaling=scaling)
    space.consolidate([images(dtype=torch.float64)])
    optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=0.1))
    changes = []
    for step in range(3):
        set_random_gradients(model, step)
        changes.append({name: -0.1 * p.grad for name, p in model.named_parameters()})
        optimizer.step()
    moved = space.update_energy()
    assert moved.keys() == {protection.name for protection in space.selection.protections}
    for _, part in space.selection.parts():
        if part.name in moved:
            Q = space.covariances()[part.name]
            number = null_rank(torch.linalg.svdvals(Q), rank)
            P, null = dense_projector(Q, number, eta, scaling), dense_projector(Q, number, 1.0, "none")
            expected = counts_by_hand([step[part.parameter] for step in changes], part, P, null)
            torch.testing.assert_close(moved[part.name], expected, rtol=1e-8, atol=1e-10, msg=part.name)


@pytest.mark.parametrize("ranks", [[0, 2, 5, 8], [8, 8, 0, 1]])
def test_counts_of_groups_are_added(ranks):
    decomposition, null = made(8, ranks)
    part, shapes = Part("conv", "w", groups=4), {"w": torch.Size((8, 2, 2, 2))}
    step = projection([(decomposition, [part])], shapes, 0.5, "frobenius", torch.float64, CPU)
    expected = torch.zeros(4, dtype=torch.float64)
    for seed in range(2):
        before, after = random_like(shapes, seed), random_like(shapes, 10 + seed)
        change = (after["w"] - before["w"]).reshape(4, 2, 8)
        for rows, H, P in zip(change, null, matrices(null, 0.5, "frobenius"), strict=True):
            protects = torch.eye(8, dtype=H.dtype) - H
            expected += torch.stack([t.square().sum() for t in (rows, rows @ protects, rows @ P, rows @ P @ protects)])
        step.project(before, after)
    torch.testing.assert_close(step.update_energy()["w"], expected)


@pytest.mark.parametrize("eta, relax", [(1.0, 0.0), (0.5, 0.0), (0.0, 0.0), (1.0, 0.1)])
def test_counts_of_A_by_its_box(tiny_model, eta, relax):
    model = tiny_model().double()
    space = NullSpace(model, "exact", eta=eta, relax=relax)
    space.consolidate([images(dtype=torch.float64)])
    optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=1e-3))
    expected = dict.fromkeys(space.projected_step.boxes(), 0)
    for step in range(3):
        set_random_gradients(model, step)
        before = snapshot(model)
        optimizer.step()
        for name in expected:
            change = -1e-3 * model.get_parameter(name).grad
            applied = model.get_parameter(name).detach() - before[name]
            # of a relaxed A, what is protected is what lies outside of the box
            outside, let_through = (change - applied, 0 * applied) if relax else (change, applied)
            expected[name] = expected[name] + torch.stack(
                [t.square().sum() for t in (change, outside, applied, let_through)]
            )
    for name, counts in expected.items():
        torch.testing.assert_close(space.update_energy()[name], counts, rtol=1e-8, atol=1e-14)
        if relax:
            assert 0 < counts[2] < counts[0]


def test_counts_start_again_with_each_task(tiny_model):
    model = tiny_model()
    space = NullSpace(model, "exact")
    optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=0.1))
    set_random_gradients(model, 0)
    optimizer.step()
    assert space.update_energy() == {}  # nothing was protected, so nothing was counted
    seen = []
    for task in range(3):
        space.consolidate([images(1, seed=task)])
        assert not any(counts.any() for counts in space.update_energy().values())
        set_random_gradients(model, task)
        optimizer.step()
        seen.append(space.update_energy())
    assert space.tasks == 3 and space.update_energy(0) == {}
    for task in range(2):
        assert space.update_energy(task + 1).keys() == seen[task].keys()
        assert all(torch.equal(space.update_energy(task + 1)[name], counts) for name, counts in seen[task].items())


@pytest.mark.parametrize("layers", ["ssm", "all"])
def test_counts_survive_saving_in_the_middle_of_a_task(tiny_model, layers):
    final = {}
    for stops in (False, True):
        model = tiny_model().double()
        space = NullSpace(model, "exact", layers=layers, relax=0.05)
        space.consolidate([images(1, dtype=torch.float64)])
        optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=0.01))
        for step in range(4):
            if stops and step == 2:
                state = through_a_file(space.state_dict())
                energies = through_a_file(space.projected_step.state_dict())
                space = NullSpace(model, "exact", layers=layers, relax=0.05)
                space.load_state_dict(state)
                assert not any(counts.any() for counts in space.update_energy().values())
                space.projected_step.load_state_dict(energies)
                optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=0.01))
            set_random_gradients(model, step)
            optimizer.step()
        final[stops] = space.update_energy()
    assert final[True].keys() == final[False].keys() and all(counts[0] > 0 for counts in final[True].values())
    for name, counts in final[False].items():
        torch.testing.assert_close(final[True][name], counts, rtol=1e-9, atol=1e-12, msg=name)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_protected_model_counts_what_its_loss_asked_for():
    """In the exact setting nothing is let through, and something was asked for."""
    model, inputs, _ = build("vmamba")
    model = model.double()
    space = NullSpace(model, "exact")
    old = inputs(0).double()
    space.consolidate([old])
    optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=0.01))
    output(model, inputs(1, 2).double()).square().sum().backward()
    optimizer.step()
    for name, (asked, inside, applied, let_through) in space.update_energy().items():
        assert 0 <= let_through <= 1e-20 * asked, name
        assert 0 < inside <= asked * (1 + 1e-9) and abs(asked - inside - applied) <= 1e-9 * asked, name


def test_rows_of_two_blocks_do_not_mix(tiny_model):
    """Changing one block's update changes nothing of another's."""
    model = tiny_model().double()
    space = NullSpace(model)
    space.consolidate([images(dtype=torch.float64)])
    before = snapshot(model)
    results = []
    for factor in (1.0, 5.0):
        after = {name: tensor + 1.0 for name, tensor in before.items()}
        for word in (X_PROJ, OUT):
            after[f"blocks.0.{word}"] = before[f"blocks.0.{word}"] + factor
        space.projected_step.project(before, after)
        results.append(after)
    for word in (X_PROJ, OUT):
        torch.testing.assert_close(*(r[f"blocks.1.{word}"] for r in results), rtol=0, atol=1e-12)
        assert not torch.equal(*(r[f"blocks.0.{word}"] for r in results))
