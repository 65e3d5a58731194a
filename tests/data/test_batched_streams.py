"""Streams with the batched engine: what they give, however they are cut, kept and interrupted."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_run import CONFIG
from test_batched_ops import VECTORS
from tolerance import assert_counts_alike
from torch import Tensor
from torchvision.transforms.v2 import functional as TF
from training_help import assert_same_run, interrupted_after

import mambacl
from mambacl.config import resolve
from mambacl.errors import UserError
from mambacl.streams import (
    ArrayImages,
    DataSet,
    Stream,
    StreamConfig,
    TransformConfig,
    Transforms,
    batched,
    open_stream,
)
from mambacl.streams.batched import BatchedBatches, Shelf
from mambacl.streams.batched_draws import OPS
from mambacl.streams.batched_ops import NONE
from mambacl.streams.decoded import Decoded, main_memory
from mambacl.training import build as build_module

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
AUGMENTS = ["none", "flip", "crop-flip", "autoaugment-cifar", "autoaugment-imagenet"]


def arrays(shape: tuple[int, int] = (11, 14)) -> DataSet:
    """Training images in colour, test images in grey."""
    rng = np.random.default_rng(0)
    train = ArrayImages(rng.integers(0, 256, (60, *shape, 3), dtype=np.uint8), np.repeat(np.arange(6), 10))
    test = ArrayImages(rng.integers(0, 256, (18, *shape), dtype=np.uint8), np.repeat(np.arange(6), 3))
    return DataSet("random", [f"class {c}" for c in range(6)], train, test)


def folders(root: Path) -> DataSet:
    """Files of many sizes, some of the same."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 10), ("test", 4)):
        for name in ("ant", "bee", "cat", "dog"):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (7 + 3 * (i % 4), 9 + 5 * (i % 3), 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
    return mambacl.streams.open_dataset("folders", root)


def stream(dataset: DataSet, engine: str = "batched", **options: Any) -> Stream:
    seed, augment = options.pop("seed", 0), options.pop("augment", "none")
    transforms = Transforms(TransformConfig(engine=engine, augment=augment, **options), 8, MEAN, STD)  # type: ignore[arg-type]
    return Stream(dataset, transforms, 2, order=list(range(len(dataset.class_names)))[::-1], seed=seed, workers=3)


@pytest.fixture(params=["arrays", "folders"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> DataSet:
    return arrays() if request.param == "arrays" else folders(tmp_path)


def assert_same_batches(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs)
    for (a, la), (b, lb) in zip(ours, theirs, strict=True):
        assert torch.equal(a, b) and torch.equal(la, lb) and a.dtype == b.dtype and la.dtype == lb.dtype


# The twin


@pytest.mark.parametrize("options", [{}, {"image_size": 9, "resize": 12}, {"image_size": 20}], ids=str)
def test_evaluation_is_torchvisions(dataset: DataSet, options: dict[str, int]) -> None:
    ours, theirs = (stream(dataset, engine, **options) for engine in ("batched", "torchvision"))
    theirs.workers = 0
    for task in range(2):
        assert_same_batches(ours.test_batches(task, 4), theirs.test_batches(task, 4))
        assert_same_batches(ours.plain_batches(task, 7), theirs.plain_batches(task, 7))
        assert torch.equal(ours.some_images(task, 5), theirs.some_images(task, 5))


def test_without_augmentation_training_is_torchvisions(dataset: DataSet) -> None:
    ours, theirs = (stream(dataset, engine) for engine in ("batched", "torchvision"))
    theirs.workers = 0
    assert_same_batches(ours.train_batches(1, 2, 7, repeats=2), theirs.train_batches(1, 2, 7, repeats=2))


@pytest.mark.parametrize("augment", AUGMENTS[1:])
def test_training_is_torchvisions_with_the_same_draws(dataset: DataSet, augment: str) -> None:
    """Image by image, with torchvision's functions and what was drawn."""
    ours = stream(dataset, augment=augment)
    batches = ours.train_batches(1, 2, 7, repeats=2)
    assert isinstance(batches, BatchedBatches)
    found = torch.cat([images for images, _ in batches])
    draws = batches.transforms.draw(
        np.random.Generator(np.random.PCG64(batches.seed)), batches.decoded.sizes[batches.places]
    )
    assert draws is not None
    plain, same = ours.transforms, []
    for k, place in enumerate(batches.places):
        image: Tensor = dataset.train.image(int(batches.decoded.indices[place]))
        if augment.startswith("autoaugment"):
            augmenting = plain.augment.transforms[0]  # type: ignore[union-attr]
            for op, magnitude in zip(draws.ops[k], draws.magnitudes[k], strict=True):
                if op != NONE:
                    image = augmenting._apply_image_or_video_transform(
                        image, OPS[op], float(magnitude), augmenting.interpolation, augmenting._fill
                    )
            image = TF.resized_crop(image, *draws.boxes[k].tolist(), [8, 8], plain.mode, antialias=True)
        else:
            padding = 1 if augment == "crop-flip" else 0
            image = TF.crop(TF.pad(plain.evaluate(image), [padding]), *draws.corners[k].tolist(), 8, 8)
            image = TF.horizontal_flip(image) if draws.flips[k] else image
        same.append(torch.equal(found[k], plain.normalize(image[None])[0]))
    assert np.mean(same) > (0.95 if VECTORS else 0.5)  # a rounded level may grow in a second operation


# What they depend on


@pytest.mark.parametrize("augment", AUGMENTS)
def test_batches_depend_on_seed_task_and_epoch_only(dataset: DataSet, augment: str) -> None:
    def images(seed: int = 0, epoch: int = 0) -> Tensor:
        return torch.cat(
            [images for images, _ in stream(dataset, augment=augment, seed=seed).train_batches(1, epoch, 4)]
        )

    state, other = torch.get_rng_state(), np.random.get_state()[1].tolist()
    first = images()
    assert torch.equal(images(), first)
    assert torch.equal(torch.get_rng_state(), state) and np.random.get_state()[1].tolist() == other
    assert not torch.equal(images(epoch=1), first) and not torch.equal(images(seed=1), first)
    again = stream(dataset, augment=augment).train_batches(1, 0, 4)
    assert_same_batches(again, list(again))  # a second walk gives the same


@pytest.mark.parametrize("most", [1, 1000, 5000])
@pytest.mark.parametrize("augment", ["crop-flip", "autoaugment-cifar"])
def test_blocks_change_nothing(dataset: DataSet, augment: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = list(stream(dataset, augment=augment).train_batches(1, 0, 4, repeats=2))
    monkeypatch.setattr(batched, "block_values", lambda device: most)
    batches = stream(dataset, augment=augment).train_batches(1, 0, 4, repeats=2)
    assert isinstance(batches, BatchedBatches)
    blocks = batches._blocks(most)
    assert len(blocks) > 1 and [b.start for b in blocks[1:]] == [b.stop for b in blocks[:-1]]
    assert all(block.start % 4 == 0 for block in blocks) and blocks[-1].stop == len(batches.places)
    assert_same_batches(batches, expected)


@pytest.mark.parametrize("room", [0, 2000])
def test_images_that_do_not_fit_are_read_again(dataset: DataSet, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = list(stream(dataset, augment="autoaugment-cifar").train_batches(1, 0, 4))
    ours = stream(dataset, augment="autoaugment-cifar")
    ours._shelf.room = room
    monkeypatch.setattr(batched, "block_values", lambda device: 5000)  # several blocks, so that one is read ahead
    batches = ours.train_batches(1, 0, 4)
    assert_same_batches(batches, expected)
    assert isinstance(batches, BatchedBatches) and batches.decoded.host_bytes <= room


@pytest.mark.parametrize("at_once", [False, True])
def test_images_are_decoded_once_a_task(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    one, several = ArrayImages.image, ArrayImages.several
    monkeypatch.setattr(ArrayImages, "image", lambda self, index: read.append(index) or one(self, index))
    monkeypatch.setattr(ArrayImages, "several", lambda self, indices: read.extend(indices) or several(self, indices))
    ours = stream(arrays())
    if not at_once:
        monkeypatch.setattr(ArrayImages, "bytes_of", lambda self, count: 1 << 60)
    for task in range(2):
        for epoch in range(2):
            list(ours.train_batches(task, epoch, 8))
        list(ours.plain_batches(task, 8))
        for old in range(task + 1):
            list(ours.test_batches(old, 8))
    assert len(read) == 60 + 18


@pytest.mark.parametrize("split", ["train", "test"])  # with colours, grey
def test_an_array_gives_several_images_as_it_gives_each(split: str) -> None:
    images = getattr(arrays(), split)
    chosen = np.array([5, 0, 5, 17])
    several = images.several(chosen)
    assert several.is_contiguous() and several.numel() == images.bytes_of(4)
    assert torch.equal(several, torch.stack([images.image(index) for index in chosen]))


def test_the_shelf_keeps_within_its_room() -> None:
    data = arrays()
    shelf = Shelf(torch.device("cpu"))
    each = 11 * 14 * 3
    shelf.room = 25 * each
    first = shelf.train(0, data.train, np.arange(20))
    assert first.host_bytes == 20 * each and shelf.train(0, data.train, np.arange(20)) is first
    test = shelf.test(0, data.test, np.arange(9))
    assert test.host_bytes == 5 * each and shelf.test(0, data.test, np.arange(9)) is test
    assert shelf.train(1, data.train, np.arange(40)).host_bytes == 20 * each
    assert 1 << 20 < main_memory() < 1 << 50


def test_groups_are_of_one_size_and_not_too_large(tmp_path: Path) -> None:
    data = folders(tmp_path)
    decoded = Decoded(data.train, np.arange(40), torch.device("cpu"), 1 << 30)
    places = np.random.default_rng(0).permutation(40)
    seen = []
    for where, images in decoded.groups(places, 1500):
        assert images.numel() <= 1500 or len(images) == 1
        for place, image in zip(places[where], images, strict=True):
            assert torch.equal(image, data.train.image(int(place)))
        seen += where.tolist()
    assert sorted(seen) == list(range(40))


# The engine


def test_auto_is_torchvision_on_the_cpu() -> None:
    assert not isinstance(stream(arrays(), "auto").test_batches(0, 4), BatchedBatches)
    assert isinstance(stream(arrays()).test_batches(0, 4), BatchedBatches)
    with pytest.raises(UserError, match="engine"):
        resolve(CONFIG, {"stream.transforms.engine": "pillow"})


def test_a_run_tells_the_stream_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    original = build_module.open_stream

    def spy(*arguments: Any) -> Stream:
        seen.append(arguments[6])
        return original(*arguments)

    monkeypatch.setattr(build_module, "open_stream", spy)
    build_module.build(resolve(CONFIG, {}))
    assert seen == [build_module.pick_device("auto")]


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    data = folders(tmp_path)
    (tmp_path / "test" / "bee" / "1.png").write_bytes(b"not a picture")
    with pytest.raises(UserError, match=r"^\S*1\.png cannot be read as an image[^\n]*$"):
        list(stream(data).test_batches(1, 4))


def test_embedded_images() -> None:
    config = StreamConfig(transforms=TransformConfig(engine="batched", augment="crop-flip", image_size=20))
    ours = open_stream(config, 28, MEAN, STD, seed=0, workers=4, device="cpu")
    batches = ours.train_batches(0, 0, 64)
    assert len(batches) == 8  # type: ignore[arg-type]
    images, labels = next(iter(batches))
    assert images.shape == (64, 3, 20, 20) and set(labels.tolist()) == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("augment", ["crop-flip", "autoaugment-imagenet"])
@pytest.mark.usefixtures("few_test_images")
def test_an_interrupted_run_ends_the_same(augment: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "stream.tasks": [5, 5],
        "stream.transforms": {"image_size": 16, "augment": augment, "engine": "batched"},
        "device": "cpu",
    }
    mambacl.train(CONFIG, out=str(tmp_path / "whole"), **options)
    for count in (2, 5):  # in the middle of the first task, and of the second
        with interrupted_after(count):
            mambacl.train(CONFIG, out=str(tmp_path / str(count)), **options)
        mambacl.resume(tmp_path / str(count))
        assert_same_run(tmp_path / "whole", tmp_path / str(count))
    evaluation = mambacl.evaluate(tmp_path / "whole", 33)
    assert_counts_alike(evaluation.counted, evaluation.recorded)


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("augment", AUGMENTS)
def test_a_gpu_gives_the_same_batches(dataset: DataSet, augment: str) -> None:
    expected = list(stream(dataset, augment=augment).train_batches(1, 0, 4))
    transforms = Transforms(TransformConfig(augment=augment), 8, MEAN, STD)  # type: ignore[arg-type]
    order = list(range(len(dataset.class_names)))[::-1]
    for room in (1 << 30, 0):
        ours = Stream(dataset, transforms, 2, order=order, device="cuda")
        ours._shelf.room = room
        batches = list(ours.train_batches(1, 0, 4))
        assert all(images.is_cuda and labels.is_cuda for images, labels in batches)
        assert_same_batches([(images.cpu(), labels.cpu()) for images, labels in batches], expected)
