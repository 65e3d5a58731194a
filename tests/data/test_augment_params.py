"""The parameters sampled for an epoch follow the distributions of torchvision's transforms: fixed seeds, and bounds
that a right distribution exceeds once in thousands of seeds."""

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from data_help import MEAN, STD
from numpy.typing import NDArray
from torchvision.transforms import v2

from mambacl.data import TransformConfig, Transforms
from mambacl.data.augment_params import (
    Crop,
    operations,
    sample_autoaugment,
    sample_boxes,
    sample_crops_and_flips,
    sample_operations,
    sample_resized_crops,
    signed,
)
from mambacl.data.autoaugment import NONE
from mambacl.data.transforms import CROP_AREA

POLICIES = [v2.AutoAugmentPolicy.CIFAR10, v2.AutoAugmentPolicy.IMAGENET]
N = 20_000
OPS, SIGNED = operations(), signed()


class Recording(v2.AutoAugment):
    """Keeps what it would apply, and applies nothing."""

    def drawn(self, height: int, width: int) -> tuple[tuple[str, float], ...]:
        self.record: list[tuple[str, float]] = []
        self(torch.zeros(3, height, width, dtype=torch.uint8))
        return tuple(self.record)

    def _apply_image_or_video_transform(self, image: Any, name: str, magnitude: float, *_: Any, **__: Any) -> Any:
        self.record.append((name, magnitude))
        return image


def assert_same_frequencies(ours: Iterable[Hashable], theirs: Iterable[Hashable]) -> None:
    """No kind is drawn more than 4.5 standard deviations more often here than there, and there is no other kind."""
    one, other = Counter(ours), Counter(theirs)
    n, m = one.total(), other.total()
    for kind in {*one, *other}:
        share = (one[kind] + other[kind]) / (n + m)
        deviation = np.sqrt(share * (1 - share) * (1 / n + 1 / m))
        assert abs(one[kind] / n - other[kind] / m) <= 4.5 * deviation, (kind, one[kind], other[kind])


def assert_same_distribution(ours: NDArray[Any], theirs: NDArray[Any]) -> None:
    """Kolmogorov and Smirnov's test at one in a thousand."""
    values = np.concatenate([ours, theirs])
    below = [np.searchsorted(np.sort(part), values, side="right") / len(part) for part in (ours, theirs)]
    assert np.abs(below[0] - below[1]).max() < 1.95 * np.sqrt(1 / len(ours) + 1 / len(theirs))


@pytest.mark.parametrize("size", [(32, 32), (48, 75)], ids=str)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.value)
def test_operations_and_magnitudes(policy: v2.AutoAugmentPolicy, size: tuple[int, int]) -> None:
    """Frequencies of every pair of operations, with and without their magnitudes, and of either sign."""
    torch.manual_seed(0)
    recording = Recording(policy)
    theirs = [recording.drawn(*size) for _ in range(N)]
    ops, magnitudes = sample_operations(np.random.default_rng(0), recording, np.tile([size], (N, 1)))
    ours = [
        tuple((OPS[op], float(magnitude)) for op, magnitude in zip(*row, strict=True) if op != NONE)
        for row in zip(ops, magnitudes, strict=True)
    ]
    assert_same_frequencies([tuple(op for op, _ in pair) for pair in ours], [tuple(op for op, _ in p) for p in theirs])
    assert_same_frequencies(ours, theirs)
    signs = [[m > 0 for pair in drawn for op, m in pair if SIGNED[OPS.index(op)] and m] for drawn in (ours, theirs)]
    assert_same_frequencies(*signs)
    assert {kind for pair in ours for kind in pair} == {kind for pair in theirs for kind in pair}  # to the last bit


def test_a_wrong_distribution_is_noticed() -> None:
    """The bounds above are worth something: signs that are negative at 0.54 instead of 0.5 exceed them."""
    rng = np.random.default_rng(0)
    assert_same_frequencies((rng.random(N) < 0.5).tolist(), (rng.random(N) < 0.5).tolist())
    with pytest.raises(AssertionError):
        assert_same_frequencies((rng.random(N) < 0.5).tolist(), (rng.random(N) < 0.54).tolist())
    assert_same_distribution(rng.random(5000), rng.random(5000))
    with pytest.raises(AssertionError):
        assert_same_distribution(rng.random(5000), rng.uniform(0.0, 1.1, 5000))


