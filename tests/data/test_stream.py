"""Streams of tasks and their batches."""

import pickle
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from data_help import MEAN, STD, make_tree, random_arrays

from mambacl.data import FileImages, Stream, StreamConfig, TransformConfig, Transforms, open_dataset, open_stream
from mambacl.data.config import Augment
from mambacl.data.sets.cifar100 import cifar100, read_arrays
from mambacl.errors import UserError


def small_stream(augment: str = "none", engine: str = "auto", tasks: int | list[int] = 3, **options: Any) -> Stream:
    transforms = Transforms(TransformConfig(augment=augment, engine=engine), 8, MEAN, STD)  # type: ignore[arg-type]
    return Stream(random_arrays(6, 5, 2, (8, 8)), transforms, tasks, **options)


# Batches


def test_labels_follow_the_class_order() -> None:
    stream = small_stream(order=[5, 3, 0, 1, 2, 4], tasks=[2, 4])
    assert stream.tasks == [[5, 3], [0, 1, 2, 4]]
    labels = torch.cat([labels for _, labels in stream.test_batches(0, 3)])
    assert sorted(labels.tolist()) == [0, 0, 1, 1]
    labels = torch.cat([labels for _, labels in stream.train_batches(1, 0, 4)])
    assert sorted(set(labels.tolist())) == [2, 3, 4, 5]
    assert stream.first_label(1) == 2


def test_an_epoch_shows_each_image_as_often_as_it_should() -> None:
    stream = small_stream()
    images = torch.cat([images for images, _ in stream.train_batches(0, 0, 4, repeats=3)])
    assert len(images) == 30
    _, counts = torch.unique(images, dim=0, return_counts=True)
    assert counts.tolist() == [3] * 10


@pytest.mark.parametrize("engine", ["torchvision", "batched"])
@pytest.mark.parametrize("augment", get_args(Augment))
def test_batches_depend_on_seed_task_and_epoch_only(augment: str, engine: str) -> None:
    def all_images(epoch: int = 0, **options: Any) -> torch.Tensor:
        batches = small_stream(augment, engine, **options).train_batches(1, epoch, 4)
        first, again = (torch.cat([images for images, _ in batches]) for _ in range(2))
        assert torch.equal(first, again)  # a second walk gives the same
        return first

    first = all_images()
    torch.rand(7)  # the state of the program's own random numbers plays no part, and is left alone
    state, other = torch.get_rng_state(), np.random.get_state()[1].tolist()
    assert torch.equal(all_images(), first)
    assert torch.equal(torch.get_rng_state(), state) and np.random.get_state()[1].tolist() == other
    assert not torch.equal(all_images(epoch=1), first) and not torch.equal(all_images(seed=1), first)


def test_workers_change_nothing() -> None:
    alone = list(small_stream("crop-flip").train_batches(0, 2, 4))
    with_workers = list(small_stream("crop-flip", workers=2).train_batches(0, 2, 4))
    assert len(alone) == len(with_workers) == 3
    for (a, la), (b, lb) in zip(alone, with_workers, strict=True):
        assert torch.equal(a, b) and torch.equal(la, lb)


def test_evaluation_resizes_crops_and_normalizes() -> None:
    image = torch.arange(3 * 10 * 10, dtype=torch.uint8).view(3, 10, 10) % 200
    transforms = Transforms(TransformConfig(image_size=8, resize=10), 32, MEAN, STD)
    assert torch.equal(transforms.evaluate(image), image[:, 1:9, 1:9])
    normalized = transforms.normalize(image[None])
    torch.testing.assert_close(normalized[0, 1, 2, 3], (image[1, 2, 3] / 255 - 0.456) / 0.224)
    assert Transforms(TransformConfig(), 32, MEAN, STD).evaluate(image).shape == (3, 32, 32)


# Data sets


