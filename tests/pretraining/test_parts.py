"""The parts of pre-training: schedules, mixing, the average of the weights, decay, the export."""

import math

import numpy as np
import pytest
import torch
from pretraining_help import Clock
from tolerance import assert_near
from torch import nn

from mambacl.backbones import create_model
from mambacl.pretraining.average import WeightAverage, averaging_rate
from mambacl.pretraining.distorting import GREY, erase, jitter_colours, sample_boxes, sample_jitter
from mambacl.pretraining.export import in_half_precision
from mambacl.pretraining.loop import UNDECAYED, decays
from mambacl.pretraining.mixing import Mix, mix_images, sample_mix, soft_targets
from mambacl.pretraining.schedule import LEAST, ByClock, ByEpochs, lr_factor

NANOS = ["defocus_mamba_nano", "vim_nano", "vmamba_nano", "vanilla_vmamba_nano", "mambavision_nano"]


# The learning rate


def test_the_learning_rate_rises_and_falls() -> None:
    assert lr_factor(0.0, 0.1, 0.01) == LEAST and lr_factor(0.05, 0.1, 0.01) == pytest.approx(0.5)
    assert lr_factor(0.1, 0.1, 0.01) == 1.0 and lr_factor(1.0, 0.1, 0.01) == pytest.approx(0.01)
    assert lr_factor(0.55, 0.1, 0.0) == pytest.approx(0.5)  # half of the cosine
    assert lr_factor(0.0, 0.0, 0.5) == 1.0  # without a warm-up
    values = [lr_factor(step / 100, 0.1, 0.01) for step in range(101)]
    assert values[:11] == sorted(values[:11]) and values[10:] == sorted(values[10:], reverse=True)


def test_progress_by_epochs() -> None:
    schedule = ByEpochs(4, Clock(1.0))
    assert [schedule.progress(epochs) for epochs in (0, 1.5, 4, 5)] == [0, 0.375, 1, 1]


def test_progress_by_the_clock_waits_for_the_first_steps_and_ends_on_time() -> None:
    clock = Clock(0.0)
    schedule = ByClock(100.0, clock)
    clock.now = 40.0  # compiling took this long
    assert schedule.progress(0) == 0.0
    schedule.settled()
    found = []
    for now in (40.0, 55.0, 85.0, 99.0, 100.0, 120.0):
        clock.now = now
        found.append(schedule.progress(0))
    assert found == pytest.approx([0, 0.25, 0.75, 59 / 60, 1, 1]) and schedule.spent() == 120.0


def test_the_clock_ends_a_training_that_never_settles() -> None:
    clock = Clock(0.0)
    schedule = ByClock(10.0, clock)
    clock.now = 10.0
    assert schedule.progress(0) == 1.0


def test_after_an_interruption_the_clock_goes_on() -> None:
    """60 of 100 seconds were spent and half of the schedule was done; the other half takes the 40 seconds left."""
    clock = Clock(0.0)
    clock.now = 1000.0
    schedule = ByClock(100.0, clock, spent=60.0, done=0.5)
    assert schedule.progress(0) == 0.5
    schedule.settled()
    clock.now = 1020.0
    assert schedule.progress(0) == pytest.approx(0.75) and schedule.spent() == 80.0
    clock.now = 1040.0
    assert schedule.progress(0) == 1.0


def test_the_clock_is_read_when_the_device_has_caught_up() -> None:
    clock, waited = Clock(0.0), []
    schedule = ByClock(100.0, clock, every=3, wait=lambda: waited.append(clock.now))
    schedule.settled()
    found = []
    for step in range(6):
        clock.now = 10.0 * step
        found.append(schedule.progress(0))
    assert found == pytest.approx([0, 0, 0, 0.3, 0.3, 0.3]) and waited == [0.0, 0.0, 30.0]


# Mixing


