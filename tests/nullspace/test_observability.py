"""The distance of observable behaviour: its closed form, its gradients, and numbers of the published formulas."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tolerance import assert_near, rounding

from mambacl.nullspace.observability import distance, gram, mean_transition, norm, squashed, trace


def systems(states: int, tokens: int = 7, seed: int = 0) -> list[torch.Tensor]:
    """Transitions and output rows of two SSMs, in float64."""
    generator = torch.Generator().manual_seed(seed)
    a, old_a = 0.9 * torch.rand(2, tokens, states, generator=generator, dtype=torch.float64)
    c, old_c = torch.randn(2, tokens, states, generator=generator, dtype=torch.float64)
    return [a, c, old_a, old_c]


@pytest.mark.parametrize("states", [1, 3, 16])
def test_the_closed_form_is_the_sum_over_time(states: int) -> None:
    a, c, old_a, old_c = systems(states)
    longest = 400  # 0.9^400 is below the unit roundoff
    times = torch.arange(longest, dtype=torch.float64)[:, None]
    ours, theirs = (rows[:, None] * transitions[:, None] ** times for transitions, rows in ((a, c), (old_a, old_c)))
    assert_near(gram(a, c, old_a, old_c), torch.einsum("lti,ltj->lij", ours, theirs), longest)
    assert_near(trace(a, c), ours.square().sum((1, 2)), longest * states)
    products = torch.einsum("lti,ltj->lij", ours, theirs)
    both = [torch.einsum("lti,lti->l", one, one) for one in (ours, theirs)]
    expected = (1 - torch.einsum("lij,lij->l", products, products) / (both[0] * both[1])).mean()
    assert_near(distance(a, c, old_a, old_c), expected, longest * states**2, size=1.0)
    assert 0 < float(expected) < 1


def test_one_state_at_the_same_place_is_no_distance() -> None:
    a, c, *_ = systems(1)
    assert_near(
        distance(a, c, a, 3 * c), torch.zeros((), dtype=torch.float64), 10, size=1.0
    )  # the subspace is the same


def test_norms_make_no_change_the_smallest_distance() -> None:
    a, c, *_ = systems(4)
    small = 1e-4 * torch.randn(2, *a.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    near, far = (distance(a + s * small[0], c + s * small[1], a, c, norm) for s in (1, 10))
    assert 0 < near < far < 1e-4 and far / near == pytest.approx(100, rel=0.05)  # quadratic, so flat at 0
    by_traces = [distance(a + s * small[0], c, a, c) for s in (1, -1)]
    assert min(by_traces) < 1 - (norm(a, c) ** 2 / trace(a, c) ** 2).mean()  # than where both are alike


def test_a_token_without_output_has_no_distance() -> None:
    a, c, old_a, old_c = systems(3)
    c[:2] = 0
    c.requires_grad_()
    found = distance(a, c, old_a, old_c)
    found.backward()
    assert_near(found, distance(a[2:], c[2:], old_a[2:], old_c[2:]) * 5 / 7, 10)
    assert torch.isfinite(c.grad).all()


def test_alike_systems_have_no_distance_and_no_gradient() -> None:
    a, c, *_ = systems(4)
    a.requires_grad_(), c.requires_grad_()
    found = distance(a, c, a.detach() * (1 + 1e-7), c.detach())
    found.backward()
    assert found.item() == 0 and not a.grad.any() and not c.grad.any()
    assert distance(a, c, a.detach() * 1.01, c.detach()).item() > 0.01  # of several states at once


@pytest.mark.parametrize("states", [1, 5])
def test_gradients_by_finite_differences(states: int) -> None:
    inputs = [tensor.requires_grad_() for tensor in systems(states, tokens=3)]
    for size in (trace, norm):
        assert torch.autograd.gradcheck(lambda *tensors, size=size: distance(*tensors, size), inputs)
    generator = torch.Generator().manual_seed(1)
    delta = torch.rand(2, 3, 6, generator=generator, dtype=torch.float64).requires_grad_()
    A_log = torch.randn(6, states, generator=generator, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(mean_transition, (delta, A_log))
    expected = torch.exp(delta[..., None] * -A_log.exp()).mean(2)
    assert_near(mean_transition(delta, A_log), expected, 6)


def test_in_float32_it_is_the_same_to_rounding() -> None:
    wide = systems(16, tokens=200)
    found = distance(*(tensor.float() for tensor in wide))
    assert abs(float(found) - float(distance(*wide))) <= rounding(256)


FORMULAS, GRADIENTS = 1e-9, 1e-8  # relative to a tensor's largest value


def near(found: torch.Tensor, stored: torch.Tensor, tolerance: float = FORMULAS) -> None:
    assert found.shape == stored.shape
    assert (found - stored).abs().max() <= tolerance * stored.abs().max().clamp(min=1e-3)


def test_as_recorded(goldens: Path) -> None:
    """Two layers with two directions: Abar, C, both squashed, the Gram matrix, distances, penalty and gradients."""
    recorded = load_file(goldens / "inf_ssm.safetensors")
    places = [f"layer{layer}.{direction}" for layer in range(2) for direction in ("forward", "backward")]
    inputs, distances = {}, []
    for place in places:
        found = {}
        for model in ("new", "old"):
            prefix = f"{place}.{model}."
            raw, A_log, C = (recorded[prefix + name].clone() for name in ("delta_raw", "A_log", "C"))
            if model == "new":
                inputs[place] = {
                    "delta_raw": raw.requires_grad_(),
                    "A_log": A_log.requires_grad_(),
                    "C": C.requires_grad_(),
                }
            a = mean_transition(torch.nn.functional.softplus(raw).mT, A_log)  # (b, l, n)
            if model == "new":
                near(a, recorded[prefix + "mean_transition"])
            rows = squashed(a).flatten(0, 1), squashed(C.squeeze(1).mT).flatten(0, 1)
            near(rows[0], recorded[prefix + "squashed_transition"])
            near(rows[1], recorded[prefix + "squashed_C"])
            found[model] = rows
        joint = [torch.cat((found["new"][i], found["old"][i]), dim=1) for i in range(2)]
        if place + ".joint_gram" in recorded:
            near(gram(*joint, *joint), recorded[place + ".joint_gram"])
        distances.append(distance(*found["new"], *found["old"]))
        near(distances[-1], recorded[place + ".distance"])
    penalty = 100 * torch.stack(distances).mean()
    near(penalty, recorded["penalty"])
    penalty.backward()
    for place, own in inputs.items():
        for name, tensor in own.items():
            near(tensor.grad, recorded[f"{place}.gradient.{name}"], GRADIENTS)