def test_the_embedded_images() -> None:
    stream = open_stream(StreamConfig(), 28, MEAN, STD, seed=0, workers=0)
    assert stream.dataset.class_names[0] == "T-shirt/top" and len(stream.tasks) == 5
    assert [stream.train_count(t) for t in range(5)] == [500] * 5
    assert stream.test_counts() == [200] * 5
    images, _ = next(iter(stream.test_batches(0, 10)))
    assert images.shape == (10, 3, 28, 28)
    options = TransformConfig(engine="batched", augment="crop-flip", image_size=20)
    limited = open_stream(StreamConfig(train_per_class=7, transforms=options), 28, MEAN, STD, seed=0, workers=4)
    assert [limited.train_count(t) for t in range(5)] == [14] * 5
    batches = list(limited.train_batches(0, 0, 4))
    assert len(batches) == 4 and batches[0][0].shape == (4, 3, 20, 20)
    assert {label for _, labels in batches for label in labels.tolist()} == {0, 1}
    assert limited.dataset.fingerprint() != stream.dataset.fingerprint()


def test_image_folders(tmp_path: Path) -> None:
    make_tree(tmp_path, ("ant", "bee", "cat"))
    (tmp_path / "train" / "ant" / "notes.txt").write_text("not an image")
    config = StreamConfig(dataset="folders", root=str(tmp_path), tasks=[1, 2], order=[2, 0, 1])
    stream = open_stream(config, 8, MEAN, STD, seed=0, workers=0)
    assert stream.dataset.class_names == ["ant", "bee", "cat"]
    assert [stream.train_count(t) for t in range(2)] == [3, 6]
    images, labels = next(iter(stream.test_batches(1, 10)))
    assert images.shape == (4, 3, 8, 8) and sorted(labels.tolist()) == [1, 1, 2, 2]
    before = stream.describe()["fingerprint"]
    (tmp_path / "train" / "ant" / "0.png").unlink()
    assert open_stream(config, 8, MEAN, STD, seed=0, workers=0).describe()["fingerprint"] != before


def test_wrong_image_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="train"):
        open_dataset("folders", tmp_path)
    make_tree(tmp_path)
    (tmp_path / "test" / "dog").mkdir()
    with pytest.raises(UserError, match=r"'dog' in only one of train and test: add .*train/dog"):
        open_dataset("folders", tmp_path)
    (tmp_path / "train" / "dog").mkdir()
    with pytest.raises(UserError, match="'dog' of folders has no training images"):
        open_dataset("folders", tmp_path)


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    make_tree(tmp_path)
    (tmp_path / "train" / "ant" / "._0.png").write_bytes(b"what another system left")  # not looked at
    (tmp_path / "train" / "ant" / "folder.png").mkdir()
    dataset = open_dataset("folders", tmp_path)
    (tmp_path / "test" / "bee" / "1.png").write_bytes(b"not a picture")
    with pytest.raises(UserError, match=r"1\.png cannot be read as an image"):
        dataset.check()  # before any training
    with pytest.raises(UserError, match=r"1\.png cannot be read as an image"):
        dataset.test.image(3)
    for engine, workers in (("torchvision", 0), ("torchvision", 1), ("batched", 0)):  # in another process as well
        transforms = Transforms(TransformConfig(engine=engine), 8, MEAN, STD)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"^\S*1\.png cannot be read as an image[^\n]*$"):
            list(Stream(dataset, transforms, 1, workers=workers).test_batches(0, 4))


def write_cifar(folder: Path) -> dict[str, dict[bytes, object]]:
    """Files in the official layout, with random images."""
    rng = np.random.default_rng(0)
    contents: dict[str, dict[bytes, object]] = {
        "meta": {b"fine_label_names": [f"class{c}".encode() for c in range(100)]}
    }
    for split, count in (("train", 200), ("test", 100)):
        labels = (np.arange(count) % 100).tolist()
        pixels = rng.integers(0, 256, (count, 3072), dtype=np.uint8)
        contents[split] = {b"data": pixels, b"fine_labels": labels, b"filenames": [b"x.png"] * count}
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return contents


