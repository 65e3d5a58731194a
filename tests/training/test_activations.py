"""Bytes kept for the backward pass: counted on fake tensors as in real passes."""

import gc
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from backbones_help import DEPTHS, model_of_depths, on_meta
from torch import nn
from torch.autograd.graph import get_gradient_edge

from mambacl.nullspace import NullSpace
from mambacl.ops import switch
from mambacl.training.activations import kept_for_backward, planned
from mambacl.training.step import autocast
from mambacl.tuning import recompute
from mambacl.tuning.recomputing import blocks_of

CPU = torch.device("cpu")
SIZES = {"mambavision_nano": 32}  # pixels; else 16


def real(model: nn.Module, images: torch.Tensor, bf16: bool) -> int:
    def run() -> None:
        with autocast(CPU, bf16):
            model(images)

    return kept_for_backward(run, model.parameters()).total


@pytest.mark.parametrize("family", DEPTHS)
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_fake_pass_keeps_what_a_real_one_keeps(family: str, again: bool, bf16: bool) -> None:
    """With everything trained. Under autocast, a real pass keeps a second copy of some small weights."""
    model, size = model_of_depths(family), SIZES.get(family, 16)
    found = planned(model, 3, size, "cpu", bf16, again)
    if again:
        recompute(model)
    expected = real(model, torch.randn(3, 3, size, size), bf16)
    copies = 4096 if bf16 else 0
    assert found.images == 3 and expected - copies <= found.total <= expected


@pytest.mark.parametrize("bf16", [False, True])
def test_a_fake_pass_splits_projections_as_a_real_one(bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where it keeps no copy of their weights in bfloat16."""
    model = model_of_depths("defocus_mamba_nano")
    apart = planned(model, 3, 16, "cpu", bf16).total
    monkeypatch.setattr("mambacl.ops.linear.switch", SimpleNamespace(takes_kernel=lambda *given: True))
    found, expected = planned(model, 3, 16, "cpu", bf16).total, real(model, torch.randn(3, 3, 16, 16), bf16)
    assert expected - 4096 * bf16 <= found <= expected
    assert (found < apart) == bf16


@pytest.mark.parametrize("family", ["defocus_mamba_nano", "vim_nano"])
def test_what_trains_decides_what_is_kept(family: str) -> None:
    model = model_of_depths(family)
    everything = planned(model, 2, 16, "cpu", False).total
    NullSpace(model).freeze_others()
    found = planned(model, 2, 16, "cpu", False).total
    assert found == real(model, torch.randn(2, 3, 16, 16), False) < everything
    model.requires_grad_(False)
    assert planned(model, 2, 16, "cpu", False).total == 0


@pytest.mark.parametrize("family", DEPTHS)
def test_recomputing_keeps_the_inputs_of_the_blocks(family: str) -> None:
    model = on_meta(family, num_classes=0).eval()
    whole, again = (planned(model, 2, 32, "cpu", False, on) for on in (False, True))
    assert again.total < 0.45 * whole.total and again.block == 0 < whole.block < whole.total


def test_by_hand() -> None:
    """A linear layer keeps its input, ReLU its output, which the next layer shares. Weights are there anyway."""
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    images = torch.randn(5, 6)
    kept = kept_for_backward(lambda: model(images), model.parameters(), [model[0], model[1]])
    assert kept.total == 4 * 5 * (6 + 4) and kept.block == 4 * 5 * 6


def test_nothing_of_the_pass_stays(tiny_model: Callable[..., nn.Module]) -> None:
    """What stays of a graph keeps the nodes of its parameters, and with them later recordings of steps from working."""
    model = tiny_model()

    def run() -> None:
        loss = model(torch.randn(2, 3, 16, 16)).sum()
        for parameter in model.parameters():
            get_gradient_edge(parameter).node.metadata["counted"] = loss.shape

    assert kept_for_backward(run, model.parameters()).total > 0
    gc.collect()
    assert not any(get_gradient_edge(parameter).node.metadata for parameter in model.parameters())


def test_the_model_stays_as_it_was(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    planned(model, 1, 16, again=True)
    assert all(torch.equal(p, before[name]) and p.device == CPU for name, p in model.named_parameters())
    assert not model.grad_checkpointing and not torch.is_autocast_enabled("cuda")
    assert all(not block._forward_hooks for block in blocks_of(model))


@pytest.mark.skipif(not switch.available(), reason="there is no Triton")
@pytest.mark.parametrize("family", ["defocus_mamba_nano", "vim_nano"])
def test_a_gpu_keeps_less_than_the_plain_path(family: str) -> None:
    """Its kernels keep states of few tokens and compute the rest again. Vim's scan without joining its directions."""
    model = on_meta(family, num_classes=0, depth=3)
    with switch.plain():
        plain = planned(model, 2, 32, bf16=False).total
    assert planned(model, 2, 32, bf16=False).total < 0.9 * plain
    few, more, many = (planned(model, count, 32).total for count in (1, 2, 4))
    assert many - more == 2 * (more - few) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("family", DEPTHS)
@pytest.mark.parametrize("bf16", [False, True])
def test_on_a_gpu(family: str, bf16: bool) -> None:
    model, size = model_of_depths(family).cuda(), SIZES.get(family, 16)
    images = torch.randn(3, 3, size, size, device="cuda")

    def run() -> None:
        with autocast(images.device, bf16):
            model(images)

    expected = kept_for_backward(run, model.parameters()).total
    assert planned(model, 3, size, bf16=bf16).total == pytest.approx(expected, rel=0.05)
