"""Float32 masters of weights in half precision: small updates are not lost, old outputs do not drift with the number of
steps, and training resumes bit for bit."""

import copy

import pytest
import torch
from nullspace_help import images
from processes import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from mambacl import processes
from mambacl.errors import UserError
from mambacl.nullspace import NullSpace


def plain_model(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 8)).to(dtype)


def batch(seed, count=8):
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(seed))


def protected(model):
    space = NullSpace(model, "exact", rank="tolerance:1e-9", layers="all", others="fixed")
    space.consolidate([batch(0).to(next(model.parameters()).dtype)])
    return space


def train(model, optimizer, steps, first=0, size=16):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        inputs = batch(1000 + step, size).to(next(model.parameters()).dtype)
        model(inputs).float().square().mean().backward()
        optimizer.step()


def drift_after(steps, masters, dtype=torch.bfloat16, kind=torch.optim.SGD, lr=0.02):
    """How far 200 small steps move old outputs, by the weights and by the masters."""
    model = plain_model(dtype)
    space, old = protected(model), batch(0)
    start = copy.deepcopy(model).double()
    train(model, space.wrap(kind(space.parameters(), lr=lr), masters=masters), steps)
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        before = start(old.double())
        by_weights = ((exact(old.double()) - before).norm() / before.norm()).item()
        assert masters == bool(space.masters)
        for name, master in space.masters.items():
            exact.get_parameter(name).copy_(master)
        by_masters = ((exact(old.double()) - before).norm() / before.norm()).item()
        moved = max((exact.get_parameter(n) - p).norm() / p.norm() for n, p in start.named_parameters())
    return by_weights, by_masters, float(moved)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_old_outputs_drift_only_by_one_rounding(dtype):
    without, _, _ = drift_after(200, masters=False, dtype=dtype)
    with_masters, exact, moved = drift_after(200, masters=True, dtype=dtype)
    rounding = torch.finfo(dtype).eps
    assert moved > 0.005  # it has learned
    assert exact < rounding * moved  # the masters stay in the null space of features in half precision
    assert with_masters < rounding  # the weights are their rounding, once
    assert without > 10 * with_masters  # updates that are rounded each time drift


def test_updates_too_small_for_the_weights_add_up():
    model = plain_model()
    space = protected(model)
    before = copy.deepcopy(model.state_dict())
    optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=1e-5), masters=True)
    train(model, optimizer, 1)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())  # below the rounding
    assert not torch.equal(space.masters["2.weight"], before["2.weight"].float())
    assert all(torch.equal(m.bfloat16(), model.get_parameter(n)) for n, m in space.masters.items())


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD], ids=lambda kind: kind.__name__)
def test_resuming_is_bit_for_bit(kind, tmp_path):
    def made():
        model = plain_model()
        space = NullSpace(model, "exact", rank="tolerance:1e-9", layers="all", others="fixed")
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        return model, space, kind(space.parameters(), lr=1e-3, **options)

    model, space, optimizer = made()
    space.consolidate([batch(0).bfloat16()])
    space.wrap(optimizer, masters=True)
    train(model, optimizer, 4)
    space.save(tmp_path / "space.safetensors")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                "step": dict(space.projected_step.state_dict())}, tmp_path / "rest.pt")  # fmt: skip
    train(model, optimizer, 4, first=4)
    assert all(t.dtype == torch.float32 for s in optimizer.state.values() for n, t in s.items() if n != "step")

    again, space_again, optimizer_again = made()
    rest = torch.load(tmp_path / "rest.pt")
    space_again.wrap(optimizer_again, masters=True)
    space_again.load(tmp_path / "space.safetensors")  # in any order
    optimizer_again.load_state_dict(rest["optimizer"])
    space_again.projected_step.load_state_dict(rest["step"])
    again.load_state_dict(rest["model"])
    train(again, optimizer_again, 4, first=4)
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter)
    assert set(space.masters) == set(space.trained_names())
    for name, master in space.masters.items():
        assert torch.equal(space_again.masters[name], master)
    for name, row in space.update_energy().items():
        assert torch.equal(space_again.update_energy()[name], row)


def test_masters_outlive_an_optimizer_and_follow_weights_that_others_change():
    model = plain_model()
    space = protected(model)
    train(model, space.wrap(torch.optim.SGD(space.parameters(), lr=1e-3), masters=True), 3)
    kept = {name: master.clone() for name, master in space.masters.items()}
    optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=0.0), masters=True)
    with torch.no_grad():
        model[0].weight[0] = 0.5
    train(model, optimizer, 1)
    assert torch.equal(space.masters["2.weight"], kept["2.weight"])
    assert (space.masters["0.weight"][0] == 0.5).all()
    assert torch.equal(space.masters["0.weight"][1:], kept["0.weight"][1:])


