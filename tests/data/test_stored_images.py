"""Stored images join a task's batches: which, where, and that positions and pixels give the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from data_help import MEAN, STD, make_tree, random_arrays

from mambacl.data import Stream, TransformConfig, Transforms, open_dataset
from mambacl.errors import UserError
from mambacl.stored import StoredImages


def stream(root: Path | None, engine: str, augment: str = "none", **options: Any) -> Stream:
    """Three tasks; from a folder, images of several sizes."""
    transforms = Transforms(TransformConfig(augment=augment, engine=engine), 8, MEAN, STD)  # type: ignore[arg-type]
    if root is None:
        dataset = random_arrays(6, 5, 2, (8, 8))
    else:
        names = [f"class{i}" for i in range(6)]
        dataset = open_dataset("folders", make_tree(root, names, 5, 2, sizes=[(8, 9), (10, 8), (8, 8)]))
    return Stream(dataset, transforms, 3, order=[5, 3, 0, 1, 2, 4], seed=3, **options)


def stored(of: Stream, pixels: bool) -> StoredImages:
    """Some images of the first two tasks, with the labels that their batches have."""
    tasks, positions = torch.tensor([0, 0, 1]), torch.tensor([7, 2, 4])
    labels = [torch.cat([own for _, own in of.plain_batches(task, 3)]) for task in range(2)]
    own = torch.stack([labels[t][p] for t, p in zip(tasks.tolist(), positions.tolist(), strict=True)])
    images = [of.train_image(t, p) for t, p in zip(tasks.tolist(), positions.tolist(), strict=True)]
    return StoredImages(own, tasks, positions, tuple(images) if pixels else None)


def joined(batches: Any) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = zip(*batches, strict=True)
    return torch.cat(images), torch.cat(labels)


ENGINES = pytest.mark.parametrize("engine", ["torchvision", "batched"])
SOURCES = pytest.mark.parametrize("files", [False, True], ids=["arrays", "files"])
KINDS = pytest.mark.parametrize("pixels", [False, True], ids=["indices", "pixels"])


@ENGINES
@SOURCES
@KINDS
def test_they_follow_the_tasks_images(engine: str, files: bool, pixels: bool, tmp_path: Path) -> None:
    own = stream(tmp_path if files else None, engine)
    memory = stored(own, pixels)
    alone, labels = joined(own.plain_batches(2, 4))
    images, every = joined(own.plain_batches(2, 4, memory))
    assert torch.equal(images[:10], alone) and torch.equal(every[:10], labels)
    assert torch.equal(every[10:], memory.labels) and set(every[10:].tolist()) <= {0, 1, 2, 3}
    for image, task, position in zip(images[10:], memory.tasks.tolist(), memory.positions.tolist(), strict=True):
        assert torch.equal(image, joined(own.plain_batches(task, 4))[0][position])
    again, _ = joined(own.plain_batches(2, 4))  # without them, as before
    assert torch.equal(again, alone)


@ENGINES
@SOURCES
@pytest.mark.parametrize("augment", ["none", "crop-flip"])
def test_positions_and_pixels_give_the_same_epochs(engine: str, files: bool, augment: str, tmp_path: Path) -> None:
    """Also in another process, with workers or not, and when an epoch is repeated."""
    found = []
    for place, pixels in enumerate((False, True, True)):
        root = tmp_path / str(place) if files else None
        own = stream(root, engine, augment, workers=2 * (place == 2))
        memory = stored(own, pixels)
        batches = own.train_batches(2, 1, 4, 2, memory)
        assert len(batches) == 7  # two passes over 13 images
        found.append(joined(batches))
        images, labels = joined(own.train_batches(2, 1, 4, 2, memory))
        assert torch.equal(images, found[-1][0]) and torch.equal(labels, found[-1][1])
    for images, labels in found[1:]:
        assert torch.equal(images, found[0][0]) and torch.equal(labels, found[0][1])
    counts = found[0][1].bincount(minlength=6)
    assert counts[4:].tolist() == [10, 10] and counts[:4].sum() == 6
    other = joined(own.train_batches(2, 2, 4, 2, memory))[1]
    assert not torch.equal(other, found[0][1]) and torch.equal(other.sort()[0], found[0][1].sort()[0])
    if augment == "none":
        _, each = found[0][0].unique(dim=0, return_counts=True)
        assert each.tolist() == [2] * 13


@ENGINES
def test_without_them_an_epoch_is_as_before(engine: str) -> None:
    own = stream(None, engine, "crop-flip")
    images, labels = joined(own.train_batches(2, 1, 4))
    memory = stored(own, pixels=True)
    joined(own.train_batches(2, 1, 4, 1, memory))
    again, others = joined(own.train_batches(2, 1, 4))
    assert torch.equal(images, again) and torch.equal(labels, others)


@pytest.mark.parametrize("task, position", [(7, 0), (0, 10)])
def test_positions_of_images_that_are_not_here(task: int, position: int) -> None:
    memory = StoredImages(torch.tensor([0]), torch.tensor([task]), torch.tensor([position]))
    with pytest.raises(UserError, match=r"those of earlier tasks are not here.*--options\.memory pixels"):
        stream(None, "batched").train_batches(2, 0, 4, 1, memory)
