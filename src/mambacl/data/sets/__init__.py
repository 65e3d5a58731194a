"""One file per data set. It registers itself in `DATASETS`, and its contents and origin in `SOURCES`."""

import pkgutil
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from mambacl.background import in_background
from mambacl.data.config import TEST_SHARE
from mambacl.data.dataset import DataSet
from mambacl.data.images import ArrayImages
from mambacl.errors import UserError
from mambacl.files import expanded, has_checksum
from mambacl.log import logger
from mambacl.registry import Registry


@dataclass(frozen=True)
class Download:
    """A public file: URL and checksum. The package contains neither images nor split lists."""

    url: str
    checksum: str
    """'sha256:...'"""
    unpack: bool = True
    """whether it is an archive to unpack"""
    folder: str = ""
    """folder inside the root for the file or the contents of the archive"""
    content: str = ""
    """for a .gz file that is not unpacked: the checksum of its content, which a user's copy can hold compressed
    differently or not at all"""

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def matches(self, path: Path) -> bool:
        return has_checksum(path, self.checksum, self.content)


@dataclass(frozen=True)
class Source:
    summary: str
    layout: str
    """the files in the root"""
    counts: tuple[int, int, int] | None = None
    """classes, training images and test images, if fixed"""
    downloads: tuple[Download, ...] = ()
    lists: tuple[Download, ...] = ()
    """files that split the images into training and test images, if the data set has such files"""


DATASETS: Registry[Callable[[Path | None], DataSet]] = Registry("data set", "mambacl.datasets")
SOURCES: dict[str, Source] = {}


def required_root(root: Path | None, name: str) -> Path:
    if root is None:
        raise UserError(f"The data set '{name}' needs stream.root: the folder with {SOURCES[name].layout}.")
    return root


def list_datasets() -> list[str]:
    """Names for `open_dataset` and `stream.dataset`."""
    return sorted(DATASETS.names())


def open_dataset(name: str, root: str | Path | None, skip_bad: bool = False, test_share: float = TEST_SHARE) -> DataSet:
    """A data set by name; `root` is the folder with its files, for those that are not part of the package. If it has no
    test images, `test_share` of each class is held out."""
    begun = None if skip_bad else _begun.pop((name, root, test_share), None)
    return _opened(name, root, skip_bad, test_share) if begun is None else begun.result()


_begun: dict[tuple[str, str | Path | None, float], Future[DataSet]] = {}  # at most one


def begin_to_open(name: str, root: str | Path | None, test_share: float = TEST_SHARE, fingerprint: bool = True) -> None:
    """Opens a data set in the background, for the next call of `open_dataset`, which also raises any error.
    `fingerprint`: whether all its images are used, so that its fingerprint is needed."""

    def work() -> DataSet:
        dataset = _opened(name, root, skip_bad=False, test_share=test_share)
        if fingerprint and isinstance(dataset.train, ArrayImages):
            dataset.fingerprint()  # which they remember
        return dataset

    forget_begun()
    _begun[name, root, test_share] = in_background(work)


def forget_begun() -> None:
    """Forgets what `begin_to_open` has begun, if nobody has taken it: the data can be others by the next time."""
    _begun.clear()


def _opened(name: str, root: str | Path | None, skip_bad: bool, test_share: float) -> DataSet:
    dataset = DATASETS.get(name)(None if root is None else expanded(root))
    if skip_bad:
        dataset = dataset.without_bad()
        if dataset.skipped:
            logger.warning("Skipped %d images of %s that cannot be read.", len(dataset.skipped), name)
    dataset = dataset.with_test_images(test_share)
    dataset.refuse_empty(name)
    return dataset


for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
