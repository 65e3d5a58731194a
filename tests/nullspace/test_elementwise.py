"""The protection of A element by element: the bound behind its boxes, and what the boxes keep."""

import math

import pytest
import torch
from block_models import build, output
from nullspace_help import A_LOG, X_PROJ, images, set_random_gradients, snapshot

import mambacl.ops
from mambacl.errors import UserError
from mambacl.nullspace import NullSpace
from mambacl.nullspace.block_readers import find_blocks
from mambacl.nullspace.elementwise import MARGIN, Activity, activity, activity_and_sensitivity, box, sensitivity
from mambacl.nullspace.statistics import value, watching

SHAPES = [(1, 1, 1, 1), (1, 6, 2, 3), (3, 9, 4, 2), (2, 17, 3, 8)]
STEPS = [1e-6, 1e-3, 0.1, 1.0, 30.0]


def random_scan(shape=(2, 17, 3, 8), step=0.1, seed=0):
    """x, delta (b, l, d), A_log (d, n), B, C (b, l, n); delta spreads over two decades around `step`."""
    batch, length, width, states = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64)

    delta = step * 10 ** normal(batch, length, width).clamp(-1, 1)
    A_log = torch.arange(1, states + 1).double().log() + 0.5 * normal(width, states)
    return normal(batch, length, width), delta, A_log, normal(batch, length, states), normal(batch, length, states)


def plain_scan(x, delta, A_log, B, C):
    """y (b, l, d) by the recurrence."""
    h, outputs = torch.zeros(x.shape[0], *A_log.shape, dtype=x.dtype), []
    for t in range(x.shape[1]):
        step = delta[:, t, :, None]
        h = torch.exp(-step * A_log.exp()) * h + step * x[:, t, :, None] * B[:, t, None, :]
        outputs.append((h * C[:, t, None, :]).sum(-1))
    return torch.stack(outputs, dim=1)


def plain_k(x, delta, A_log, B, C, margin=MARGIN):
    """k of every token (b, l, d, n), each pair s <= t by itself: the steepest that exp(-a e^theta S) gets in theta for
    |theta| <= margin is at most a e^margin S exp(-a e^-margin S)."""
    a = A_log.exp()
    k = torch.zeros(*x.shape, A_log.shape[1], dtype=x.dtype)
    for t in range(x.shape[1]):
        for s in range(t + 1):
            S = delta[:, s + 1 : t + 1].sum(1)[..., None]
            slope = a * math.exp(margin) * S * torch.exp(-a * math.exp(-margin) * S)
            entering = (delta[:, s] * x[:, s])[..., None] * B[:, s, None, :]
            k[:, t] += C[:, t, None, :].abs() * slope * entering.abs()
    return k


def norms(y):
    """Of every channel, over images and tokens."""
    return y.flatten(0, 1).norm(dim=0)


