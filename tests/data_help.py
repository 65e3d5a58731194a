"""Small data sets on disk for the tests of data."""

import dataclasses
import io
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image

from mambacl.data import DATASETS, ArrayImages, DataSet

SHARED = Path(__file__).parents[2] / "shared" / "data"
LISTS = SHARED / "lists"
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
needs_lists = pytest.mark.skipif(not LISTS.exists(), reason="the public split lists are not here")


def picture(seed: int, size: tuple[int, int] = (5, 4)) -> Image.Image:
    """Unlike every other."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


def write_images(paths: Iterable[Path], start: int = 0, sizes: Sequence[tuple[int, int]] = ((5, 4),)) -> None:
    for number, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(start + number, sizes[number % len(sizes)]).save(path, format="PNG")


def make_tree(
    root: Path, classes: Sequence[str] = ("ant", "bee"), train: int = 3, test: int = 2, **options: Any
) -> Path:
    for split, count, start in (("train", train, 0), ("test", test, 10_000)):
        write_images((root / split / name / f"{i}.png" for name in classes for i in range(count)), start, **options)
    return root


def random_arrays(classes: int, train: int, test: int, shape: tuple[int, int]) -> DataSet:
    """Training images in colour, test images in grey, with these numbers per class."""
    rng = np.random.default_rng(0)
    splits = []
    for count, channels in ((train, (3,)), (test, ())):
        pixels = rng.integers(0, 256, (classes * count, *shape, *channels), dtype=np.uint8)
        splits.append(ArrayImages(pixels, np.repeat(np.arange(classes), count)))
    return DataSet("random", [f"class {c}" for c in range(classes)], splits[0], splits[1])


def image_bytes(seed: int) -> bytes:
    out = io.BytesIO()
    picture(seed).save(out, format="PNG")
    return out.getvalue()


def make_tar(path: Path, files: dict[str, bytes], compression: str = "") -> None:
    with tarfile.open(path, f"w:{compression}") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def make_zip(path: Path, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as zipped:
        for name, data in files.items():
            zipped.writestr(name, data)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def make_bad(root: Path) -> Path:
    make_tree(root, train=4)
    (root / "train" / "ant" / "0.png").write_bytes(b"")
    whole = (root / "train" / "ant" / "1.png").read_bytes()
    (root / "train" / "ant" / "1.png").write_bytes(whole[: len(whole) // 2])
    (root / "test" / "bee" / "0.png").write_bytes(b"not a picture")
    (root / "train" / "bee" / "link.png").symlink_to(root / "nowhere.png")
    return root


class Rows:
    """As much of a `datasets.Dataset` as is used."""

    def __init__(self, labels: list[Any], names: list[str] | None) -> None:
        self.labels, self.features = labels, {"image": object(), "label": SimpleNamespace(names=names)}
        if names is None:
            self.features["label"] = object()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: Any) -> Any:
        return self.labels if isinstance(key, str) else {"image": picture(key), "label": self.labels[key]}


@contextmanager
def fewer_test_images(count: int) -> Iterator[None]:
    """The packaged images with this number of test images per class, in this process."""
    whole = DATASETS.get("fashion-mnist-small")

    def fewer(root: Path | None) -> DataSet:
        data = whole(root)
        kept = [np.flatnonzero(data.test.labels == label)[:count] for label in range(len(data.class_names))]
        return dataclasses.replace(data, test=data.test.subset(np.concatenate(kept)))

    with patch.dict(DATASETS._entries, {"fashion-mnist-small": fewer}):
        yield
