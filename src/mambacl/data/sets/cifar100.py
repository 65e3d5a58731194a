"""CIFAR-100 from the official Python files: train, test and meta, in the folder cifar-100-python.

They are pickles. Their MD5 is checked first. Then an unpickler reads them that accepts NumPy arrays, lists, bytes and
strings and refuses everything else.
"""

import hashlib
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mambacl.data.dataset import DataSet
from mambacl.data.images import ArrayImages
from mambacl.data.sets import DATASETS, SOURCES, Download, Source, required_root
from mambacl.errors import UserError

MD5 = {
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    "meta": "7973b15100ade9c7d40fb424638fde48",
}

LONGEST_LINE = 1 << 10  # bytes: the names of modules and what they define


def _latin1(text: str, encoding: str) -> bytes:
    """Decodes bytes as a protocol-2 pickle of Python 3 stores them."""
    return text.encode("latin1")


def _empty_array(kind: type, shape: tuple[int, ...], code: bytes) -> np.ndarray:
    """An array that the pickle's next instruction fills."""
    return np.ndarray.__new__(np.ndarray, shape, np.int8)


class ArraysOnly(pickle.Unpickler):
    """Accepts the parts of a NumPy array and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return _empty_array
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):
            return _latin1
        raise UserError(f"The file contains {module}.{name}, which is no array, list or string: download it again.")


class InPlace:
    """Bytes as a file for the unpickler, which takes them from here without a copy. It keeps all other threads waiting
    while it copies, and reading the data must not delay the import of PyTorch."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = memoryview(data), 0

    def peek(self, count: int) -> memoryview:
        return self.data[self.at : self.at + count]

    def read(self, count: int) -> memoryview:
        found = self.peek(count)
        self.at += len(found)
        return found

    def readline(self) -> bytes:
        rest = io.BytesIO(self.data[self.at : self.at + LONGEST_LINE])
        return bytes(self.read(len(rest.readline())))


def read_arrays(data: bytes) -> Any:
    """The contents of a pickle of arrays, lists, bytes and strings."""
    try:
        return ArraysOnly(InPlace(data), encoding="bytes").load()  # type: ignore[arg-type]
    except UserError:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise UserError(f"The file is damaged ({error}): download it again.") from None


def read_official(folder: Path, name: str, check: Callable[[bytes, str], bool]) -> dict[bytes, Any]:
    path = folder / name
    if not path.is_file():
        raise UserError(
            f"{folder} has no CIFAR-100 file '{name}': set stream.root to the folder where you unpacked the official "
            "cifar-100-python.tar.gz."
        )
    data = path.read_bytes()
    if not check(data, name):
        raise UserError(f"{path} is not the official file (its MD5 is not {MD5[name]}): download it again.")
    return read_arrays(data)


def _has_official_md5(data: bytes, name: str) -> bool:
    return hashlib.md5(data, usedforsecurity=False).hexdigest() == MD5[name]


def cifar100(root: Path | None, check: Callable[[bytes, str], bool] = _has_official_md5) -> DataSet:
    root = required_root(root, "cifar100")
    folder = root / "cifar-100-python" if (root / "cifar-100-python").is_dir() else root
    names = [name.decode() for name in read_official(folder, "meta", check)[b"fine_label_names"]]
    splits = []
    for split in ("train", "test"):
        contents = read_official(folder, split, check)
        pixels = np.asarray(contents[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        splits.append(ArrayImages(pixels, np.array(contents[b"fine_labels"])))
    return DataSet("cifar100", names, splits[0], splits[1])


DATASETS.add("cifar100", cifar100)
SOURCES["cifar100"] = Source(
    "CIFAR-100, 32 x 32 pixels",
    "cifar-100-python/{train,test,meta}",
    (100, 50_000, 10_000),
    downloads=(
        Download(
            "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
            "sha256:85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        ),
    ),
)