def moves(A_log, seed, size=MARGIN):
    """Changes of A_log: any, all up, all down, and to the corners."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.rand(A_log.shape, generator=generator, dtype=A_log.dtype) * 2 - 1
    return [size * signs, size * torch.ones_like(A_log), -size * torch.ones_like(A_log), size * signs.sign()]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_recursion_sums_the_squares_of_k_and_y(shape, step):
    scan = random_scan(shape, step)
    k, y = sensitivity(*scan)
    torch.testing.assert_close(k, plain_k(*scan).square().sum((0, 1)), rtol=1e-10, atol=1e-300)
    torch.testing.assert_close(y, norms(plain_scan(*scan)).square(), rtol=1e-10, atol=1e-300)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_k_bounds_the_change_of_every_token(shape, step):
    tightest = 0.0
    for seed in range(4):
        x, delta, A_log, B, C = random_scan(shape, step, seed)
        y, k = plain_scan(x, delta, A_log, B, C), plain_k(x, delta, A_log, B, C)
        for size in (MARGIN, MARGIN / 100):
            for change in moves(A_log, seed, size):
                difference = (plain_scan(x, delta, A_log + change, B, C) - y).abs()
                bound = (change.abs() * k).sum(-1)
                assert (difference <= bound * (1 + 1e-9) + 1e-14 * y.abs().max()).all()
                seen = bound > 1e-12 * y.abs().max()
                if seen.any():
                    tightest = max(tightest, (difference[seen] / bound[seen]).max().item())
    print(f"delta around {step:g}: changes reach {tightest:.0%} of the bound")
    assert tightest > 0.05 or step == 30.0  # a bound, but not an empty one


def relative_change(scan, A_log):
    x, delta, old, B, C = scan
    before = plain_scan(x, delta, old, B, C)
    return norms(plain_scan(x, delta, A_log, B, C) - before) / norms(before).clamp(min=1e-300)


def corners(limits, A_log, seed=0):
    """Places in a box: random ones, both ends, random corners; values that are free stay."""
    lower, upper = (torch.where(limits.protects(), end, A_log) for end in (limits.lower, limits.upper))
    share = torch.rand(A_log.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return [lower + share * (upper - lower), lower, upper, torch.where(share > 0.5, lower, upper)]


@pytest.mark.parametrize("relax", [0.01, 0.05, 0.5])
@pytest.mark.parametrize("step", STEPS)
def test_inside_its_box_a_channel_changes_by_its_share_at_most(step, relax):
    largest = 0.0
    for shape in SHAPES[1:]:
        scan = random_scan(shape, step)
        limits = box(scan[2], activity_and_sensitivity(scan), relax)
        for A_log in corners(limits, scan[2]):
            largest = max(largest, relative_change(scan, A_log).max().item())
    print(f"delta around {step:g}: {largest / relax:.0%} of what relax {relax} allows")
    assert largest <= relax * (1 + 1e-9)


def test_inside_two_boxes_both_tasks_change_by_their_share_at_most():
    first, second = random_scan(seed=1), random_scan(seed=2)
    limits = box(first[2], activity_and_sensitivity(first), 0.05)
    A_log = corners(limits, first[2])[0]
    second = (*second[:2], A_log, *second[3:])
    both = box(A_log, activity_and_sensitivity(second), 0.05).within(limits)
    assert (both.lower <= A_log).all() and (A_log <= both.upper).all()
    for place in corners(both, A_log):
        assert relative_change(first, place).max() <= 0.05 and relative_change(second, place).max() <= 0.05


def test_batches_add_up_to_the_task():
    x, delta, A_log, B, C = random_scan((6, 9, 4, 2))
    together, summed = activity_and_sensitivity((x, delta, A_log, B, C)), Activity("delta", "scan", relaxed=True)
    for part in (slice(0, 1), slice(1, 4), slice(4, 6)):
        summed.add((x[part], delta[part], A_log, B[part], C[part]))
    assert summed.inputs == ("scan",) and summed.totals.keys() == together.keys()
    for word in together:
        torch.testing.assert_close(summed.totals[word], together[word])
    assert torch.equal(activity(delta)["time"], together["time"])


@pytest.mark.parametrize("relax", [0.0, 0.05])
def test_channels_are_free_only_where_delta_was_nothing(relax):
    x, delta, A_log, B, C = random_scan()
    delta[:, :, 1] = 1e-12
    limits = box(A_log, activity_and_sensitivity((x, delta, A_log, B, C)), relax)
    assert limits.protects().all(1).tolist() == [True, False, True]
    assert torch.isinf(limits.lower[1]).all() and torch.isinf(limits.upper[1]).all()
    widths = (limits.upper - limits.lower)[[0, 2]]
    assert (widths > 0).all() if relax else (widths == 0).all()


def test_a_box_never_reaches_beyond_the_margin():
    scan = random_scan(step=1e-3)
    limits = box(scan[2], activity_and_sensitivity(scan), 0.9)
    assert (limits.upper - scan[2]).max() <= MARGIN + 1e-12 and (scan[2] - limits.lower).max() <= MARGIN + 1e-12


def test_a_channel_without_output_does_not_move():
    x, delta, A_log, B, C = random_scan()
    x[:, :, 0] = 0
    limits = box(A_log, activity_and_sensitivity((x, delta, A_log, B, C)), 0.05)
    assert torch.equal(limits.lower[0], A_log[0]) and torch.equal(limits.upper[0], A_log[0])


def test_a_slow_state_of_an_active_channel_is_not_free():
    """A_log = -20 decays by 1e-9 of itself, and so is free: but wherever it goes from there, old outputs change."""
    x, delta, A_log, B, C = random_scan(step=0.1)
    A_log = torch.full_like(A_log, -20.0)
    limits = box(A_log, activity(delta), relax=0.0)
    moved = (A_log + 22).clamp(limits.lower, limits.upper)
    assert relative_change((x, delta, A_log, B, C), moved).max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_box_in_any_precision_stays_within_its_radius(dtype):
    generator = torch.Generator().manual_seed(0)
    A_log = torch.randn(64, 8, generator=generator).to(dtype)
    k = 1e3 * torch.rand(64, 8, generator=generator).double() + 1.0
    seen = {"time": torch.ones(64).double(), "k": k, "y": torch.ones(64).double()}
    limits, radius = box(A_log, seen, 0.05), (0.05 / 8 / k.sqrt()).clamp(max=MARGIN)
    for end in (limits.lower, limits.upper):
        assert end.dtype == dtype
        assert ((end.double() - A_log.double()).abs() <= radius * 1.001).all()


# Through a model


def scans_of(model, space, batch):
    """What each part of A multiplies, by its name: x, delta, A_log, B, C."""
    seen = {}
    parts = [(block.name, part) for block, part in space.selection.parts() if part.kind == "A"]

    def show(block, features):
        for name, part in parts:
            key = part.inputs.get("scan", "scan")
            if name == block.name and key in features:
                seen[part.name] = tuple(t.detach().double().clone() for t in value(features, key))

    with watching(space.selection.blocks, show), torch.no_grad():
        output(model, batch)
    return seen


def train(model, optimizer, inputs, steps):
    for step in range(steps):
        optimizer.zero_grad()
        output(model, inputs(1000 + step, 2).double()).sin().sum().backward()
        optimizer.step()


class Recorder:
    """Stands in for the scan of our backbones, and keeps what goes in and comes out."""

    def __init__(self, monkeypatch, family):
        home = "mambacl.ops.scan" if family == "defocus" else "mambacl.ops"
        self.calls = []
        original = mambacl.ops.scan_tokens

        def recorded(x, steps, logarithm, B, C, *backend, **named):
            y, last = original(x, steps, logarithm, B, C, *backend, **named)
            A, delta = -logarithm.exp(), torch.nn.functional.softplus(steps) if named["softplus"] else steps
            self.calls.append(tuple(t.detach().clone() for t in (x, delta, A, B, C, y)))
            return y, last

        monkeypatch.setattr(f"{home}.scan_tokens", recorded)

    def __call__(self, model, batch):
        """The scans of one batch, a block each."""
        self.calls.clear()
        with torch.no_grad():
            model(batch)
        return list(self.calls)


BACKBONES = ["defocus", "vim", "vmamba"]


@pytest.mark.parametrize("family", BACKBONES)
def test_the_scan_that_is_bounded_is_the_models_own(monkeypatch, family):
    """Input, step sizes, B and C of every direction in the order of its scan, on an image that is not square for the
    backbone that takes one."""
    model = build(family)[0].double()
    record = Recorder(monkeypatch, family)
    batch = torch.randn(2, 3, 16, 32 if family == "vmamba" else 16, dtype=torch.float64)
    calls, scans = record(model, batch), scans_of(model, NullSpace(model, "exact", relax=0.1), batch)
    assert len(calls) == 2
    for number, block in enumerate(find_blocks(model)):
        x, delta, A, B, C, y = calls[number]
        own = [scans[part.name] for part in block.parts if part.kind == "A"]
        torch.testing.assert_close(torch.cat([scan[0] for scan in own], -1), x)
        torch.testing.assert_close(torch.cat([scan[1] for scan in own], -1), delta)
        torch.testing.assert_close(torch.cat([-scan[2].exp() for scan in own]), A)
        for place, states in ((3, B), (4, C)):
            torch.testing.assert_close(
                torch.stack([scan[place] for scan in own], 2), states.expand(-1, -1, len(own), -1)
            )
        torch.testing.assert_close(torch.cat([plain_scan(*scan) for scan in own], -1), y)


def after_training(monkeypatch, family, tasks, relax):
    """A model trained far after each task; and of each task an image, the model's scans of it, and what went in."""
    model, inputs, _ = build(family)
    model, record = model.double(), Recorder(monkeypatch, family)
    space = NullSpace(model, "exact", relax=relax)
    optimizer = space.wrap(torch.optim.Adam(space.parameters(), lr=0.05))
    kept = []
    for task in range(tasks):
        old = inputs(task).double()
        space.consolidate([old])
        kept.append((old, record(model, old), scans_of(model, space, old)))
        train(model, optimizer, inputs, 50 // tasks)
    return model, space, record, kept


def change_of_block(record, model, kept, number):
    """The largest change of a channel of one block's scan, over all tasks."""
    largest = 0.0
    for old, calls, _ in kept:
        before, after = calls[number][-1], record(model, old)[number][-1]
        largest = max(largest, (norms(after - before) / norms(before)).max().item())
    return largest


@pytest.mark.slow
@pytest.mark.parametrize("tasks", [1, 2])
@pytest.mark.parametrize("family", BACKBONES)
def test_after_training_no_channel_of_the_scan_changed_by_more_than_its_share(monkeypatch, family, tasks):
    relax = 0.05
    model, space, record, kept = after_training(monkeypatch, family, tasks, relax)
    places = {part.name: part.of(model.get_parameter(part.parameter)).detach() for _, part in space.selection.parts()}
    for old, calls, scans in kept:
        now = record(model, old)
        for number in (0, 1, 3, 4):  # what goes into the first block's scan is what it was
            torch.testing.assert_close(now[0][number], calls[0][number], rtol=1e-8, atol=1e-9)
        for name, scan in scans.items():  # on inputs as they were, every block keeps its share
            assert (places[name] - scan[2]).abs().max() > 1e-3
            assert relative_change(scan, places[name]).max() <= relax
    for name, limits in space.projected_step.boxes().items():
        assert (limits.lower <= places[name]).all() and (places[name] <= limits.upper).all()
    first, second = (change_of_block(record, model, kept, number) for number in (0, 1))
    print(f"{family}: first block {first:.2%}, second {second:.2%}; {relax:.0%} is allowed")
    assert 0 < first <= relax


@pytest.mark.parametrize("name", ["mambavision", "mamba_ssm", "MambaForCausalLM", "FalconMamba"])
def test_other_blocks_keep_their_share_too(name):
    relax, (model, inputs, _) = 0.05, build(name)
    model = model.double()
    space = NullSpace(model, "exact", relax=relax)
    old = inputs(0) if inputs(0).dtype == torch.long else inputs(0).double()
    space.consolidate([old])
    scans, start = scans_of(model, space, old), snapshot(model)
    optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=1.0))
    for seed in range(10):
        set_random_gradients(model, seed)
        optimizer.step()
    for part_name, scan in scans.items():
        A_log = model.get_parameter(part_name).detach()
        assert not torch.equal(A_log, start[part_name])
        assert 0 < relative_change(scan, A_log).max() <= relax


