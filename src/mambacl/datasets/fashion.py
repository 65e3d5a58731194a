"""Fashion-MNIST: the official IDX files, and the part of it that is in the package (250 training and 100 test images
of each class)."""

import gzip
import zlib
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mambacl.datasets.base import DATASETS, ArrayImages, DataSet
from mambacl.errors import UserError

CLASS_NAMES = [
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
]  # fmt: skip


def fashion_mnist_small(root: Path | None) -> DataSet:
    source = files("mambacl") / "streams" / "embedded" / "fashion_mnist.npz"
    with source.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        train = ArrayImages(arrays["train_images"], arrays["train_labels"])
        test = ArrayImages(arrays["test_images"], arrays["test_labels"])
    return DataSet("fashion-mnist-small", CLASS_NAMES, train, test)


def fashion_mnist(root: Path | None) -> DataSet:
    if root is None:
        raise UserError("The data set 'fashion-mnist' needs stream.root: the folder of train-images-idx3-ubyte.gz.")
    splits = []
    for part in ("train", "t10k"):
        pixels, labels = read_idx(root, f"{part}-images-idx3-ubyte"), read_idx(root, f"{part}-labels-idx1-ubyte")
        if len(pixels) != len(labels) or pixels.ndim != 3 or (len(labels) and labels.max() >= len(CLASS_NAMES)):
            raise UserError(f"The images and labels of '{part}' in {root} do not belong together: download them again.")
        splits.append(ArrayImages(pixels, labels.astype(np.int64)))
    return DataSet("fashion-mnist", CLASS_NAMES, splits[0], splits[1])


def read_idx(root: Path, name: str) -> NDArray[np.uint8]:
    """An array of bytes: magic number with the count of axes, their lengths, the values."""
    path = root / f"{name}.gz" if (root / f"{name}.gz").is_file() else root / name
    if not path.is_file():
        raise UserError(f"There is no {path}.gz: run `mambacl data prepare fashion-mnist --root {root}`.")
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error):
        data = b""
    axes = data[3] if len(data) > 3 and data[:3] == b"\0\0\x08" else 0
    start = 4 + 4 * axes
    shape = np.frombuffer(data[4:start], ">u4").astype(int) if axes and len(data) >= start else np.array([-1])
    if len(data) - start != shape.prod():
        raise UserError(f"{path} is damaged or no IDX file of bytes: download it again.")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape).copy()  # so that it can be written


DATASETS.add("fashion-mnist-small", fashion_mnist_small)
DATASETS.add("fashion-mnist", fashion_mnist)
