"""Fashion-MNIST: the official IDX files, and the part that comes with the package (250 training and 100 test images per
class)."""

import gzip
import zlib
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mambacl.data.dataset import DataSet
from mambacl.data.images import ArrayImages
from mambacl.data.sets import DATASETS, SOURCES, Download, Source, required_root
from mambacl.errors import UserError

CLASS_NAMES = [
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
]  # fmt: skip


def fashion_mnist_small(root: Path | None) -> DataSet:
    source = files("mambacl") / "data" / "embedded" / "fashion_mnist.npz"
    with source.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        train = ArrayImages(arrays["train_images"], arrays["train_labels"])
        test = ArrayImages(arrays["test_images"], arrays["test_labels"])
    return DataSet("fashion-mnist-small", CLASS_NAMES, train, test)


def fashion_mnist(root: Path | None) -> DataSet:
    root = required_root(root, "fashion-mnist")
    splits = []
    for part in ("train", "t10k"):
        pixels, labels = read_idx(root, f"{part}-images-idx3-ubyte"), read_idx(root, f"{part}-labels-idx1-ubyte")
        if len(pixels) != len(labels) or pixels.ndim != 3 or (len(labels) and labels.max() >= len(CLASS_NAMES)):
            raise UserError(f"The images and labels of '{part}' in {root} do not match: download them again.")
        splits.append(ArrayImages(pixels, labels.astype(np.int64)))
    return DataSet("fashion-mnist", CLASS_NAMES, splits[0], splits[1])


def read_idx(root: Path, name: str) -> NDArray[np.uint8]:
    """Reads an array of bytes: a magic number with the number of axes, the lengths of the axes, the values."""
    path = root / f"{name}.gz" if (root / f"{name}.gz").is_file() else root / name
    if not path.is_file():
        raise UserError(f"{path}.gz does not exist: run `mambacl data prepare fashion-mnist --root {root}`.")
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error):
        data = b""
    axes = data[3] if len(data) > 3 and data[:3] == b"\0\0\x08" else 0
    start = 4 + 4 * axes
    shape = np.frombuffer(data[4:start], ">u4").astype(int) if axes and len(data) >= start else np.array([-1])
    if len(data) - start != shape.prod():
        raise UserError(f"{path} is damaged or not an IDX file of bytes: download it again.")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape).copy()  # a copy is writable


def _file(name: str, checksum: str, content: str) -> Download:
    address = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
    return Download(f"{address}/{name}", f"sha256:{checksum}", unpack=False, content=f"sha256:{content}")


DATASETS.add("fashion-mnist-small", fashion_mnist_small)
SOURCES["fashion-mnist-small"] = Source("part of Fashion-MNIST, included in the package", "nothing", (10, 2500, 1000))
DATASETS.add("fashion-mnist", fashion_mnist)
SOURCES["fashion-mnist"] = Source(
    "Fashion-MNIST, 28 x 28 pixels, grey",
    "train-images-idx3-ubyte.gz and its three companions, .gz or not",
    (10, 60_000, 10_000),
    downloads=(
        _file(
            "train-images-idx3-ubyte.gz",
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        ),
        _file(
            "train-labels-idx1-ubyte.gz",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        ),
        _file(
            "t10k-images-idx3-ubyte.gz",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        ),
        _file(
            "t10k-labels-idx1-ubyte.gz",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
    ),
)