def quiet(model, channel=5):
    """One channel of the first block whose delta is as good as nothing."""
    with torch.no_grad():
        model.blocks[0].mixer.dt_proj.weight[channel] = 0
        model.blocks[0].mixer.dt_proj.bias[channel] = -30.0
    return model


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_active_channels_stay_to_the_bit_and_others_move_freely(tiny_model, optimizer):
    model = quiet(tiny_model())
    space = NullSpace(model, "exact")
    space.consolidate([images()])
    start, free = snapshot(model), snapshot(model)
    wrapped = space.wrap(optimizer(space.parameters(), lr=0.1))
    plain = optimizer([free[f"blocks.0.{A_LOG}"].requires_grad_()], lr=0.1)
    for step in range(3):
        set_random_gradients(model, step)
        free[f"blocks.0.{A_LOG}"].grad = model.blocks[0].mixer.A_log.grad.clone()
        wrapped.step()
        plain.step()
    still = (model.blocks[0].mixer.A_log == start[f"blocks.0.{A_LOG}"]).all(1)
    assert (~still).nonzero().flatten().tolist() == [5]
    assert torch.equal(model.blocks[1].mixer.A_log, start[f"blocks.1.{A_LOG}"])
    torch.testing.assert_close(model.blocks[0].mixer.A_log[5], free[f"blocks.0.{A_LOG}"][5])


