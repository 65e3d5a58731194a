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
