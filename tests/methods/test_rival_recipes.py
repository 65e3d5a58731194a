"""Presets hold the training recipe of each rival; docs/rivals.md says where they come from."""

import pytest

from mambacl.config import resolve


@pytest.mark.parametrize(
    "preset, method, passes, batch, lr, head_lr",
    [
        ("cifar100-10", "lae", 5, 24, 0.03 * 24 / 256, 0.03 * 24 / 256),
        ("imagenet-r-10", "lae", 50, 24, 0.005 * 24 / 256, 0.005 * 24 / 256),
        ("cifar100-10", "lgcl", 5, 24, 0.03 * 24 / 256, 0.03 * 24 / 256),
        ("imagenet-r-20", "lgcl", 50, 24, 0.005 * 24 / 256, 0.005 * 24 / 256),
        ("cifar100-10", "c-ln", 15, 128, 0.005 * 128 / 256, 1e-3),
        ("imagenet-r-10", "c-ln", 15, 128, 0.01 * 128 / 256, 1e-3),
        ("cifar100-10", "esn", 30, 128, 0.01, 0.01),
        ("domainnet-s200-10", "esn", 10, 128, 0.01, 0.01),
        ("cifar100-10", "c-ada", 20, 128, 1e-3, 1e-3),
        ("cifar100-10", "icarl", 20, 128, 1e-3, 1e-3),
        ("imagenet-r-20", "der", 20, 128, 1e-3, 1e-3),
    ],
)
def test_recipes(preset, method, passes, batch, lr, head_lr):
    config = resolve(preset, {"method": method})
    recipe = config.training
    assert (recipe.passes, recipe.batch_size) == (passes, batch)
    assert (recipe.lr, recipe.head_lr) == pytest.approx((lr, head_lr))
    decay = {"esn": 5e-4, "icarl": 2e-4, "der": 2e-4}  # those with SGD
    assert recipe.optimizer == ("sgd" if method in decay else "adam")
    assert recipe.weight_decay == decay.get(method, 0)
    assert recipe.clip == (1 if method == "lgcl" else 0)
    schedules = {"esn": "epoch-cosine", "c-ada": "cosine"}
    assert recipe.schedule == schedules.get(method, "constant")
    if method == "lgcl":
        weights = (0.323, 0.137) if "cifar" in preset else (0.3, 0.7)
        assert (config.options["task_weight"], config.options["class_weight"]) == weights
        assert config.options.get("pool", 10) == (20 if preset == "imagenet-r-20" else 10)


@pytest.mark.parametrize(
    "preset, method, passes, lr, head_lr, optimizer, schedule, options",
    [
        ("cifar100-10", "inflora", 20, 5e-4, 5e-4, "adam", "coda-cosine", {"share": 0.95}),
        ("imagenet-r-20", "inflora", 50, 5e-4, 5e-4, "adam", "coda-cosine", {"share": 0.98}),
        ("domainnet-s200-10", "inflora", 5, 0.005, 0.01, "sgd", "coda-cosine", {"share": 0.95, "rank": 30}),
        ("cifar100-10", "bilora", 20, 5e-4, 5e-4, "adam", "coda-cosine", {}),
        ("imagenet-r-10", "bilora", 50, 5e-4, 5e-4, "adam", "coda-cosine", {}),
        ("cifar100-10", "sd-lora", 20, 0.008, 0.008, "sgd", "constant", {}),
        ("imagenet-r-10", "sd-lora", 20, 0.01, 0.01, "sgd", "constant", {}),
        ("domainnet-s200-10", "sd-lora", 10, 0.02, 0.02, "sgd", "multistep", {}),
        ("cifar100-10", "lora-drs", 20, 5e-4, 2e-3, "adam", "coda-cosine", {}),
        ("imagenet-r-10", "lora-drs", 50, 5e-4, 5e-4, "adam", "coda-cosine", {"triplet": 0.2, "margin": 2.0}),
    ],
)
def test_recipes_of_low_rank_updates(preset, method, passes, lr, head_lr, optimizer, schedule, options):
    config = resolve(preset, {"method": method})
    recipe = config.training
    assert (recipe.passes, recipe.batch_size, recipe.weight_decay) == (passes, 128, 0)
    assert (recipe.lr, recipe.head_lr, recipe.optimizer, recipe.schedule) == (lr, head_lr, optimizer, schedule)
    assert config.options == options


@pytest.mark.parametrize("preset", ["cifar100-10", "imagenet-r-10"])
@pytest.mark.parametrize(
    "method, passes, batch, optimizer, lr, head_lr",
    [
        ("gpm", 200, 64, "sgd", 1e-3, 1e-3),
        ("dual-gpm", 200, 64, "sgd", 1e-3, 1e-3),
        ("trgp", 200, 64, "sgd", 1e-3, 1e-3),
        ("nscl", 80, 32, "adam", 5e-5, 1e-3),
        ("owm", 25, 64, "sgd", 0.02, 0.02),
        ("osf", 50, 200, "adamw", 5e-5, 1e-2),
    ],
)
def test_recipes_of_projections(preset, method, passes, batch, optimizer, lr, head_lr):
    recipe = resolve(preset, {"method": method}).training
    assert (recipe.passes, recipe.batch_size, recipe.optimizer) == (passes, batch, optimizer)
    assert (recipe.lr, recipe.head_lr) == (lr, head_lr)
    assert recipe.clip == (10 if method == "owm" else 0) and recipe.weight_decay == (5e-5 if method == "nscl" else 0)
    decays = {"nscl": ([30, 60], 0.5), "osf": ([25, 40], 0.1)}
    if method in decays:
        assert recipe.schedule == "multistep" and (recipe.decay_after, recipe.decay_rate) == decays[method]
    else:
        assert recipe.schedule == "constant"