def test_a_channel_that_a_later_task_uses_is_fixed_from_then_on(tiny_model):
    model = quiet(tiny_model())
    space = NullSpace(model, "exact")
    space.consolidate([images(seed=1)])
    assert not space.projected_step.boxes()[f"blocks.0.{A_LOG}"].protects()[5].any()
    with torch.no_grad():
        model.blocks[0].mixer.dt_proj.bias[5] = 0.0
    space.consolidate([images(seed=2)])
    assert space.projected_step.boxes()[f"blocks.0.{A_LOG}"].protects().all()
    with torch.no_grad():
        model.blocks[0].mixer.dt_proj.bias[5] = -30.0
    space.consolidate([images(seed=3)])
    assert space.projected_step.boxes()[f"blocks.0.{A_LOG}"].protects().all()


@pytest.mark.parametrize("eta", [0.0, 0.3, 0.95])
def test_with_eta_below_one_A_moves_by_the_rest_of_it(tiny_model, eta):
    model = tiny_model().double()
    space = NullSpace(model, "exact", eta=eta)
    space.consolidate([images(dtype=torch.float64)])
    start = snapshot(model)
    set_random_gradients(model, 0)
    space.wrap(torch.optim.SGD(space.parameters(), lr=0.1)).step()
    for name in space.projected_step.boxes():
        step = -0.1 * model.get_parameter(name).grad
        torch.testing.assert_close(model.get_parameter(name).detach() - start[name], (1 - eta) * step)


