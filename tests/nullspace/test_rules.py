"""Other systems' rules as settings of the null space, on plain and on selective models: what they keep, their textbook
twins, their state."""

import pytest
import torch
from torch import nn

from mambacl.errors import UserError
from mambacl.nullspace import NullSpace
from mambacl.nullspace.growth import of_weight
from mambacl.nullspace.ranks import null_rank
from mambacl.nullspace.recursive import absorbed
from mambacl.nullspace.settings import SYSTEMS

RULES = tuple(SYSTEMS)
EXACT = {  # protect everything that the inputs span
    "gpm": {"rank": "energy:1.0", "rank_step": 0.0},
    "dual-gpm": {"rank": "energy:1.0", "rank_step": 0.0},
    "nscl": {},  # the inputs leave directions whose eigenvalues are zero
    "owm": {"alpha": 1e-10},
}


def network(seed=0, width=12):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 10, bias=False), nn.Linear(10, 6, bias=False)).double()


def inputs(seed, count=4, width=12):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def train(space, x, steps=3, optimizer=None):
    """Steps on random targets."""
    optimizer = optimizer or torch.optim.SGD(space.parameters(), lr=0.05)
    space.wrap(optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        out = space.model(x)
        (out - inputs(50 + step, len(x), out.shape[1])).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("rule", EXACT)
def test_old_outputs_of_a_linear_network_stay(rule):
    """At full rank, over two earlier tasks; without projection they move."""
    model = network()
    space = NullSpace(model, rule=rule, **EXACT[rule])
    old = [inputs(task, count=2) for task in range(2)]
    for x in old:
        if rule == "owm":  # one image per batch: the mean input is the image
            for image in x.split(1):
                train(space, image, steps=1)
        space.consolidate(x.split(1))
    # The last task's training moved weights within the null space of the first, so outputs are taken now.
    before = [model(x).detach() for x in old]
    weights = [p.detach().clone() for p in model.parameters()]
    train(space, inputs(9, count=8), steps=5)
    assert all((p - w).abs().max() > 1e-3 for p, w in zip(model.parameters(), weights, strict=True))
    for x, output in zip(old, before, strict=True):
        torch.testing.assert_close(model(x), output, rtol=0, atol=1e-6)
    free = NullSpace(model, rule=rule, **EXACT[rule])
    train(free, inputs(9, count=8), steps=5)
    assert (model(old[0]) - before[0]).abs().max() > 1e-2


def twin(rule, weight, seen, gradient):
    """The dense textbook projection of a gradient (out x in) after tasks with the inputs `seen`."""
    size = weight.shape[1]
    eye = torch.eye(size, dtype=torch.float64)
    if rule in ("gpm", "dual-gpm"):
        basis = torch.zeros(size, 0, dtype=torch.float64)
        for task, x in enumerate(seen):
            left, total = x - x @ basis @ basis.T, x.square().sum()
            _, values, Vh = torch.linalg.svd(left, full_matrices=False)
            held, count = total - left.square().sum(), 0
            while held < (0.8 + 0.05 * task) * total:
                held, count = held + values[count] ** 2, count + 1
            basis = torch.cat((basis, Vh[:count].T), 1)
        return gradient - gradient @ basis @ basis.T
    if rule == "nscl":
        U, values, _ = torch.linalg.svd(sum(x.T @ x for x in seen))
        null = U[:, values <= 40 * values[-1]]
        return gradient @ null @ null.T
    if rule == "owm":
        P = eye
        for x in seen:
            for image in x:  # one recursive update per row
                k = P @ image[:, None]
                P = P - k @ k.T / (0.01 + image @ k)
        return gradient @ P
    U, _, Vh = torch.linalg.svd(weight, full_matrices=False)
    kept = min(weight.shape) // 2
    return (eye_of(U) - U[:, :kept] @ U[:, :kept].T) @ gradient @ (eye - Vh[:kept].T @ Vh[:kept])


def eye_of(U):
    return torch.eye(len(U), dtype=torch.float64)


@pytest.mark.parametrize("rule", RULES)
def test_a_step_is_that_of_the_dense_textbook_form(rule):
    changes = {
        "gpm": {"rank": "energy:0.8", "rank_step": 0.05},
        "dual-gpm": {"rank": "energy:0.8", "rank_step": 0.05},
        "nscl": {"rank": "multiple:40"},
        "owm": {"alpha": 0.01},
        "osf": {},
    }[rule]
    layer = network()[0]
    space = NullSpace(layer, rule=rule, **changes)
    scales = torch.linspace(1, 0.1, 12, dtype=torch.float64)
    seen = [inputs(task, count=30) * scales for task in range(3)]
    if rule == "owm":
        seen = [x[:3] for x in seen]
    fixed = layer.weight.detach().clone()
    for x in seen:
        if rule == "owm":
            still = space.wrap(torch.optim.SGD(space.parameters(), lr=0.0))
            for image in x.split(1):
                layer(image).sum().backward()
                still.step()
        space.consolidate([x])
    assert torch.equal(layer.weight, fixed)
    gradient = inputs(7, count=10)
    layer.weight.grad = gradient.clone()
    space.wrap(torch.optim.SGD(space.parameters(), lr=1.0)).step()
    expected = twin(rule, fixed, seen, gradient)
    torch.testing.assert_close(fixed - layer.weight, expected, rtol=1e-9, atol=1e-9)
    assert 0.01 * gradient.norm() < expected.norm() < 0.99 * gradient.norm()


@pytest.mark.parametrize("rule", RULES)
def test_a_state_continues_bit_for_bit(rule):
    """Saved within a task, with the state of the step beside it."""
    spaces = [NullSpace(network(), rule=rule) for _ in range(2)]
    for seed in range(2):
        train(spaces[0], inputs(seed), steps=2)
        spaces[0].consolidate([inputs(seed)])
    optimizer = torch.optim.SGD(spaces[0].parameters(), lr=0.05)
    spaces[0].wrap(optimizer, steps=5)
    train(spaces[0], inputs(2), steps=2, optimizer=optimizer)
    spaces[1].load_state_dict(spaces[0].state_dict())
    spaces[1].projected_step.load_state_dict(spaces[0].projected_step.state_dict())
    spaces[1].model.load_state_dict(spaces[0].model.state_dict())
    train(spaces[0], inputs(3), steps=3, optimizer=optimizer)
    train(spaces[1], inputs(3), steps=3)
    for one, other in zip(*(space.model.parameters() for space in spaces), strict=True):
        assert torch.equal(one, other)
    assert spaces[0].projected_step.state_dict().keys() == spaces[1].projected_step.state_dict().keys()
    if rule == "owm":
        assert spaces[1].projected_step.clock.state.tolist() == [5, 5]
    for space in spaces:
        space.consolidate([inputs(3)])
    first, second = (space.state_dict() for space in spaces)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


class Tokens(nn.Module):
    """Two layers on tokens, with a bias."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 4)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def test_owm_takes_the_tokens_of_the_mean_image_and_no_evaluation():
    torch.manual_seed(0)
    model = Tokens().double()
    space = NullSpace(model, rule="owm", alpha=0.1)
    optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=0.1), steps=2)
    x = torch.randn(3, 6, 5, dtype=torch.float64)
    model(x).square().sum().backward()
    with torch.no_grad():
        model(torch.randn(2, 6, 5, dtype=torch.float64))  # not part of training
    bias = model.first.bias.detach().clone()
    optimizer.step()
    projector = space.projected_step.recursive()["first.weight"].projector[0]
    torch.testing.assert_close(projector, absorbed(torch.eye(5).double(), x.mean(0), 1.0))
    assert torch.equal(model.first.bias, bias) and space.trained_names() == ["first.weight", "second.weight"]
    assert space.projected_step.clock.alpha(0.1) == pytest.approx(0.1**0.5)
    again = space.wrap(optimizer, steps=4)
    assert again is optimizer and space.projected_step.clock.state.tolist() == [0, 4]


def test_rows_are_absorbed_together_as_one_by_one():
    P, rows = torch.eye(6).double(), inputs(0, count=4, width=6)
    together = absorbed(P, rows, 0.3)
    for row in rows:
        P = absorbed(P, row[None], 0.3)
    torch.testing.assert_close(together, P)
    torch.testing.assert_close(together, torch.linalg.inv(torch.eye(6).double() + rows.T @ rows / 0.3))


def test_osf_keeps_the_leading_part_of_a_weight():
    layer = network()[0]  # 10 x 12
    space = NullSpace(layer, rule="osf", rank="fraction:0.7")
    train(space, inputs(0), steps=1)  # free before the first consolidation
    assert not space.decompositions()
    space.consolidate()
    U, S, Vh = torch.linalg.svd(layer.weight.detach(), full_matrices=False)
    train(space, inputs(1), steps=4, optimizer=torch.optim.Adam(space.parameters(), lr=0.05))
    moved = layer.weight.detach()
    torch.testing.assert_close(U[:, :3].T @ moved, S[:3, None] * Vh[:3])  # three of ten are kept
    torch.testing.assert_close(moved @ Vh[:3].T, U[:, :3] * S[:3])
    right, left = of_weight(moved, "fraction:0.7", torch.float64)
    assert right.protected == left.protected == 3 and (right.rank, left.rank) == (9, 7)
    assert space.decompositions().keys() == {"weight", "weight.outputs"}


def test_a_rank_step_changes_the_share_with_each_task():
    layer = network()[0]
    space = NullSpace(layer, rule="osf", rank="fraction:0.8", rank_step=-0.2)
    kept = []
    for _ in range(5):
        space.consolidate()
        kept.append(space.decompositions()["weight"].protected)
    assert kept == [2, 4, 6, 8, 10]


def test_gpm_with_tasks_kept_apart_grows_the_same_and_can_forget():
    spaces = [NullSpace(network(), rule="gpm", rank="energy:0.7", keep_tasks=keep) for keep in (False, True)]
    for space in spaces:
        for task in range(3):
            space.consolidate([inputs(task, count=30)])
    for name, one in spaces[0].decompositions().items():
        other = spaces[1].decompositions()[name]
        assert one.rank == other.rank
        torch.testing.assert_close(one.basis.abs(), other.basis.abs())
    spaces[1].forget(1)
    fresh = NullSpace(network(), rule="gpm", rank="energy:0.7", keep_tasks=True)
    for task in (0, 2):
        fresh.consolidate([inputs(task, count=30)])
    for name, one in fresh.decompositions().items():
        assert torch.equal(one.basis, spaces[1].decompositions()[name].basis)


def test_convolutions_with_groups_grow_group_by_group():
    torch.manual_seed(0)
    conv = nn.Conv1d(4, 6, 3, groups=2).double()
    space = NullSpace(conv, rule="gpm", conv={"trains": True}, rank="energy:0.9")
    batches = [torch.randn(5, 4, 9, dtype=torch.float64) * torch.tensor([1.0, 1.0, 1.0, 0.01])[:, None] for _ in "ab"]
    for x in batches:
        space.consolidate([x])
    found = space.decompositions()["weight"]
    assert found.basis.shape[:2] == (2, 6) and found.ranks[0] < found.ranks[1]  # the second has one quiet channel
    basis = torch.zeros(6, 0, dtype=torch.float64)
    for task, x in enumerate(batches):
        rows = x[:, :2].unfold(2, 3, 1).permute(0, 2, 1, 3).reshape(-1, 6)
        left, total = rows - rows @ basis @ basis.T, rows.square().sum()
        _, values, Vh = torch.linalg.svd(left, full_matrices=False)
        held, count = total - left.square().sum(), 0
        while held < (0.9 + 0.003 * task) * total:
            held, count = held + values[count] ** 2, count + 1
        basis = torch.cat((basis, Vh[:count].T), 1)
    free = torch.eye(6).double() - basis @ basis.T
    torch.testing.assert_close(space.projectors()["weight"].dense()[0], free)


def test_the_spectrum_counts_protected_energy():
    space = NullSpace(network()[0], rule="gpm", rank="energy:0.7")
    x = [inputs(task, count=30) for task in range(2)]
    for one in x:
        space.consolidate([one])
    found = space.decompositions()["weight"]
    total = sum(one.T @ one for one in x)
    inside = torch.eye(12).double() - space.projectors()["weight"].dense()
    assert found.protected_energy == pytest.approx(float((inside @ total).trace() / total.trace()))


def test_nscl_takes_directions_up_to_a_multiple_of_the_smallest():
    spectrum = torch.tensor([100.0, 20.0, 9.0, 2.0, 1.0], dtype=torch.float64)
    assert [null_rank(spectrum, f"multiple:{factor}") for factor in (1, 2, 9.5, 50, 200)] == [1, 2, 3, 4, 5]
    assert null_rank(torch.tensor([1.0, 1e-3, 1e-17, 0.0]), "multiple:10") == 2  # zero up to rounding


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": "gmp"}, "Did you mean 'gpm'"),
        ({"rule": "gpm", "setting": "paper"}, "not both"),
        ({"rule": "gpm", "rank": "corner"}, "rank_step needs a rank rule with a share"),
        ({"rule": "gpm", "rank": "fraction:0.5"}, "set rank to energy:0.97"),
        ({"rule": "nscl", "rank": "multiple:0.5"}, "at least 1"),
        ({"rule": "owm", "acts_on": "update"}, "set acts_on to gradient"),
        ({"rule": "owm", "alpha": 0.0}, "alpha must be"),
        ({"rule": "owm", "alpha": [0.1]}, "one for all, or one each"),
        ({"rule": "owm", "W_B": {"feature": "delta-x"}}, "set W_B.feature to x"),
        ({"rule": "osf", "A": {"trains": True}}, "set A.trains to false"),
    ],
)
def test_mistakes_have_a_remedy(changes, message):
    with pytest.raises(UserError, match=message):
        NullSpace(network(), **changes)


def test_what_needs_covariances_says_so():
    space = NullSpace(network(), rule="owm", keep_tasks=True)
    space.consolidate()
    with pytest.raises(UserError, match="projector recursive does not keep"):
        space.forget(0)
    with pytest.raises(UserError, match="projector recursive does not keep"):
        space.merge(NullSpace(network(), rule="owm"))
    with pytest.raises(UserError, match="consolidate needs batches"):
        NullSpace(network(), rule="gpm").consolidate()


def test_a_saved_space_belongs_to_its_rule(tmp_path):
    space = NullSpace(network(), rule="osf")
    space.consolidate()
    space.save(tmp_path / "space.safetensors")
    other = NullSpace(network(), rule="osf")
    other.load(tmp_path / "space.safetensors")
    assert torch.equal(other.decompositions()["0.weight"].basis, space.decompositions()["0.weight"].basis)
    with pytest.raises(UserError, match="projector weights, this one gpm"):
        NullSpace(network(), rule="gpm", accumulate="sum").load(tmp_path / "space.safetensors")
