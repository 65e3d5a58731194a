"""Streams with the batched engine: what they give, however they are cut, kept and interrupted."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_help import MEAN, STD, make_tree, random_arrays
from small_run import CONFIG
from test_batched_transforms import VECTORS
from tolerance import assert_counts_alike
from torch import Tensor
from torchvision.transforms.v2 import functional as TF
from training_help import assert_same_run, interrupted_after

import mambacl
from mambacl import processes
from mambacl.config import resolve
from mambacl.data import ArrayImages, DataSet, Stream, TransformConfig, Transforms, loaders, open_dataset
from mambacl.data.augment_params import operations
from mambacl.data.autoaugment import NONE
from mambacl.data.image_cache import CachedImages, ImageCache, main_memory
from mambacl.data.loaders import BatchedLoader, Share
from mambacl.errors import UserError
from mambacl.training import build as build_module

AUGMENTS = ["none", "flip", "crop-flip", "resized-crop-flip", "autoaugment-cifar", "autoaugment-imagenet"]


def arrays() -> DataSet:
    return random_arrays(6, 10, 3, (11, 14))


def folders(root: Path) -> DataSet:
    """Files of many sizes, some of the same."""
    sizes = [(7 + 3 * (i % 4), 9 + 5 * (i % 3)) for i in range(12)]
    return open_dataset("folders", make_tree(root, ("ant", "bee", "cat", "dog"), 10, 4, sizes=sizes))


def stream(dataset: DataSet, engine: str = "batched", **options: Any) -> Stream:
    transforms = Transforms(TransformConfig(engine=engine, **options), 8, MEAN, STD)  # type: ignore[arg-type]
    return Stream(dataset, transforms, 2, order=list(range(len(dataset.class_names)))[::-1], workers=3)


@pytest.fixture(params=["arrays", "folders"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> DataSet:
    return arrays() if request.param == "arrays" else folders(tmp_path)


def assert_same_batches(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs)
    for (a, la), (b, lb) in zip(ours, theirs, strict=True):
        assert torch.equal(a, b) and torch.equal(la, lb) and a.dtype == b.dtype and la.dtype == lb.dtype


# The twin


@pytest.mark.parametrize("options", [{}, {"image_size": 9, "resize": 12}, {"image_size": 20}], ids=str)
def test_evaluation_and_plain_training_are_torchvisions(dataset: DataSet, options: dict[str, int]) -> None:
    ours, theirs = (stream(dataset, engine, **options) for engine in ("batched", "torchvision"))
    theirs.workers = 0
    for task in range(2):
        assert_same_batches(ours.test_batches(task, 4), theirs.test_batches(task, 4))
        assert_same_batches(ours.plain_batches(task, 7), theirs.plain_batches(task, 7))
        assert torch.equal(ours.some_images(task, 5), theirs.some_images(task, 5))
    assert_same_batches(ours.train_batches(1, 2, 7, repeats=2), theirs.train_batches(1, 2, 7, repeats=2))


@pytest.mark.parametrize("augment", AUGMENTS[1:])
def test_training_is_torchvisions_with_the_same_params(dataset: DataSet, augment: str) -> None:
    """Image by image, with torchvision's functions and what was sampled."""
    ours = stream(dataset, augment=augment)
    batches = ours.train_batches(1, 2, 7, repeats=2)
    assert isinstance(batches, BatchedLoader)
    found = torch.cat([images for images, _ in batches])
    params = batches.transforms.sample(
        np.random.Generator(np.random.PCG64(batches.seed)), batches.images.sizes[batches.places]
    )
    assert params is not None
    plain, same = ours.transforms, []
    for k, place in enumerate(batches.places):
        image: Tensor = dataset.train.image(int(batches.images.indices[place]))
        if augment.startswith("autoaugment"):
            augmenting = plain.augment.transforms[0]  # type: ignore[union-attr]
            for op, magnitude in zip(params.ops[k], params.magnitudes[k], strict=True):
                if op != NONE:
                    image = augmenting._apply_image_or_video_transform(
                        image, operations()[op], float(magnitude), augmenting.interpolation, augmenting._fill
                    )
            image = TF.resized_crop(image, *params.boxes[k].tolist(), [8, 8], plain.mode, antialias=True)
        elif augment == "resized-crop-flip":
            image = TF.resized_crop(image, *params.boxes[k].tolist(), [8, 8], plain.mode, antialias=True)
            image = TF.horizontal_flip(image) if params.flips[k] else image
        else:
            padding = 1 if augment == "crop-flip" else 0
            image = TF.crop(TF.pad(plain.evaluate(image), [padding]), *params.corners[k].tolist(), 8, 8)
            image = TF.horizontal_flip(image) if params.flips[k] else image
        same.append(torch.equal(found[k], plain.normalize(image[None])[0]))
    assert np.mean(same) > (0.95 if VECTORS else 0.5)  # a rounded level may grow in a second operation


# What they depend on