def test_a_box_is_kept_whatever_eta_is(tiny_model):
    model = tiny_model().double()
    space = NullSpace(model, "exact", eta=0.2, relax=0.05)
    space.consolidate([images(dtype=torch.float64)])
    optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=1.0))
    for seed in range(3):
        set_random_gradients(model, seed)
        optimizer.step()
    for name, limits in space.projected_step.boxes().items():
        A_log = model.get_parameter(name)
        assert (limits.lower <= A_log).all() and (A_log <= limits.upper).all()


def test_W_delta_and_A_do_not_disturb_each_other(tiny_model):
    """delta of old inputs is what it was while A moves in its box."""
    model = tiny_model().double()
    space = NullSpace(model, "exact", relax=0.2)
    old = images(1, dtype=torch.float64)
    space.consolidate([old])
    before, start = scans_of(model, space, old), snapshot(model)
    optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=0.1))
    for seed in range(5):
        set_random_gradients(model, seed)
        optimizer.step()
    after = scans_of(model, space, old)[f"blocks.0.{A_LOG}"]
    assert (model.get_parameter(f"blocks.0.{X_PROJ}") - start[f"blocks.0.{X_PROJ}"]).norm() > 0.1
    for number in (0, 1, 3, 4):
        torch.testing.assert_close(after[number], before[f"blocks.0.{A_LOG}"][number], rtol=1e-9, atol=1e-10)


def test_a_number_a_head_has_no_relaxation():
    with pytest.raises(UserError, match=r"^relax does not support an A with one number per head[^\n]*use relax 0\.$"):
        NullSpace(build("Mamba2")[0], "exact", relax=0.05)


def test_a_number_a_head_is_fixed_to_the_bit():
    model, inputs, _ = build("Mamba2")
    space = NullSpace(model, "exact")
    space.consolidate([inputs(0)])
    start = snapshot(model)
    set_random_gradients(model, 0)
    space.wrap(torch.optim.AdamW(space.parameters(), lr=0.1)).step()
    assert len(space.projected_step.boxes()) == 2
    assert all(torch.equal(model.get_parameter(name), start[name]) for name in space.projected_step.boxes())


def test_relax_goes_with_the_elementwise_protection_only(tiny_model):
    with pytest.raises(UserError, match="relax goes with A protected by delta-elementwise"):
        NullSpace(tiny_model(), "paper", relax=0.1)
    for relax in (-0.1, 1.0, math.nan):
        with pytest.raises(UserError, match="relax must lie between 0"):
            NullSpace(tiny_model(), "exact", relax=relax)
