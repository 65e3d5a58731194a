"""Each batched operation against torchvision's function of the same name, with the same parameters."""

from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as TF

from mambacl.data import TransformConfig, Transforms
from mambacl.data.augment_params import magnitude_table, operations, sample_boxes, signed
from mambacl.data.autoaugment import GEOMETRIC, NONE, OPERATIONS, autoaugment, color
from mambacl.data.batched_transforms import MOST_TAPS, BatchedTransforms, crop, resize, resize_boxes, taps
from mambacl.data.config import Augment

OPS, SIGNED = operations(), signed()
SIZES = [(32, 32), (28, 28), (33, 47), (64, 48), (3, 3), (2, 5), (1, 1), (120, 161)]
VECTORS = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
# Where PyTorch's kernels round a product and a sum twice instead of once - without AVX2 everywhere, with it in the last
# few values of an image - torchvision may be one grey level away.
ROUNDED = ("Color", "Contrast", "Sharpness")


def pictures(n: int, height: int, width: int, seed: int = 0) -> Tensor:
    """Noise, grey noise, little contrast, one colour, a ramp."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (n, 3, height, width), generator=generator, dtype=torch.uint8)
    images[1::5] = images[1::5, :1]
    images[2::5] = images[2::5] // 4 + 100
    images[3::5] = 77
    images[4::5] = (torch.arange(height * width) % 256).view(height, width).to(torch.uint8)
    return images


def of_torchvision(image: Tensor, name: str, magnitude: float, interpolation: str = "nearest") -> Tensor:
    """As torchvision's AutoAugment applies it."""
    augment = v2.AutoAugment(interpolation=InterpolationMode(interpolation))
    return augment._apply_image_or_video_transform(image, name, magnitude, augment.interpolation, augment._fill)


