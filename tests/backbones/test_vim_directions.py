"""Vim's two directions: in place by kernels, and joined to one scan, which is the plain twin."""

import statistics

import pytest
import torch
from backbones_help import relative
from kernels_help import DEVICE, gpu, kernels, poisoned
from tolerance import rounding
from vim_help import tiny

from mambacl.backbones import create_model, vim


def gated_and_gradients(mixer, tokens, way, bf16=False):
    """What goes into out_proj, and the gradients of all that made it."""
    tokens = tokens.detach().requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=bf16):
        y = way(*mixer.in_proj(tokens).chunk(2, -1))
    trained = {"tokens": tokens, **{name: p for name, p in mixer.named_parameters() if name != "out_proj.weight"}}
    weights = torch.arange(y.numel(), device=y.device).reshape(y.shape).cos()
    return {"y": y, **dict(zip(trained, torch.autograd.grad((y * weights).sum(), list(trained.values())), strict=True))}


@kernels
@pytest.mark.parametrize("length", [2, 7])
def test_in_place_gives_what_joined_gives(length):
    mixer = tiny(embed_dim=8, d_state=4).layers[0].mixer.to(DEVICE)
    tokens = torch.randn(2, length, 8, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    with poisoned():
        found = gated_and_gradients(mixer, tokens, lambda x, z: mixer.in_place(x, z, "triton"))
    expected = gated_and_gradients(mixer.double(), tokens.double(), mixer.joined)
    for name, tensor in expected.items():
        assert relative(found[name].double(), tensor) < rounding(2**8), name


@kernels
def test_in_place_under_autocast_is_about_as_good_as_joined():
    """The interpreter cuts bfloat16 off instead of rounding it, so its errors are up to twice a GPU's."""
    mixer = tiny(embed_dim=8, d_state=4).layers[0].mixer.to(DEVICE)
    tokens = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    ways = (lambda x, z: mixer.in_place(x, z, "triton"), mixer.joined)
    found = [gated_and_gradients(mixer, tokens, way, bf16=True) for way in ways]
    exact = gated_and_gradients(mixer.double(), tokens.double(), mixer.joined)
    assert found[0]["y"].dtype == found[1]["y"].dtype == torch.float32
    ours, other = (sum(relative(each[name].double(), tensor) for name, tensor in exact.items()) for each in found)
    assert ours < 3 * other and ours < 0.05 * len(exact)


def test_who_watches_the_backward_direction_sees_it_flipped(monkeypatch):
    """In place its layers get the tokens in the order of the image; the adapters count on the other."""
    taken = []
    for way in ("in_place", "joined"):
        monkeypatch.setattr(vim.Mixer, way, lambda self, x, z, way=way: taken.append(way) or x)
    monkeypatch.setattr(vim.ops, "scans_by_kernel", lambda u, A: True)
    mixer = tiny().layers[0].mixer
    tokens = torch.randn(1, 3, 32)
    mixer(tokens)
    for layer in (mixer.x_proj_b, mixer.dt_proj_b):
        handle = layer.register_forward_hook(lambda *_: None)
        mixer(tokens)
        handle.remove()
    monkeypatch.setattr(vim.ops, "scans_by_kernel", lambda u, A: False)
    mixer(tokens)
    assert taken == ["in_place", "joined", "joined", "joined"]


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", ["vim_nano", "vim_small"])
class TestForReal:
    pytestmark = gpu

    def test_the_model_goes_in_place_and_stays_what_it_is(self, name, bf16, monkeypatch):
        torch.manual_seed(0)
        model = create_model(name, num_classes=0, depth=3).to(DEVICE)
        given = torch.randn(4, 3, *model.default_cfg["input_size"][1:], device=DEVICE)
        parameters = dict(model.named_parameters())

        def outcome(dtype=torch.float32):
            with torch.autocast("cuda", torch.bfloat16, enabled=bf16 and dtype == torch.float32):
                features = model.to(dtype)(given.to(dtype))
            gradients = torch.autograd.grad(features.float().cos().sum(), list(parameters.values()))
            return [features.detach(), *(gradient.detach() for gradient in gradients)]

        calls, own = [], vim.Mixer.in_place
        monkeypatch.setattr(vim.Mixer, "in_place", lambda self, x, z: calls.append(1) or own(self, x, z))
        found = outcome()
        assert len(calls) == 3
        monkeypatch.setattr(vim.Mixer, "unobserved", lambda self: False)
        joined = outcome()
        assert len(calls) == 3
        exact = outcome(torch.float64)

        def error(outcome):
            return statistics.mean(relative(a.double(), b) for a, b in zip(outcome, exact, strict=True))

        assert error(found) < 1.5 * error(joined) + 1e-6
