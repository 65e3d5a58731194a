"""Data sets from Hugging Face's `datasets`: a loaded object, or a folder that `save_to_disk` wrote. Only the folder
needs the library."""

import hashlib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mambacl.data.dataset import DataSet, Domains
from mambacl.data.images import DAMAGE, DecodedImages, reason, rgb
from mambacl.data.sets import DATASETS, SOURCES, Source
from mambacl.errors import UserError


class RowImages(DecodedImages):
    """One split: rows with an image and a label. The digest covers the labels and the library's fingerprint of the
    rows, if it has one."""

    def __init__(
        self, rows: Any, image: str, labels: NDArray[np.int64], numbers: NDArray[np.int64], checked: bool = False
    ) -> None:
        self.rows, self.column, self.labels, self.numbers, self.checked = rows, image, labels, numbers, checked

    def try_image(self, index: int) -> NDArray[np.uint8] | str:
        try:
            return rgb(self.rows[int(self.numbers[index])][self.column])
        except (*DAMAGE, AttributeError) as error:
            return f"has no readable image ({reason(error)})"

    def refusal(self, index: int, trouble: str) -> UserError:
        name = self.name(index).capitalize()
        return UserError(f"{name} {trouble}: remove it with `select`, or skip bad images (--skip-bad).")

    def name(self, index: int) -> str:
        return f"row {self.numbers[index]}"

    def digest(self) -> str:
        content = hashlib.sha256(str(getattr(self.rows, "_fingerprint", len(self.rows))).encode())
        content.update(self.labels.tobytes())
        content.update(self.numbers.tobytes())
        return content.hexdigest()

    def subset(self, indices: NDArray[np.int64]) -> "RowImages":
        return RowImages(self.rows, self.column, self.labels[indices], self.numbers[indices], self.checked)


def from_huggingface(
    splits: Mapping[str, Any],
    name: str = "huggingface",
    image: str = "image",
    label: str = "label",
    train: str = "train",
    test: str = "test",
    domain: str = "domain",
) -> DataSet:
    """Turns a `DatasetDict`, or any mapping from split names to rows, into a data set. If the column `domain` exists,
    it holds the domain of each image."""
    if not isinstance(splits, Mapping):
        raise UserError(
            f"A Hugging Face data set must have the splits '{train}' and '{test}', but this is a single split: divide "
            "it with `train_test_split`."
        )
    for split in (train, test):
        if split not in splits:
            raise UserError(f"There is no split '{split}'. Known: {', '.join(map(str, splits))}.")
        if not hasattr(splits[split], "__len__"):
            raise UserError(f"The split '{split}' is a stream without row numbers: load it without streaming.")
        for column in (image, label):
            if column not in splits[split].features:
                known = ", ".join(splits[split].features)
                raise UserError(f"The split '{split}' has no column '{column}'. Known: {known}.")
    feature = splits[train].features[label]
    values = {split: list(splits[split][label]) for split in (train, test)}
    names = getattr(feature, "names", None)
    if names is None:
        found = sorted({value for part in values.values() for value in part if value is not None})
        names, number = [str(value) for value in found], {value: position for position, value in enumerate(found)}
    else:
        number = {position: position for position in range(len(names))}

    def rows(split: str) -> RowImages:
        if unknown := [value for value in values[split] if value not in number]:
            raise UserError(
                f"The split '{split}' has the label {unknown[0]!r}, which is not a class: remove such rows."
            )
        labels = np.array([number[value] for value in values[split]], dtype=np.int64)
        return RowImages(splits[split], image, labels, np.arange(len(labels)))

    domains = _domains(splits[train], splits[test], domain)
    return DataSet(name, list(names), rows(train), rows(test), domains=domains)


def _domains(train: Any, test: Any, column: str) -> Domains | None:
    """None if the column does not exist or has gaps."""
    if column not in train.features or column not in test.features:
        return None
    words, values = getattr(train.features[column], "names", None), [list(train[column]), list(test[column])]
    if any(value is None for part in values for value in part):
        return None
    return Domains.of(*([str(value if words is None else words[value]) for value in part] for part in values))


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
        raise UserError(f"{root} was not written by `save_to_disk` ({error}): save the data set again.") from None
    return from_huggingface(splits, root.resolve().name)


DATASETS.add("huggingface", saved)
SOURCES["huggingface"] = Source("a Hugging Face data set that `save_to_disk` wrote", "its files")
