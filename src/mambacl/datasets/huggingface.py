"""Data sets of Hugging Face's `datasets`: an object at hand, or a folder that `save_to_disk` wrote. The library is
imported only for the latter."""

import hashlib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mambacl.datasets.base import DATASETS, DataSet
from mambacl.datasets.decoding import DAMAGE, rgb
from mambacl.errors import UserError


class RowImages:
    """One split: rows with an image and a label. The digest is the library's own fingerprint of the rows, where there
    is one, with the labels."""

    def __init__(self, rows: Any, image: str, labels: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        self.rows, self.column, self.labels, self.numbers = rows, image, labels, numbers

    def image(self, index: int) -> Tensor:
        number = int(self.numbers[index])
        try:
            return torch.from_numpy(rgb(self.rows[number][self.column])).permute(2, 0, 1)
        except (*DAMAGE, AttributeError) as error:
            raise UserError(f"Row {number} holds no readable image ({error}): remove it with `select`.") from None

    def check(self) -> None:
        for index in range(len(self.labels)):
            self.image(index)

    def digest(self) -> str:
        content = hashlib.sha256(str(getattr(self.rows, "_fingerprint", len(self.rows))).encode())
        content.update(self.labels.tobytes())
        content.update(self.numbers.tobytes())
        return content.hexdigest()

    def subset(self, indices: NDArray[np.int64]) -> "RowImages":
        return RowImages(self.rows, self.column, self.labels[indices], self.numbers[indices])


def from_huggingface(
    splits: Mapping[str, Any],
    name: str = "huggingface",
    image: str = "image",
    label: str = "label",
    train: str = "train",
    test: str = "test",
) -> DataSet:
    """A `DatasetDict`, or any mapping of split names to rows, as a data set."""
    for split in (train, test):
        if split not in splits:
            raise UserError(f"There is no split '{split}'; there are {', '.join(map(str, splits))}.")
        for column in (image, label):
            if column not in splits[split].features:
                known = ", ".join(splits[split].features)
                raise UserError(f"The split '{split}' has no column '{column}'; there are {known}.")
    feature = splits[train].features[label]
    values = {split: list(splits[split][label]) for split in (train, test)}
    names = getattr(feature, "names", None)
    if names is None:
        found = sorted({value for part in values.values() for value in part})
        names, number = [str(value) for value in found], {value: position for position, value in enumerate(found)}
    else:
        number = {position: position for position in range(len(names))}

    def rows(split: str) -> RowImages:
        if unknown := [value for value in values[split] if value not in number]:
            raise UserError(f"The split '{split}' has the label {unknown[0]!r}, which is no class: remove such rows.")
        labels = np.array([number[value] for value in values[split]], dtype=np.int64)
        return RowImages(splits[split], image, labels, np.arange(len(labels)))

    return DataSet(name, list(names), rows(train), rows(test))


def saved(root: Path | None) -> DataSet:
    if root is None or not root.is_dir():
        raise UserError("The data set 'huggingface' needs stream.root: a folder that `save_to_disk` wrote.")
    try:
        library: Any = import_module("datasets")
    except ImportError:
        raise UserError("The data set 'huggingface' needs its library: `pip install datasets`.") from None
    try:
        splits = library.load_from_disk(str(root))
    except (OSError, ValueError) as error:
        raise UserError(f"{root} is nothing that `save_to_disk` wrote ({error}).") from None
    return from_huggingface(splits, root.resolve().name)


DATASETS.add("huggingface", saved)
