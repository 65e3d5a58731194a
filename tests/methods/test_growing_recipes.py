"""The training recipes of the adapters that grow, in the presets."""

import pytest

from mambacl.backbones import create_model
from mambacl.config import resolve
from mambacl.methods import METHODS, Setup


@pytest.mark.parametrize(
    "preset, method, passes, batch, rate, decay, options",
    [
        ("cifar100-10", "sema", 3 * (5 + 20), 32, 0.005, 5e-4, {"descriptors": 0.8}),
        ("imagenet-r-20", "sema", 3 * (20 + 20), 32, 0.005, 5e-4, {}),
        ("cifar100-10", "cl-lora", 30, 64, 0.03, 1e-4, {}),
        ("imagenet-r-10", "cl-lora", 20, 32, 0.05, 5e-4, {"rank": 10}),
    ],
)
def test_recipes(preset, method, passes, batch, rate, decay, options):
    config = resolve(preset, {"method": method})
    recipe = config.training
    assert (recipe.passes, recipe.batch_size, recipe.lr, recipe.head_lr) == (passes, batch, rate, rate)
    assert (recipe.optimizer, recipe.schedule, recipe.weight_decay) == ("sgd", "epoch-cosine", decay)
    assert config.options == options


def test_rounds_of_sema_are_the_published_ones():
    for preset, parts in (("cifar100-10", (5, 20)), ("imagenet-r-10", (20, 20))):
        config = resolve(preset, {"method": "sema"})
        epochs, model = config.training.epochs, create_model("vit_nano", num_classes=0)
        method = METHODS.get("sema")(model, Setup(options=config.options, epochs=epochs))
        assert method.round(epochs) == (sum(parts), parts[0]) and 3 * sum(parts) == epochs