def mixes(mixup: float, cutmix: float, share: float = 1.0, count: int = 400) -> list[Mix | None]:
    rng = np.random.default_rng(0)
    return [sample_mix(rng, mixup, cutmix, share, 8) for _ in range(count)]


def test_which_batches_are_mixed_and_how() -> None:
    assert not any(mixes(0.0, 0.0)) and not any(mixes(0.8, 1.0, share=0.0))
    assert all(mix is not None and mix.box is None for mix in mixes(0.8, 0.0))
    assert all(mix is not None and mix.box is not None for mix in mixes(0.0, 1.0))
    found = mixes(0.8, 1.0, share=0.5)
    assert 0.4 < np.mean([mix is not None for mix in found]) < 0.6
    cut = [mix.box is not None for mix in found if mix is not None]
    assert 0.4 < np.mean(cut) < 0.6


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_targets_sum_to_one_and_are_the_shares_of_the_pixels(smoothing: float) -> None:
    labels = torch.tensor([0, 1, 2, 3])
    images = labels.float().view(4, 1, 1, 1).expand(4, 3, 8, 8)  # each image is its label
    for mix in (None, *mixes(0.8, 1.0, count=50)):
        targets, mixed = soft_targets(labels, 5, mix, smoothing), mix_images(images, mix)
        assert targets.sum(1) == pytest.approx(torch.ones(4).numpy(), abs=1e-6) and targets.min() >= 0
        plain = (targets - smoothing / 5) / (1 - smoothing)
        expected = plain @ torch.arange(5.0)
        assert mixed.mean((1, 2, 3)) == pytest.approx(expected.numpy(), abs=1e-5)
    assert images[2].unique().tolist() == [2.0]  # mixing makes new images


def test_cutmix_takes_a_box_from_the_partner() -> None:
    images = torch.arange(2.0).view(2, 1, 1, 1).expand(2, 3, 8, 8)
    mixed = mix_images(images, Mix(1 - 6 / 64, (1, 2, 3, 5)))
    assert mixed[0].sum() == 3 * 6 and mixed[0, :, 1:3, 2:5].min() == 1 and mixed[1].sum() == 3 * (64 - 6)


# The average


def test_the_average_follows_its_formula() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    average = WeightAverage(model)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for steps in range(5):
        with torch.no_grad():
            model[0].weight += torch.randn_like(model[0].weight)
        model(torch.randn(2, 3, 4, 4))
        rate = averaging_rate(0.9, steps)
        average.rate.fill_(rate)
        average.update()
        for name, value in model.state_dict().items():
            moved = value if name.endswith("tracked") else (1 - rate) * expected[name] + rate * value
            expected[name] = moved
    for name, value in average.model.state_dict().items():
        assert torch.allclose(value, expected[name], atol=1e-6), name
    assert average.model[1].num_batches_tracked == 5 and not average.model.training
    assert not any(parameter.requires_grad for parameter in average.model.parameters())


def test_the_average_forgets_the_start_first() -> None:
    assert averaging_rate(0.999, 0) == pytest.approx(0.9) and averaging_rate(0.999, 90) == pytest.approx(0.09)
    assert averaging_rate(0.999, 10**6) == pytest.approx(0.001)
    assert averaging_rate(0.0, 50) == 1.0  # the weights themselves


# Weight decay


@pytest.mark.parametrize("name", NANOS)
def test_what_decays(name: str) -> None:
    with torch.device("meta"):
        model = create_model(name, num_classes=7)
    groups = {decay: [n for n, p in model.named_parameters() if decays(n, p) == decay] for decay in (True, False)}
    assert all(n.endswith("weight") for n in groups[True]) and not any("norm" in n for n in groups[True])
    linear = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv1d, nn.Conv2d))}
    assert linear <= set(groups[True])
    free = ("bias", "D", "D_b", "Ds", "freq", *UNDECAYED)
    other = [n for n in groups[False] if not n.endswith(free) and not n.rpartition(".")[0].endswith(("norm", "norm_f"))]
    known = {id(p) for m in model.modules() if isinstance(m, (nn.LayerNorm, nn.BatchNorm2d)) for p in m.parameters()}
    named = dict(model.named_parameters())
    assert [n for n in other if id(named[n]) not in known] == []


