"""Trained singular directions against recorded steps of PEFT's OSF."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mambacl.tuning.weight_factors import WeightFactors

FLOAT32_SVD = {"rtol": 1e-5, "atol": 1e-6}  # the recording decomposes in float32
STEPS = {"rtol": 1e-9, "atol": 1e-12}  # from its factors on


def replay(layer: nn.Linear, tuning: WeightFactors, own: dict[str, Tensor], first: bool = False) -> None:
    """The recorded steps of a task; with `first`, gradients and outputs of the first, too."""
    factors = tuning.factors[""]
    optimizer = torch.optim.AdamW([p for _, p in tuning.trained()], lr=0.02, weight_decay=0.01)
    for step in range(3):
        output = layer(own[f"step{step}.inputs"])
        loss = (output - own[f"step{step}.targets"]).square().mean()
        tolerance = STEPS if first else FLOAT32_SVD
        torch.testing.assert_close(loss.detach(), own["losses"][step], **tolerance)
        optimizer.zero_grad()
        loss.backward()
        if first and step == 0:
            torch.testing.assert_close(output.detach(), own["step0.outputs"], **STEPS)
            G = 2 / output.numel() * (output - own["step0.targets"]).detach().T @ own["step0.inputs"]
            U, S, V = (getattr(factors, name).detach() for name in "USV")
            plain = {"U": G @ V.T * S, "S": (U.T @ G * V).sum(1), "V": S[:, None] * (U.T @ G)}
            for name, gradient in plain.items():
                torch.testing.assert_close(gradient, own[f"step0.gradient_before_projection.{name}_trained"], **STEPS)
                used = getattr(factors, name).grad
                torch.testing.assert_close(used, own[f"step0.gradient_used.{name}_trained"], **STEPS)
        optimizer.step()


def test_osf_as_recorded(goldens: Path) -> None:
    """Twice: with our decomposition in float64, up to its difference from float32, and from the recorded factors."""
    recorded = load_file(goldens / "peft_osf.safetensors")
    ours, theirs = (nn.Linear(7, 9).double().requires_grad_(False) for _ in range(2))
    for layer in (ours, theirs):
        layer.load_state_dict({"weight": recorded["weight"], "bias": recorded["bias"]})
    tuning, given = WeightFactors({"": ours}), WeightFactors({"": theirs})
    for task, rank in enumerate((3, 5, 6)):
        own = {name.removeprefix(f"task{task}."): t for name, t in recorded.items() if name.startswith(f"task{task}.")}
        assert rank == own["effective_rank"]
        tuning.split(lambda _, rank=rank: rank)
        factors = tuning.factors[""]
        torch.testing.assert_close(ours.weight.detach(), own["initial.frozen_part"], **FLOAT32_SVD)
        whole = factors.whole(factors.kept()).detach()
        torch.testing.assert_close(whole, own["initial.reconstructed_weight"], **FLOAT32_SVD)
        torch.testing.assert_close(factors.kept_S, own["initial.S_frozen"], **FLOAT32_SVD)
        torch.testing.assert_close(factors.S.detach(), own["initial.S_trained"], **FLOAT32_SVD)
        replay(ours, tuning, own)
        torch.testing.assert_close(factors.whole(factors.kept()).detach(), own["final.merged_weight"], **FLOAT32_SVD)

        names = {"U": "U_trained", "S": "S_trained", "V": "V_trained"}
        names |= {f"kept_{word}": f"{word}_frozen" for word in "USV"}
        given.load_state_dict({f"factors..{word}": own[f"initial.{name}"] for word, name in names.items()})
        replay(theirs, given, own, first=True)
        factors = given.factors[""]
        for name in "USV":
            torch.testing.assert_close(getattr(factors, name).detach(), own[f"final.{name}_trained"], **STEPS)
        torch.testing.assert_close(factors.whole(factors.kept()).detach(), own["final.merged_weight"], **STEPS)
        overlap = factors.kept_U.T @ factors.U.detach()
        torch.testing.assert_close(overlap, own["final.overlap_with_frozen_U"], rtol=1e-9, atol=1e-9)


def test_a_split_changes_nothing_and_a_state_continues() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 5).double().requires_grad_(False) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(4, 6, dtype=torch.float64)
    before = layers[0](x)
    one, other = (WeightFactors({"a": layer}) for layer in layers)
    assert not one.trained() and not one.state_dict()
    one.split(lambda directions: directions // 2)
    torch.testing.assert_close(layers[0](x), before)
    optimizer = torch.optim.SGD([p for _, p in one.trained()], lr=0.1)
    layers[0](x).square().sum().backward()
    optimizer.step()
    U, V = one.factors["a"].kept_U, one.factors["a"].kept_V
    torch.testing.assert_close(U.T @ one.factors["a"].U, torch.zeros(2, 3).double())  # SGD stays orthogonal
    torch.testing.assert_close(one.factors["a"].V @ V.T, torch.zeros(3, 2).double())
    other.load_state_dict(one.state_dict())
    assert torch.equal(layers[0](x), layers[1](x)) and not torch.allclose(layers[0](x), before)
    for tuning in (one, other):
        tuning.split(lambda directions: directions)  # nothing is left to train
    assert torch.equal(layers[0](x), layers[1](x))
    with pytest.raises(KeyError):
        other.load_state_dict({"factors.b.U": U})
