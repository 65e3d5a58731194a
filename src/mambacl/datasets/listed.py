"""ImageNet-R and DomainNet: images in folders, split by public lists that the package does not carry."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mambacl.datasets.base import DATASETS, DataSet, Domains, FileImages
from mambacl.datasets.sources import SOURCES, Download
from mambacl.errors import UserError

Entry = tuple[str, int | None]  # a path below the images' folder, and its label where the list says it


def read_list(root: Path, download: Download, name: str) -> list[Entry]:
    """A public list from ROOT/lists or ROOT, its checksum verified."""
    found = [path for path in (root / "lists" / download.name, root / download.name) if path.is_file()]
    if not found:
        raise UserError(
            f"There is no {root / 'lists' / download.name}: run `mambacl data prepare {name} --root {root}`"
            " (with --lists DIR where you have the lists)."
        )
    data = found[0].read_bytes()
    verify(data, download, found[0])
    return parse_list(data.decode())


def verify(data: bytes, download: Download, path: Path) -> None:
    kind, _, expected = download.checksum.partition(":")
    if hashlib.new(kind, data, usedforsecurity=False).hexdigest() != expected:
        raise UserError(
            f"{path} is not the public list (its {kind.upper()} is not {expected}): fetch it from {download.url}."
        )


def parse_list(text: str) -> list[Entry]:
    """Lines 'path' or 'path label'; names may hold spaces."""
    entries: list[Entry] = []
    for line in text.splitlines():
        path, _, last = line.strip().rpartition(" ")
        if path and last.isdigit():
            entries.append((path, int(last)))
        elif line.strip():
            entries.append((line.strip(), None))
    return entries


def listed(name: str, images: Path, train: Sequence[Entry], test: Sequence[Entry]) -> DataSet:
    """Labels as the lists say, or by the sorted names of the folders; a domain is the folder above, where there is one.
    Images are sorted by class and name."""
    entries = [*train, *test]
    names: dict[int, str] = {}
    if all(label is None for _, label in entries):
        folders = sorted({_folder(path) for path, _ in entries})
        numbers = {folder: number for number, folder in enumerate(folders)}
        names = dict(enumerate(folders))
    else:
        numbers = {}
        for path, label in entries:
            names.setdefault(-1 if label is None else label, _folder(path))
    if sorted(names) != list(range(len(names))):
        raise UserError(f"The lists of {name} do not number their classes from 0 on without gaps: fetch them again.")

    def split(part: Sequence[Entry]) -> list[tuple[int, str]]:
        return sorted((numbers[_folder(path)] if label is None else label, path) for path, label in part)

    def files(pairs: Sequence[tuple[int, str]]) -> FileImages:
        return FileImages(images, [images / path for _, path in pairs], np.array([label for label, _ in pairs]))

    sorted_train, sorted_test = split(train), split(test)
    domains = _domains([path for _, path in sorted_train], [path for _, path in sorted_test])
    class_names = [names[label] for label in range(len(names))]
    return DataSet(name, class_names, files(sorted_train), files(sorted_test), domains=domains)


def _domains(train: Sequence[str], test: Sequence[str]) -> Domains | None:
    """Of paths DOMAIN/CLASS/FILE."""
    if any(path.count("/") < 2 for path in (*train, *test)):
        return None
    return Domains.of([_above(path) for path in train], [_above(path) for path in test])


def _above(path: str) -> str:
    return path.rsplit("/", 3)[-3]


def _folder(path: str) -> str:
    return path.rsplit("/", 2)[-2]


def _needs(root: Path | None, name: str) -> Path:
    if root is None:
        raise UserError(f"The data set '{name}' needs stream.root: the folder given to `mambacl data prepare {name}`.")
    return root


def _images(root: Path, *folders: str) -> Path:
    """The first of these folders that is there; else the root."""
    return next((root / folder for folder in folders if (root / folder).is_dir()), root)


def imagenet_r(root: Path | None) -> DataSet:
    root = _needs(root, "imagenet-r")
    train, test = (read_list(root, part, "imagenet-r") for part in SOURCES["imagenet-r"].lists)
    return listed("imagenet-r", _images(root, "imagenet-r"), train, test)


def domainnet_s200(root: Path | None) -> DataSet:
    root = _needs(root, "domainnet-s200")
    train, test = (read_list(root, part, "domainnet-s200") for part in SOURCES["domainnet-s200"].lists)
    return listed("domainnet-s200", _images(root, "domainnet", "DomainNet"), train, test)


def domainnet_345(root: Path | None) -> DataSet:
    root = _needs(root, "domainnet-345")
    splits: dict[str, list[Entry]] = {"train": [], "test": []}
    for part in SOURCES["domainnet-345"].lists:
        splits[part.name.rpartition("_")[2].removesuffix(".txt")] += read_list(root, part, "domainnet-345")
    return listed("domainnet-345", _images(root, "domainnet", "DomainNet"), splits["train"], splits["test"])


DATASETS.add("imagenet-r", imagenet_r)
DATASETS.add("domainnet-s200", domainnet_s200)
DATASETS.add("domainnet-345", domainnet_345)