def differing(found: Tensor, expected: Tensor) -> tuple[int, int]:
    """The largest difference in grey levels, and how many values differ."""
    difference = (found.int() - expected.int()).abs()
    return int(difference.max()), int((difference > 0).sum())


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_every_operation_at_every_magnitude(name: str, size: tuple[int, int]) -> None:
    number = OPS.index(name)
    signs = (1, -1) if SIGNED[number] else (1,)
    magnitudes = np.array([sign * m for m in magnitude_table(*size)[number] for sign in signs])
    images = pictures(len(magnitudes), *size, seed=number)
    for shift in range(5):  # each magnitude meets each kind of picture
        turned = np.roll(magnitudes, shift)
        found = autoaugment(images, OPS, np.full((len(images), 1), number), turned[:, None])
        expected = torch.stack([of_torchvision(i, name, float(m)) for i, m in zip(images, turned, strict=True)])
        most, count = differing(found, expected)
        if name in ROUNDED:
            assert most <= 1 and count <= (2 if VECTORS else found.numel() // 50 + 2)
        else:
            assert most == 0, f"{count} values differ by up to {most}"


@pytest.mark.parametrize("size", [*SIZES, (224, 224)], ids=str)
@pytest.mark.parametrize("name", GEOMETRIC)
def test_every_geometric_operation_between_pixels_at_every_magnitude(name: str, size: tuple[int, int]) -> None:
    number = OPS.index(name)
    magnitudes = np.array([sign * m for m in magnitude_table(*size)[number] for sign in (1, -1)])
    images = pictures(len(magnitudes), *size, seed=number)
    found = autoaugment(images, OPS, np.full((len(images), 1), number), magnitudes[:, None], bilinear=True)
    pairs = zip(images, magnitudes, strict=True)
    expected = torch.stack([of_torchvision(i, name, float(m), "bilinear") for i, m in pairs])
    most, count = differing(found, expected)
    assert most <= (0 if VECTORS else 1) and count <= (0 if VECTORS else found.numel() // 100 + 2)
    if name in ("Rotate", "ShearX") and min(size) > 3:
        nearest = autoaugment(images, OPS, np.full((len(images), 1), number), magnitudes[:, None])
        assert differing(found, nearest)[1] > found.numel() // 10


@pytest.mark.skipif(not VECTORS, reason="PyTorch rounds otherwise on this processor")
@pytest.mark.parametrize("magnitude", [0.1, -0.3, 0.9])
def test_every_colour_there_is(magnitude: float) -> None:
    drawn = float(np.float32(magnitude))
    for first in range(0, 1 << 24, 1 << 20):
        colours = torch.arange(first, first + (1 << 20))
        image = torch.stack([colours >> 16, (colours >> 8) & 255, colours & 255]).to(torch.uint8).view(1, 3, 1024, 1024)
        found = color(image, torch.full((1, 1, 1, 1), drawn, dtype=torch.float64))
        assert torch.equal(found, TF.adjust_saturation(image, 1.0 + drawn))


def test_every_operation_of_the_policies_is_there() -> None:
    assert set(OPS) == {*GEOMETRIC, *OPERATIONS}


def test_an_operation_touches_only_the_images_it_is_for() -> None:
    images = pictures(8, 16, 20)
    before = images.clone()
    rng = np.random.default_rng(0)
    ops = rng.integers(-1, len(OPS), (8, 2))
    ops[3], ops[4] = NONE, (NONE, OPS.index("Invert"))
    magnitudes = np.array([[magnitude_table(16, 20)[op, 7] if op != NONE else 0.0 for op in pair] for pair in ops])
    found = autoaugment(images, OPS, ops, magnitudes)
    assert torch.equal(images, before) and torch.equal(found[3], before[3]) and torch.equal(found[4], ~before[4])
    for image, made, pair, strengths in zip(images, found, ops, magnitudes, strict=True):
        for op, magnitude in zip(pair, strengths, strict=True):
            image = image if op == NONE else of_torchvision(image, OPS[op], float(magnitude))
        assert torch.equal(made, image)  # one after the other, in their order


# Resizing


@pytest.mark.parametrize("mode", [InterpolationMode.BICUBIC, InterpolationMode.BILINEAR], ids=lambda mode: mode.value)
@pytest.mark.parametrize("size", [8, 31, 32, 96])
@pytest.mark.parametrize("shape", [(32, 32), (28, 28), (33, 47), (3, 3), (1, 1), (120, 161), (7, 200)], ids=str)
def test_resized_crops(shape: tuple[int, int], size: int, mode: InterpolationMode) -> None:
    """The same box in torchvision: the same values."""
    images = pictures(20, *shape)
    boxes = sample_boxes(np.random.default_rng(0), v2.RandomResizedCrop(size), np.tile([shape], (20, 1)))
    boxes[0] = (0, 0, *shape)
    boxes[1] = (shape[0] - 1, shape[1] - 1, 1, 1)
    found = resize_boxes(images, boxes, size, mode == InterpolationMode.BICUBIC)
    pairs = zip(images, boxes.tolist(), strict=True)
    expected = torch.stack([TF.resized_crop(i, *box, [size, size], mode, antialias=True) for i, box in pairs])
    most, _ = differing(found, expected)
    assert most <= (0 if VECTORS or mode == InterpolationMode.BICUBIC else 1)


@pytest.mark.parametrize("cubic", [True, False])
def test_products_are_exact_up_to_the_last_tap(cubic: bool) -> None:
    """White images give the largest sums; at this length float32 holds them just yet, at the next float64 must."""
    mode = InterpolationMode.BICUBIC if cubic else InterpolationMode.BILINEAR
    size = 2
    length = next(n for n in range(2, 5000) if taps(np.array([n + 1]), size, cubic) > MOST_TAPS)
    for width in (length, length + 1, 3 * length):
        images = torch.cat([torch.full((1, 3, 4, width), 255, dtype=torch.uint8), pictures(5, 4, width)])
        found = resize(images, size, cubic)
        most, _ = differing(found, TF.resize(images, [size, size], mode, antialias=True))
        assert most <= (0 if VECTORS or cubic else 1)


def test_a_coarse_product_of_matrices_is_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors have eight bits: what TF32 and bfloat16 leave of them is all of them, and sums are float32 in either."""
    images = pictures(20, 33, 47)
    boxes = sample_boxes(np.random.default_rng(0), v2.RandomResizedCrop(32), np.tile([[33, 47]], (20, 1)))
    expected = resize_boxes(images, boxes, 32, True)
    exact = torch.bmm
    seen = []

    def coarse(one: Tensor, other: Tensor) -> Tensor:
        seen.append(one.dtype)
        return exact(one.bfloat16().float(), other.bfloat16().float())

    monkeypatch.setattr(torch, "bmm", coarse)
    assert torch.equal(resize_boxes(images, boxes, 32, True), expected) and seen == [torch.float32] * 4
    monkeypatch.undo()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(resize_boxes(images, boxes, 32, True), expected)


# Crops, flips, evaluation


@pytest.mark.parametrize("padding", [0, 1, 4])
def test_crops_and_flips(padding: int) -> None:
    images = pictures(30, 16, 16)
    rng = np.random.default_rng(0)
    corners, flips = rng.integers(0, 2 * padding + 1, (30, 2)), rng.random(30) < 0.5
    found = crop(images, corners, flips, 16, padding)
    for image, made, (top, left), flip in zip(images, found, corners.tolist(), flips, strict=True):
        expected = TF.crop(TF.pad(image, [padding]), top, left, 16, 16)
        assert torch.equal(made, TF.horizontal_flip(expected) if flip else expected)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize(("shape", "options"), [
    ((10, 10), {"image_size": 8, "resize": 10}), ((10, 10), {"image_size": 7, "resize": 10}),
    ((31, 45), {"image_size": 24, "resize": 29}), ((31, 45), {"image_size": 40}), ((16, 16), {"image_size": 16}),
])  # fmt: skip
def test_evaluation(shape: tuple[int, int], options: dict[str, int], interpolation: str) -> None:
    plain = Transforms(TransformConfig(interpolation=interpolation, **options), 32, [0.4, 0.5, 0.6], [0.2, 0.3, 0.1])  # type: ignore[arg-type]
    batched = BatchedTransforms(plain, torch.device("cpu"))
    images = pictures(10, *shape)
    expected = torch.stack([plain.evaluate(image) for image in images])
    found = batched.evaluate(images)
    if VECTORS or interpolation == "bicubic":
        assert torch.equal(found, expected)
    assert differing(found, expected)[0] <= 1
    assert torch.equal(batched.normalize(expected), plain.normalize(expected))


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("between", ["nearest", "bilinear"])
@pytest.mark.parametrize("augment", get_args(Augment))
@pytest.mark.parametrize("shape", [(32, 32), (120, 161)], ids=str)
def test_a_gpu_gives_the_same_values_without_waiting(shape: tuple[int, int], augment: str, between: str) -> None:
    config = TransformConfig(augment=augment, augment_interpolation=between)  # type: ignore[arg-type]

    def made(device: str, check: Callable[[], None] = lambda: None) -> Tensor:
        plain = Transforms(config, 48, [0.4, 0.5, 0.6], [0.2, 0.3, 0.1])
        transforms = BatchedTransforms(plain, torch.device(device))
        images = pictures(500, *shape).to(device)
        params = transforms.sample(np.random.default_rng(0), np.tile([shape], (500, 1)))
        check()
        return transforms.normalize(transforms.train(images, params))

    expected = made("cpu")
    made("cuda")
    try:
        found = made("cuda", lambda: torch.cuda.set_sync_debug_mode("error"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found.cpu(), expected)