def test_the_optimizer_has_the_models_parameters_between_steps():
    model = plain_model()
    space = protected(model)
    head = nn.Parameter(torch.zeros(3))  # of another module, in float32
    optimizer = torch.optim.Adam([*space.parameters(), head], lr=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(space.wrap(optimizer, masters=True), 0.5)
    given = [id(p) for p in optimizer.param_groups[0]["params"]]
    for _ in range(2):
        train(model, optimizer, 1)
        schedule.step()
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == given
        assert all(p.grad.dtype == torch.bfloat16 for p in space.parameters())
        assert set(optimizer.state) <= {*space.parameters(), head}


def test_a_closure_is_refused():
    model = plain_model()
    space = protected(model)
    optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=1e-3), masters=True)
    with pytest.raises(UserError, match="closure"):
        optimizer.step(lambda: model(batch(1).bfloat16()).sum())
    train(model, optimizer, 1)  # and goes on


def test_a_step_that_fails_leaves_the_parameters():
    model = plain_model()
    space = protected(model)
    optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=1e-3), masters=True)
    train(model, optimizer, 1)
    optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises(TypeError):
        train(model, optimizer, 1)
    optimizer.param_groups[0]["lr"] = 1e-3
    train(model, optimizer, 1)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in space.parameters()]


def test_a_warning_names_the_remedy(caplog):
    model = plain_model()
    space = protected(model)
    caplog.clear()
    space.wrap(torch.optim.SGD(space.parameters(), lr=1e-3))
    (warning,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert "3 protected parameters are in bfloat16" in warning and "masters=True" in warning
    caplog.clear()
    for optimizer, options in ((torch.optim.SGD(space.parameters(), lr=1e-3), {"masters": True}),):
        space.wrap(optimizer, **options)
    whole = plain_model(torch.float32)
    protected_whole = protected(whole)
    protected_whole.wrap(torch.optim.SGD(protected_whole.parameters(), lr=1e-3))
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_selective_ssms_in_bfloat16(tiny_model):
    """The parameters that train in bfloat16, among others in float32."""
    model = tiny_model()

    def forward(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    space = NullSpace(model, "exact", rank="tolerance:1e-9", relax=0.01)
    for name in space.trained_names():
        model.get_parameter(name).data = model.get_parameter(name).data.bfloat16()
    space.consolidate([images()], forward)
    optimizer = space.wrap(torch.optim.Adam(space.parameters(), lr=1e-4), masters=True)
    for step in range(3):
        optimizer.zero_grad()
        forward(images(seed=5 + step)).float().square().mean().backward()
        optimizer.step()
    assert set(space.masters) == set(space.trained_names())
    for name, box in space.projected_step.boxes().items():  # A stays in its box
        master = space.masters[name]
        assert (master >= box.lower.float()).all() and (master <= box.upper.float()).all()


def cut_with_masters():
    model = plain_model()
    space = NullSpace(model, "exact", rank="tolerance:1e-9", layers="all", others="fixed")
    fully_shard(model)
    space.consolidate([batch(0)[processes.part(8)].bfloat16()])
    optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=1e-2), masters=True)
    train(model, optimizer, 2)
    state, step = space.state_dict(), dict(space.projected_step.state_dict())
    weights = {name: p.full_tensor() for name, p in model.named_parameters()}
    space.load_state_dict(state)  # whole masters are cut again
    space.projected_step.load_state_dict(step)
    train(model, optimizer, 1, first=2)
    return state, weights, space.state_dict()


@pytest.mark.slow
def test_masters_of_cut_models():
    model = plain_model()
    space = protected(model)
    optimizer = space.wrap(torch.optim.SGD(space.parameters(), lr=1e-2), masters=True)
    train(model, optimizer, 3)
    for state, weights, later in on_ranks(2, cut_with_masters):
        names = [name.removesuffix(".master") for name in state if name.endswith(".master")]
        assert set(names) == set(space.masters)
        for name in names:
            assert torch.equal(state[f"{name}.master"].bfloat16(), weights[name])
            torch.testing.assert_close(later[f"{name}.master"], space.masters[name], rtol=0, atol=1e-4)
