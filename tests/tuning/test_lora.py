"""LoRA on the linear layers of a ViT and of Mamba blocks; adapters with other activations."""

import pytest
import torch
from adapter_methods_help import small
from tolerance import assert_near

from mambacl.errors import UserError
from mambacl.tuning.adapters import Adapter
from mambacl.tuning.lora import LoRA, linear_layers

MAMBA = ["in_proj", "x_proj", "dt_proj", "out_proj"]
LAYERS = {
    "vit_nano": ["qkv", "proj", "fc1", "fc2"],
    "defocus_mamba_nano": MAMBA,
    "vim_nano": [*MAMBA, "x_proj_b", "dt_proj_b"],
}


@pytest.mark.parametrize("family", LAYERS)
def test_it_is_the_same_as_changing_the_weights(family):
    """It starts at nothing; once trained, W + B A gives the same output; the model itself stays as it was."""
    model, images = small(family).double(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    before, names = model(images), list(model.state_dict())
    layers = linear_layers(model, LAYERS[family])
    assert len(layers) == 2 * len(LAYERS[family])
    lora = LoRA(layers, rank=2, seed=0)
    assert torch.equal(model(images), before) and list(model.state_dict()) == names
    with torch.no_grad():
        for change in lora.changes:
            change.B.normal_(std=0.1)
    found = model(images)
    found.square().sum().backward()
    assert all(change.B.grad.any() and change.A.grad.any() for change in lora.changes)
    lora.on = False
    assert torch.equal(model(images), before)
    lora.remove()
    with torch.no_grad():
        for layer, change in zip(layers.values(), lora.changes, strict=True):
            layer.weight += change.B @ change.A
    assert_near(found.detach(), model(images).detach(), terms=2**14)


def test_blocks_and_scale():
    model = small("vit_nano")
    layers = linear_layers(model, ["qkv"], blocks=[1])
    assert list(layers) == ["blocks.1.attn.qkv"]
    lora = LoRA(layers, rank=2, seed=0, learned_scale=True)
    assert lora.changes[0].scale.item() == 1 and lora.changes[0].scale.requires_grad
    with pytest.raises(UserError, match="ViT has no linear layers named in_proj: name some of its own, such as qkv"):
        linear_layers(model, ["in_proj"])


def test_an_adapter_with_gelu_and_a_learned_scale():
    adapter, x = Adapter(8, 3, 1.0, "gelu", learned_scale=True), torch.randn(4, 8)
    inner = torch.nn.functional.gelu(adapter.down(x))
    with torch.no_grad():
        adapter.scale.fill_(0.5)
    assert torch.equal(adapter(x), 0.5 * adapter.up(inner))
    assert "scale" in dict(adapter.named_parameters()) and "scale" not in dict(Adapter(8, 3, 1.0).named_parameters())