# The models


@pytest.mark.parametrize("name", ["defocus_mamba_nano", "vim_mini", "vmamba_mini", "mambavision_mini"])
def test_the_small_models_take_32_pixels_and_have_comparable_sizes(name: str) -> None:
    with torch.device("meta"):
        model = create_model(name)
        logits = model.eval()(torch.empty(2, 3, 32, 32))
    assert logits.shape == (2, 200) and model.default_cfg["input_size"] == (3, 32, 32)
    assert 3e6 < sum(parameter.numel() for parameter in model.parameters()) < 5e6


# The export


def test_half_precision_keeps_counters_and_what_it_cannot_hold() -> None:
    made = in_half_precision({"a": torch.tensor([1.5]), "n": torch.tensor(3), "large": torch.tensor([1e6])})
    assert made["a"].dtype == torch.float16 and made["n"].dtype == torch.int64
    assert made["large"].dtype == torch.float32 and math.isclose(made["large"].item(), 1e6)


# Distorting


def test_jitter_by_hand() -> None:
    pixels = torch.tensor([0.2, 0.4, 0.6, 0.8] * 3).view(1, 3, 2, 2)
    pixels[:, 1] /= 2
    mean, std = torch.tensor([0.5, 0.4, 0.3]).view(1, 3, 1, 1), torch.tensor([0.2, 0.1, 0.3]).view(1, 3, 1, 1)
    images = ((pixels - mean) / std).repeat(5, 1, 1, 1)
    factors = torch.tensor([[1.0, 1, 1], [0.5, 1, 1], [1, 0, 1], [1, 1, 0], [2, 1, 1]])
    same, dark, flat, grey, bright = (jitter_colours(images, factors, mean, std) * std + mean).unbind(0)
    assert_near(same, pixels[0], 10)
    assert_near(dark, pixels[0] / 2, 10)
    level = (pixels[0] * torch.tensor(GREY).view(3, 1, 1)).sum(0)
    assert_near(flat, level.mean().expand(3, 2, 2), 10)  # no contrast: the mean brightness everywhere
    assert_near(grey, level.expand(3, 2, 2), 10)
    assert_near(bright, (2 * pixels[0]).clamp(max=1), 10)
    assert torch.equal(images[0], images[1])  # the input stays


def test_sampled_jitter_and_boxes() -> None:
    rng = np.random.default_rng(0)
    factors = sample_jitter(rng, 5000, 0.3)
    assert factors.shape == (5000, 3) and 0.7 <= factors.min() < 0.71 and 1.29 < factors.max() <= 1.3
    boxes = sample_boxes(rng, 5000, 0.25, 32)
    top, left, bottom, right = boxes.T
    erased = bottom > top
    assert abs(erased.mean() - 0.25) < 5 * (0.25 * 0.75 / 5000) ** 0.5 and boxes.min() == 0 and boxes.max() == 32
    assert (boxes[~erased] == 0).all() and (right[erased] > left[erased]).all()
    area = ((bottom - top) * (right - left))[erased] / 32**2
    assert area.min() > 0.01 and area.max() < 0.4  # sides are whole pixels
    assert sample_boxes(rng, 100, 0.0, 32).max() == 0


def test_erasing_by_hand() -> None:
    images = torch.arange(1.0, 25).view(2, 1, 3, 4)
    erased = erase(images, torch.tensor([[1, 0, 3, 2], [0, 0, 0, 0]]))
    assert erased[0, 0].tolist() == [[1, 2, 3, 4], [0, 0, 7, 8], [0, 0, 11, 12]]
    assert torch.equal(erased[1], images[1]) and images[0, 0, 1, 0] == 5
