"""Heads on Gaussian bumps: numbers recorded from KAC's public layer, and what tasks share."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from mambacl.classifiers import KacHeads
from mambacl.errors import UserError

D, VARIANTS = 8, ["paper", "public-code"]


def assert_recorded(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    error = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
    assert error <= tolerance, f"off by {error:.3g}"


def test_kac_as_recorded(goldens: Path) -> None:
    """github.com/Ethanhuhuhu/KAC at d2494cb. The recording has one weight for all classes, we have a head per task."""
    recorded = load_file(goldens / "kac_layer.safetensors")
    heads = KacHeads(24)
    for task in range(2):
        at, rows = f"task{task}.", slice(3 * task, 3 * task + 3)
        heads.add_task(3, seed=task)
        head = heads.double().heads[-1]
        with torch.no_grad():
            head.weight.copy_(recorded["init.weight"][rows])
            if task == 0:
                head.norm.load_state_dict({name: recorded[f"init.norm.{name}"] for name in ("weight", "bias")})
        optimizer = torch.optim.Adam([p for _, p in heads.trained()], lr=0.01)
        for step in range(1, 4):
            tolerance = 1e-9 if task == 0 and step == 1 else 1e-7
            features = recorded[f"{at}step{step}.features"].double().requires_grad_()
            labels = recorded[f"{at}step{step}.labels"]
            if task == 0 and step == 1:
                assert_recorded(head.bumps(features), recorded["task0.step1.basis"], tolerance)
            assert_recorded(heads(features), recorded[f"{at}step{step}.logits"][:, : rows.stop], tolerance)
            loss = F.cross_entropy(heads.task_logits(features), labels - rows.start)
            assert_recorded(loss, recorded[f"{at}step{step}.loss"], tolerance)
            optimizer.zero_grad()
            loss.backward()
            assert_recorded(features.grad, recorded[f"{at}step{step}.grad.features"], tolerance)
            for name, parameter in head.named_parameters():
                expected = recorded[f"{at}step{step}.grad.{name}"]
                assert_recorded(parameter.grad, expected[rows] if name == "weight" else expected, tolerance)
            optimizer.step()
            if step != 2:
                for name, parameter in head.named_parameters():
                    expected = recorded[f"{at}step{step}.{name}"]
                    assert_recorded(parameter, expected[rows] if name == "weight" else expected, 1e-7)
        scores = heads.scores(recorded["test.features"].double())
        assert_recorded(scores, recorded[f"{at}end.test_logits"][:, : rows.stop], 1e-7)


@pytest.mark.parametrize("variant", VARIANTS)
def test_old_weights_stay_and_shared_parts_go_on(variant: str) -> None:
    heads, features = KacHeads(D, variant=variant), torch.randn(5, D)
    heads.add_task(3, seed=1)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_()
    heads.add_task(2, seed=2)
    first, second = heads.heads
    assert all(torch.equal(second.state_dict()[n], t) for n, t in first.state_dict().items() if n != "weight")
    assert not second.weight.any() and not any(p.requires_grad for p in first.parameters())
    before = heads(features)
    assert torch.equal(before[:, :3], first(features))
    with torch.no_grad():
        second.norm.bias.add_(0.5)
    assert not torch.allclose(heads(features)[:, :3], before[:, :3])  # old logits drift with the shared norm


def test_the_papers_layer_mixes_bumps_before_classes_see_them() -> None:
    heads, features = KacHeads(D, variant="paper"), torch.randn(5, D)
    heads.add_task(3, seed=1)
    head = heads.heads[0]
    assert head.weight.shape == (3, D) and head.mixing.shape == (D, 4)
    nn.init.normal_(head.weight)
    z = F.layer_norm(features, (D,))
    bumps = torch.stack([torch.exp(-(((z - c) / (4 / 3)) ** 2)) for c in torch.linspace(-2, 2, 4)], dim=2)
    torch.testing.assert_close(heads(features), torch.einsum("bdi,di,cd->bc", bumps, head.mixing, head.weight))


def test_options() -> None:
    heads = KacHeads(D, bumps=5, reach=1.0)
    heads.add_task(3)
    assert heads.heads[0].weight.shape == (3, 5 * D)
    for wrong in ({"bumps": 1}, {"reach": 0.0}, {"variant": "code"}, {"bump": 3}):
        with pytest.raises(UserError, match=f"{next(iter(wrong))}"):
            KacHeads(D, **wrong)
    with pytest.raises(UserError, match=r"'kac' has no place for a linear classifier.*separate"):
        heads.take_over(nn.Linear(D, 2))


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_sharing_earlier_logits_stay(variant: str) -> None:
    heads, features = KacHeads(D, variant=variant, shared=False), torch.randn(5, D)
    for task in range(2):
        heads.add_task(2, seed=task)
        with torch.no_grad():
            for parameter in heads.heads[-1].parameters():
                parameter.normal_()
        if task == 0:
            before = heads(features)
    assert torch.equal(heads(features)[:, :2], before)
    assert torch.equal(heads(features)[:, 2:], heads.heads[1](features))
    other = KacHeads(D, variant=variant, shared=False)
    other.load_state_dict(heads.state_dict())
    assert torch.equal(other(features), heads(features))
