"""What the tests of the backbones share: models without values, and comparisons with the recorded public models."""

import pytest
import torch
from tolerance import assert_near

from mambacl.backbones import create_model
from mambacl.errors import UserError


def on_meta(name, **options):
    """A model of any size at no cost: shapes without values."""
    with torch.device("meta"):
        return create_model(name, **options)


def relative(actual, expected):
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def under(tensors, prefix):
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def gradients_like_recorded(model, tensors, count):
    """Compares logits and gradients in float64, `count` parameters of them. Returns the gradients by name."""
    model.double()
    batch = tensors["input"].double().requires_grad_()
    logits = model(batch)
    logits.square().sum().backward()

    assert relative(logits, tensors["logits_f64"]) < 1e-9
    assert relative(batch.grad, tensors["grad_input_f64"]) < 1e-9
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    recorded = under(tensors, "grad_f64/")
    assert len(recorded) == count and recorded.keys() <= gradients.keys()
    assert [name for name in recorded if relative(gradients[name], recorded[name]) > 1e-9] == []
    return gradients


def outputs_and_recorded(model, tensors):
    """Compares the logits with those recorded in float32. Returns the outputs of all modules in float64, where what
    differs is the rounding of the recording, the same on every machine, and the recorded ones."""
    with torch.no_grad():
        assert_near(model(tensors["input"]), tensors["logits_f32"], terms=2**13)
    model.double()
    outputs = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _, __, output, name=name: outputs.__setitem__(name, output))
    with torch.no_grad():
        assert relative(model(tensors["input"].double()), tensors["logits_f32"]) < 2e-5
    return outputs, under(tensors, "act_f32/")


def assert_refused(name, options, message):
    with pytest.raises(UserError) as caught:
        on_meta(name, **options)
    assert message in str(caught.value)


DEPTHS = {  # a small model of each family, with several depths
    "defocus_mamba_nano": {"embed_dim": 16, "depth": 4, "mamba": {"intermediate_size": 64, "time_step_rank": 4}},
    "vim_nano": {"embed_dim": 16, "depth": 4},
    "vmamba_nano": {"depths": (1, 2, 1), "dims": 8},
    "mambavision_nano": {"depths": (1, 1, 2, 2), "dim": 8, "num_heads": (1, 1, 2, 2)},
    "vit_nano": {"embed_dim": 16, "depth": 4, "num_heads": 2},
}


def model_of_depths(family, **options):
    """Without head and with weights large enough that blocks differ."""
    torch.manual_seed(0)
    model = create_model(family, pretrained=False, **{"num_classes": 0, **DEPTHS[family], **options}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return model


def hooked_depths(model, images):
    """The output of every depth as hooks see it in a plain forward: tokens (b, l, c), or maps with the family's layout.
    A stage ends before its downsampling."""
    if hasattr(model, "levels"):  # MambaVision: its blocks work on windows, so take what the next layer gets
        layers = [(level.downsample, True) for level in model.levels[:-1]] + [(model.norm, True)]
    elif hasattr(model, "layers") and hasattr(model.layers[0], "downsample"):  # VMamba
        layers = [(stage.blocks[-1], False) for stage in model.layers]
    else:
        layers = [(block, False) for block in (model.layers if hasattr(model, "layers") else model.blocks)]
    outputs = [None] * len(layers)

    def keep(place, before):
        return lambda _, inputs, output: outputs.__setitem__(place, inputs[0] if before else output)

    hooks = [layer.register_forward_hook(keep(place, before)) for place, (layer, before) in enumerate(layers)]
    model(images)
    for hook in hooks:
        hook.remove()
    return outputs


def split_plainly(model, output, rows, columns):
    """Class token (b, c) or None, and the map (b, c, h, w), token by token."""
    if output.dim() == 4:
        return None, output if hasattr(model, "levels") else output.permute(0, 3, 1, 2)
    tokens = list(output.unbind(1))
    has_token = getattr(model, "cls_token", None) is not None
    places = {"ViT": 0, "DefocusMamba": len(tokens) - 1, "Vim": (len(tokens) - 1) // 2}
    class_token = tokens.pop(places[type(model).__name__]) if has_token else None
    regions = getattr(model.patch_embed, "regions", 1)
    image = output.new_empty(len(output), output.shape[2], rows, columns)
    high, wide = rows // regions, columns // regions
    places = [
        (top + row, left + column)
        for top in range(0, rows, high)
        for left in range(0, columns, wide)
        for row in range(high)
        for column in range(wide)
    ]
    for token, (row, column) in zip(tokens, places, strict=True):
        image[:, :, row, column] = token
    return class_token, image
