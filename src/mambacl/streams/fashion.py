"""The embedded part of Fashion-MNIST: 250 training and 100 test images of each class."""

from importlib.resources import files
from pathlib import Path

import numpy as np

from mambacl.streams.data import DATASETS, ArrayImages, DataSet

CLASS_NAMES = [
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
]  # fmt: skip


def fashion_mnist_small(root: Path | None) -> DataSet:
    source = files("mambacl.streams") / "embedded" / "fashion_mnist.npz"
    with source.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        train = ArrayImages(arrays["train_images"], arrays["train_labels"])
        test = ArrayImages(arrays["test_images"], arrays["test_labels"])
    return DataSet("fashion-mnist-small", CLASS_NAMES, train, test)


DATASETS.add("fashion-mnist-small", fashion_mnist_small)