@pytest.mark.parametrize("most", [1, 1000, 5000])
@pytest.mark.parametrize("augment", ["crop-flip", "autoaugment-cifar"])
def test_blocks_change_nothing(dataset: DataSet, augment: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = list(stream(dataset, augment=augment).train_batches(1, 0, 4, repeats=2))
    monkeypatch.setattr(loaders, "block_values", lambda device: most)
    batches = stream(dataset, augment=augment).train_batches(1, 0, 4, repeats=2)
    assert isinstance(batches, BatchedLoader)
    ends = np.array([*range(0, len(batches.places), 4), len(batches.places)])
    blocks = batches._blocks(batches.places, ends, most)
    assert len(blocks) > 1 and [first for first, _ in blocks[1:]] == [last for _, last in blocks[:-1]]
    assert blocks[0][0] == 0 and blocks[-1][1] == len(expected)
    assert_same_batches(batches, expected)


@pytest.mark.parametrize("engine", ["batched", "torchvision"])
@pytest.mark.parametrize("augment", ["none", "autoaugment-cifar"])
@pytest.mark.parametrize("of", [pytest.param(1, marks=pytest.mark.long), 2, 3, pytest.param(7, marks=pytest.mark.long)])
def test_the_shares_of_several_processes_are_the_batch(dataset: DataSet, augment: str, engine: str, of: int) -> None:
    """Each image in one share, with the pixels that it has alone. A share without an image has the batch's first."""
    batches = stream(dataset, engine, augment=augment).train_batches(1, 0, 4)
    whole = list(batches)
    shares = [list(batches.shared(Share(of, number))) for number in range(of)]  # type: ignore[attr-defined]
    assert all(len(share) == len(whole) == len(batches) for share in shares)
    for step, (images, labels) in enumerate(whole):
        parts = [processes.part(len(labels), of, number) for number in range(of)]
        for part, (own, own_labels) in zip(parts, (share[step] for share in shares), strict=True):
            part = part if part.stop > part.start else slice(0, 1)
            assert torch.equal(own, images[part]) and torch.equal(own_labels, labels[part])
        assert sum(part.stop - part.start for part in parts) == len(labels)
    turns = [list(batches.shared(Share(of, number, in_turns=True))) for number in range(of)]  # type: ignore[attr-defined]
    assert_same_batches([turns[i % of][i // of] for i in range(len(whole))], whole)
    assert [len(own) for own in turns] == [len(range(number, len(whole), of)) for number in range(of)]


@pytest.mark.parametrize("room", [0, 2000])
def test_images_that_do_not_fit_are_read_again(dataset: DataSet, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = list(stream(dataset, augment="autoaugment-cifar").train_batches(1, 0, 4))
    ours = stream(dataset, augment="autoaugment-cifar")
    ours._cache.room = room
    monkeypatch.setattr(loaders, "block_values", lambda device: 5000)  # stacked blocks, so that one is read ahead
    batches = ours.train_batches(1, 0, 4)
    assert_same_batches(batches, expected)
    assert isinstance(batches, BatchedLoader) and batches.images.host_bytes <= room


@pytest.mark.parametrize("at_once", [False, True])
def test_images_are_decoded_once_a_task(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    one, many = ArrayImages.image, ArrayImages.stack
    monkeypatch.setattr(ArrayImages, "image", lambda self, index: read.append(index) or one(self, index))
    monkeypatch.setattr(ArrayImages, "stack", lambda self, indices: read.extend(indices) or many(self, indices))
    ours = stream(arrays())
    if not at_once:
        monkeypatch.setattr(ArrayImages, "nbytes", lambda self, count: 1 << 60)
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
    stacked = images.stack(chosen)
    assert stacked.is_contiguous() and stacked.numel() == images.nbytes(4)
    assert torch.equal(stacked, torch.stack([images.image(index) for index in chosen]))


def test_the_cache_keeps_within_its_room() -> None:
    data = arrays()
    cache = ImageCache(torch.device("cpu"))
    each = 11 * 14 * 3
    cache.room = 25 * each
    first = cache.train(0, data.train, np.arange(20))
    assert first.host_bytes == 20 * each and cache.train(0, data.train, np.arange(20)) is first
    test = cache.test(0, data.test, np.arange(9))
    assert test.host_bytes == 5 * each and cache.test(0, data.test, np.arange(9)) is test
    assert cache.train(1, data.train, np.arange(40)).host_bytes == 20 * each
    assert 1 << 20 < main_memory() < 1 << 50


def test_groups_are_of_one_size_and_not_too_large(tmp_path: Path) -> None:
    data = folders(tmp_path)
    cached = CachedImages(data.train, np.arange(40), torch.device("cpu"), 1 << 30)
    places = np.random.default_rng(0).permutation(40)
    seen = []
    for where, images in cached.groups(places, 1500):
        assert images.numel() <= 1500 or len(images) == 1
        for place, image in zip(places[where], images, strict=True):
            assert torch.equal(image, data.train.image(int(place)))
        seen += where.tolist()
    assert sorted(seen) == list(range(40))


# The engine


def test_auto_is_torchvision_on_the_cpu() -> None:
    assert not isinstance(stream(arrays(), "auto").test_batches(0, 4), BatchedLoader)
    assert isinstance(stream(arrays()).test_batches(0, 4), BatchedLoader)
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
        ours._cache.room = room
        batches = list(ours.train_batches(1, 0, 4))
        assert all(images.is_cuda and labels.is_cuda for images, labels in batches)
        assert_same_batches([(images.cpu(), labels.cpu()) for images, labels in batches], expected)
