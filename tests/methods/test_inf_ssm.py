"""Inf-SSM: what it compares in every family, its loss, its old model; and that it holds the model back."""

import pytest
import torch
import torch.nn.functional as F
from block_models import build
from tiny_stream_help import images_of, learn
from torch import nn

from mambacl.errors import UserError
from mambacl.methods import METHODS, Setup, Task
from mambacl.nullspace.observability import distance, norm, squashed, trace

SYSTEMS = {"defocus": (2, 8), "vim": (4, 16), "vmamba": (8, 1), "vanilla_vmamba": (8, 4), "mambavision": (2, 8)}


def images(count: int = 4, size: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def second_task(model: nn.Module, **options: object):
    """In float64, in the second task, with parameters that have moved a little since the first."""
    method = METHODS.get("inf-ssm")(model.double(), Setup(options=options))
    method.start_task(Task(0, 2, 0, seed=0))
    method.finish_task([])
    method.start_task(Task(1, 2, 2, seed=1))
    method.heads.double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in method.tuning.trained():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return method


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_family(name: str) -> None:
    """All directions of all blocks; the penalty has gradients for each SSM, right to finite differences."""
    model, inputs, blocks = build(name)
    method = second_task(model)
    x, labels = inputs(0, 4).double(), torch.tensor([2, 3, 2, 3])
    with torch.no_grad():
        output, systems = method.observed(x, method.features)
        assert torch.equal(output, method.model(x))
    count, states = SYSTEMS[name]
    assert len(method.blocks) == blocks and len(systems) == count
    assert {part.shape[-1] for pair in systems for part in pair} == {states}
    assert all(((a > 0) & (a < 0.4622)).all() and a.shape == c.shape for a, c in systems)

    plain, _ = METHODS.get("frozen").loss(method, x, labels)
    loss, _ = method.loss(x, labels)
    assert loss.item() > plain.item()
    loss.backward()
    named = dict(method.tuning.trained())
    direction = {n: torch.randn(p.shape, generator=torch.Generator().manual_seed(2)).double() for n, p in named.items()}
    slope = sum(float((p.grad * direction[n]).sum()) for n, p in named.items() if p.grad is not None)
    step, found = 1e-6, []
    with torch.no_grad():
        for sign in (1, -2):
            for n, p in named.items():
                p += sign * step * direction[n]
            found.append(float(method.loss(x, labels)[0]))
    assert (found[0] - found[1]) / (2 * step) == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize("variant", ["paper", "public-code"])
def test_delta_and_its_bias_by_hand(variant: str) -> None:
    """Of the first Vim block, from its layers' outputs; the old model is the one before the task."""
    model, _, _ = build("vim")
    before = {name: tensor.clone().double() for name, tensor in model.state_dict().items()}
    method = second_task(model, variant=variant, weight=7.0)
    mixer, shown, found = model.layers[0].mixer, {}, []
    for suffix in ("", "_b"):
        getattr(mixer, f"x_proj{suffix}").register_forward_hook(lambda m, i, y, s=suffix: shown.__setitem__(s, y))
    now = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for state in (now, before):
        model.load_state_dict(state)
        with torch.no_grad():
            model(images())
        for suffix in ("", "_b"):
            rank = mixer.dt_proj.weight.shape[1]
            dt_proj = getattr(mixer, f"dt_proj{suffix}")
            dt, _, C = shown[suffix].split([rank, 16, 16], dim=-1)
            delta = F.softplus(F.linear(dt, dt_proj.weight, dt_proj.bias if variant == "paper" else None))
            A = -getattr(mixer, f"A{suffix}_log").detach().exp()
            a = torch.exp(delta[..., None] * A).mean(2).detach()
            found.append((2 * a.sigmoid() - 1, 2 * C.sigmoid() - 1))
    model.load_state_dict(now)
    with torch.no_grad():
        _, systems = method.observed(images(), method.features)
        loss, _ = method.loss(images(), torch.tensor([2, 3, 2, 3]))
        plain, _ = METHODS.get("frozen").loss(method, images(), torch.tensor([2, 3, 2, 3]))
        for (a, c), (ours_a, ours_c) in zip(found[:2], systems[:2], strict=True):
            torch.testing.assert_close(ours_a, a, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(ours_c, c, rtol=1e-12, atol=1e-12)
        _, old = method.observed(images(), lambda x: torch.func.functional_call(model, method.old, (x,)))
        for (a, c), (ours_a, ours_c) in zip(found[2:], old[:2], strict=True):
            torch.testing.assert_close(ours_a, a, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(ours_c, c, rtol=1e-12, atol=1e-12)
        apart = torch.stack([distance(*one, *other) for one, other in zip(systems, old, strict=True)])
    assert float(loss - plain) == pytest.approx(7 * float(apart.mean()), rel=1e-9)
    assert float(squashed(torch.tensor(1.0))) == pytest.approx(0.46211715726)


def test_what_trains_and_at_which_rate(tiny_model) -> None:
    method = METHODS.get("inf-ssm")(tiny_model(), Setup(options={"tune": "ssm"}))
    kinds = {name.split("mixer.")[1] for name, _ in method.tuning.trained()}
    assert kinds == {"x_proj.weight", "dt_proj.weight", "dt_proj.bias", "A_log", "D"}
    assert {name.split(".")[1] for name, _ in method.tuning.trained()} == {"0", "1"}
    for task in range(3):
        method.start_task(Task(task, 2, 2 * task, seed=0))
        assert method.phase(0, 2).rate == 0.5**task
    whole = METHODS.get("inf-ssm")(tiny_model(), Setup())
    assert len(whole.tuning.trained()) == len(list(whole.model.parameters()))


def test_the_old_model_is_kept_and_left_out_of_an_export(tiny_model) -> None:
    method, _ = learn("inf-ssm", {}, tasks=2, epochs=2, model=tiny_model())
    state = method.task_state_dict()
    assert set(state) == {f"old/{name}" for name, _ in method.tuning.trained()}
    assert method.for_answers(method.state_dict(), state)[1] == {}
    other = METHODS.get("inf-ssm")(tiny_model(), Setup())
    other.load_state_dict(method.state_dict())
    other.load_task_state_dict(state)
    for one in (method, other):
        one.start_task(Task(2, 2, 4, seed=2))
        with torch.no_grad():
            for name, parameter in one.tuning.trained():
                parameter.copy_(state[f"old/{name}"] + 0.01)
    x, labels = torch.randn(4, 3, 16, 16), torch.tensor([4, 5, 4, 5])
    assert torch.equal(method.loss(x, labels)[0], other.loss(x, labels)[0])


def test_it_holds_the_model_back(tiny_model) -> None:
    """After a second task, the distance from the model before is smaller with the penalty than without, and with norms
    so is that of the systems; both learn the task."""
    moved, apart = {}, {}
    x, _ = images_of(1)
    for weight, size in ((0.0, "norm"), (1e5, "norm"), (0.0, "trace"), (1e5, "trace")):
        options = {"weight": weight, "rate": 1.0, "size": size}
        method, losses = learn("inf-ssm", options, epochs=8, lr=0.003, model=tiny_model())
        assert losses[1][-1][1] < losses[1][1][1]
        start, _ = learn("inf-ssm", options, tasks=1, epochs=8, lr=0.003, model=tiny_model())
        with torch.no_grad():
            pairs = list(zip(*(one.observed(x, one.features)[1] for one in (method, start)), strict=True))
            found = [distance(*new, *old, norm if size == "norm" else trace).item() for new, old in pairs]
            squares = [(one - other).square().sum().item() for pair in pairs for one, other in zip(*pair, strict=True)]
        apart[weight, size], moved[weight, size] = sum(found), sum(squares)
    assert apart[1e5, "norm"] < apart[0.0, "norm"] / 2 and apart[1e5, "trace"] < apart[0.0, "trace"]
    assert moved[1e5, "norm"] < moved[0.0, "norm"] / 2


@pytest.mark.parametrize("options, words", [({"weight": -1.0}, "weight must be"), ({"rate": 2.0}, "rate must be")])
def test_a_mistake_gets_one_sentence(options, words, tiny_model) -> None:
    with pytest.raises(UserError, match=words):
        METHODS.get("inf-ssm")(tiny_model(), Setup(options=options))


def test_it_needs_selective_ssms(tiny_model_for) -> None:
    with pytest.raises(UserError, match="inf-ssm compares selective SSMs, but ViT has none"):
        METHODS.get("inf-ssm")(tiny_model_for("coda-prompt"), Setup())