@pytest.mark.parametrize("size", [(32, 32), (375, 500), (20, 120), (90, 12), (5, 4), (1, 1)], ids=str)
def test_boxes_of_resized_crops(size: tuple[int, int]) -> None:
    """Areas, aspect ratios and places; images so long that the central crop is what remains are among them."""
    count = 4000
    crop = v2.RandomResizedCrop(32)
    torch.manual_seed(0)
    image = torch.zeros(3, *size)
    theirs = np.array([list(crop.make_params([image]).values()) for _ in range(count)], dtype=float)
    ours = sample_boxes(np.random.default_rng(0), crop, np.tile([size], (count, 1))).astype(float)
    height, width = size
    for boxes in (ours, theirs):
        assert (boxes[:, :2] >= 0).all() and (boxes[:, 0] + boxes[:, 2] <= height).all()
        assert (boxes[:, 1] + boxes[:, 3] <= width).all() and (boxes[:, 2:] > 0).all()
    for statistic in (
        lambda b: b[:, 2] * b[:, 3],
        lambda b: b[:, 3] / b[:, 2],
        lambda b: b[:, 0],
        lambda b: b[:, 1],
        lambda b: b[:, 0] / (height - b[:, 2] + 1),
        lambda b: b[:, 1] / (width - b[:, 3] + 1),
    ):
        assert_same_distribution(statistic(ours), statistic(theirs))
    if size in ((20, 120), (90, 12)):  # ten attempts fail there often enough for the central crop to be the commonest
        commonest = [Counter(map(tuple, boxes.tolist())).most_common(1)[0][0] for boxes in (ours, theirs)]
        assert commonest[0] == commonest[1]


def test_boxes_of_many_sizes_at_once() -> None:
    rng = np.random.default_rng(1)
    sizes = rng.integers(1, 300, (3000, 2))
    boxes = sample_boxes(rng, v2.RandomResizedCrop(32), sizes)
    assert (boxes[:, :2] >= 0).all() and (boxes[:, 2:] > 0).all() and (boxes[:, :2] + boxes[:, 2:] <= sizes).all()


def test_resized_crops() -> None:
    """The limits are those of torchvision's transform, and the boxes and flips are drawn as they are there."""
    augment: Any = Transforms(TransformConfig(augment="resized-crop-flip"), 32, MEAN, STD).augment
    theirs = augment.transforms
    ours = Crop(CROP_AREA)
    assert (ours.scale, ours.ratio) == (tuple(theirs[0].scale), tuple(theirs[0].ratio)) and theirs[1].p == 0.5
    sizes = np.tile([[40, 30]], (N, 1))
    params = sample_resized_crops(np.random.default_rng(0), CROP_AREA, sizes)
    assert np.array_equal(params.boxes, sample_boxes(np.random.default_rng(0), theirs[0], sizes))
    area = params.boxes[:, 2] * params.boxes[:, 3] / (40 * 30)
    assert 0.2 < area.min() < 0.3 and 0.48 < params.flips.mean() < 0.52 and (params.ops == NONE).all()


@pytest.mark.parametrize("size", [32, 20, 4])
def test_crops_and_flips(size: int) -> None:
    crop, flip = v2.RandomCrop(size, padding=size // 8), v2.RandomHorizontalFlip()
    sizes = np.tile([[size, size]], (N, 1))
    ours = sample_crops_and_flips(np.random.default_rng(0), size // 8, sizes)
    torch.manual_seed(0)
    image = torch.zeros(3, size, size)
    theirs = [(p["top"], p["left"]) for p in (crop.make_params([image]) for _ in range(N))]
    assert_same_frequencies([tuple(corner) for corner in ours.corners.tolist()], theirs)
    assert_same_frequencies(ours.flips.tolist(), (torch.rand(N) < flip.p).tolist())
    assert (ours.ops == NONE).all() and (ours.boxes[:, 2:] == size).all()
    alone = sample_crops_and_flips(np.random.default_rng(0), 0, sizes)
    assert (alone.corners == 0).all() and 0.48 < alone.flips.mean() < 0.52


def test_rows_of_the_parameters() -> None:
    augment = v2.Compose([v2.AutoAugment(), v2.RandomResizedCrop(16)])
    params = sample_autoaugment(np.random.default_rng(0), augment, np.tile([[20, 30]], (50, 1)))
    part = params.rows(np.array([7, 3]))
    assert (part.boxes == params.boxes[[7, 3]]).all() and (part.magnitudes == params.magnitudes[[7, 3]]).all()
