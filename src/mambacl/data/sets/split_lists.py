"""Data sets whose images are split into training and test images by public lists. The package contains no lists."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mambacl.data.dataset import DataSet, Domains
from mambacl.data.images import FileImages
from mambacl.data.sets import SOURCES, Download, required_root
from mambacl.errors import UserError

MAMBA_CL = "https://raw.githubusercontent.com/zugexiaodui/mamba-cl/0ebac10c600ca7179174e2fa9bf2036218d48dba/tools"
Entry = tuple[str, int | None]  # a path below the images' folder, and its label if the list has labels


def split_list(file: str, sha256: str, address: str = MAMBA_CL) -> Download:
    return Download(f"{address}/{file}", f"sha256:{sha256}", unpack=False, folder="lists")


def from_public_lists(name: str, folders: Sequence[str], root: Path | None) -> DataSet:
    """The images are in the first of `folders` that exists in the root, else in the root itself."""
    root = required_root(root, name)
    train: list[Entry] = []
    test: list[Entry] = []
    for download in SOURCES[name].lists:
        split = train if download.name.endswith("_train.txt") else test
        split += read_list(root, download, name)
    images = next((root / folder for folder in folders if (root / folder).is_dir()), root)
    return from_lists(name, images, train, test)


def read_list(root: Path, download: Download, name: str) -> list[Entry]:
    """Reads a public list from ROOT/lists or ROOT and verifies its checksum."""
    found = [path for path in (root / "lists" / download.name, root / download.name) if path.is_file()]
    if not found:
        raise UserError(
            f"{root / 'lists' / download.name} does not exist: run `mambacl data prepare {name} --root {root}`"
            " (with --lists DIR if you have the lists)."
        )
    if not download.matches(found[0]):
        kind, _, expected = download.checksum.partition(":")
        raise UserError(
            f"{found[0]} is not the public list (its {kind.upper()} is not {expected}): fetch it from {download.url}."
        )
    return parse_list(found[0].read_text(encoding="utf-8"))


def parse_list(text: str) -> list[Entry]:
    """Parses lines 'path' or 'path label'; paths can contain spaces."""
    entries: list[Entry] = []
    for line in text.splitlines():
        path, _, last = line.strip().rpartition(" ")
        if path and last.isdigit():
            entries.append((path, int(last)))
        elif line.strip():
            entries.append((line.strip(), None))
    return entries


def from_lists(name: str, images: Path, train: Sequence[Entry], test: Sequence[Entry]) -> DataSet:
    """Labels come from the lists, or from the sorted names of the folders. The domain is the folder above, if any.
    Images are sorted by class and name."""
    entries = [*train, *test]
    names: dict[int, str] = {}
    if all(label is None for _, label in entries):
        folders = sorted({_class(path) for path, _ in entries})
        numbers = {folder: number for number, folder in enumerate(folders)}
        names = dict(enumerate(folders))
    else:
        numbers = {}
        for path, label in entries:
            names.setdefault(-1 if label is None else label, _class(path))
    if sorted(names) != list(range(len(names))):
        raise UserError(f"The lists of {name} do not number their classes from 0 without gaps: download them again.")

    def split(part: Sequence[Entry]) -> list[tuple[int, str]]:
        return sorted((numbers[_class(path)] if label is None else label, path) for path, label in part)

    def files(pairs: Sequence[tuple[int, str]]) -> FileImages:
        return FileImages(images, [images / path for _, path in pairs], np.array([label for label, _ in pairs]))

    sorted_train, sorted_test = split(train), split(test)
    both = [[path for _, path in part] for part in (sorted_train, sorted_test)]
    domains = None
    if all(path.count("/") >= 2 for part in both for path in part):  # DOMAIN/CLASS/FILE
        domains = Domains.of(*([path.rsplit("/", 3)[-3] for path in part] for part in both))
    class_names = [names[label] for label in range(len(names))]
    return DataSet(name, class_names, files(sorted_train), files(sorted_test), domains=domains)


def _class(path: str) -> str:
    return path.rsplit("/", 2)[-2]