def test_cifar_files_are_read_as_arrays(tmp_path: Path) -> None:
    contents = write_cifar(tmp_path / "cifar-100-python")
    dataset = cifar100(tmp_path, check=lambda data, name: True)
    pixels = contents["train"][b"data"]
    assert isinstance(pixels, np.ndarray)
    assert dataset.train.image(5).flatten().tolist() == pixels[5].tolist()  # channels, then rows
    assert dataset.train.labels[105] == 5 and dataset.class_names[7] == "class7"
    with pytest.raises(UserError, match="not the official file"):
        cifar100(tmp_path)


def test_cifar_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cifar-100-python\.tar\.gz"):
        open_dataset("cifar100", tmp_path)


class Hostile:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.mark,))


def test_a_hostile_cifar_pickle_does_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    with pytest.raises(UserError, match="no array, list or string"):
        read_arrays(pickle.dumps({b"data": Hostile(mark)}))
    with pytest.raises(UserError, match="damaged"):
        read_arrays(pickle.dumps({b"data": [1, 2, 3]})[:-5])
    assert not mark.exists()


OFFICIAL = Path(__file__).parents[3] / "shared" / "data" / "cifar100"


@pytest.mark.skipif(not OFFICIAL.exists(), reason="the official CIFAR-100 files are not here")
def test_the_official_cifar100_meta_is_admitted() -> None:
    from mambacl.data.sets.cifar100 import _has_official_md5

    data = (OFFICIAL / "meta").read_bytes()
    assert _has_official_md5(data, "meta")
    assert read_arrays(data)[b"fine_label_names"][0] == b"apple"


# From a configuration


def test_validation_images_come_from_training_only(tmp_path: Path) -> None:
    make_tree(tmp_path, ("ant", "bee"), train=10, test=2)
    config = StreamConfig(dataset="folders", root=str(tmp_path), tasks=2, validation=0.2)
    stream = open_stream(config, 8, MEAN, STD, seed=3, workers=0)
    train, test = stream.dataset.train, stream.dataset.test
    assert isinstance(train, FileImages) and isinstance(test, FileImages)
    assert np.bincount(train.labels).tolist() == [8, 8] and np.bincount(test.labels).tolist() == [2, 2]
    assert all("train" in path.parts for path in test.files) and not set(train.files) & set(test.files)
    said = stream.describe()
    assert said["validation"] == 0.2 and said["test"] == [2, 2]
    again = open_stream(config, 8, MEAN, STD, seed=4, workers=0)
    assert again.describe()["fingerprint"] == said["fingerprint"]  # the same images whatever the run's seed
    plain = open_stream(StreamConfig(dataset="folders", root=str(tmp_path), tasks=2), 8, MEAN, STD, seed=3, workers=0)
    assert "validation" not in plain.describe()
    for share in (0.0, 1.0, -1.0):
        with pytest.raises(UserError, match="between 0 and 1"):
            StreamConfig(validation=share)
    with pytest.raises(UserError, match="'ant' has one training image"):
        open_dataset("folders", tmp_path).limited(1).with_validation(0.5)


def test_own_tasks_of_a_manifest(tmp_path: Path) -> None:
    make_tree(tmp_path, ("ant", "bee", "cow"))
    rows = ["path,label,split,task"]
    for name, task in (("ant", 2), ("bee", 10), ("cow", 2)):
        rows += [f"train/{name}/{i}.png,{name},train,{task}" for i in range(3)] + [
            f"test/{name}/0.png,{name},test,{task}"
        ]
    (tmp_path / "list.csv").write_text("\n".join(rows))
    config = StreamConfig(dataset="manifest", root=str(tmp_path / "list.csv"), own_tasks=True)
    stream = open_stream(config, 8, MEAN, STD, seed=0, workers=0)
    assert stream.tasks == [[0, 2], [1]] and stream.describe()["train"] == [6, 3]
    labels = [label for _, part in stream.train_batches(1, 0, 10) for label in part.tolist()]
    assert labels == [2, 2, 2]
