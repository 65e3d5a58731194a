"""Users' own images: ROOT/train/CLASS/* and ROOT/test/CLASS/*, or ROOT/CLASS/* without a split; with several domains,
ROOT/train/DOMAIN/CLASS/* and ROOT/test/DOMAIN/CLASS/*. Classes and domains are numbered by their sorted names."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mambacl.data.dataset import DataSet, Domains
from mambacl.data.images import FileImages
from mambacl.data.sets import DATASETS, SOURCES, Source, required_root
from mambacl.errors import UserError

SUFFIXES = {".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm"}


SPLITS = ("train", "training", "val", "valid", "validation", "test", "testing")
"""folder names that are no classes"""


def image_folders(root: Path | None) -> DataSet:
    if (unsplit := _without_test(required_root(root, "folders"))) is not None:
        return unsplit
    root = _root_with_splits(root, "folders")
    names = {split: subfolders(root / split) for split in ("train", "test")}
    if differing := sorted(set(names["train"]) ^ set(names["test"])):
        missing = "train" if differing[0] in names["test"] else "test"
        raise UserError(
            f"{root} has the class '{differing[0]}' in only one of train and test: add "
            f"{root / missing / differing[0]}, or remove the other."
        )
    if not names["train"]:
        raise UserError(f"{root / 'train'} has no class folders; the root must hold {SOURCES['folders'].layout}.")
    return DataSet(
        root.resolve().name,
        names["train"],
        class_folders(root / "train", names["train"]),
        class_folders(root / "test", names["train"]),
    )


def _without_test(root: Path) -> DataSet | None:
    """The images of ROOT/train/CLASS or ROOT/CLASS, all as training images; None if there is a split, or neither."""
    if not root.is_dir() or (root / "test").is_dir():
        return None
    folder = root / "train" if (root / "train").is_dir() else root
    names = subfolders(folder)
    if not names or any(name.lower() in SPLITS for name in names):
        return None
    return DataSet(root.resolve().name, names, class_folders(folder, names), class_folders(folder, ()))


def _root_with_splits(root: Path | None, name: str) -> Path:
    root = required_root(root, name)
    for split in ("train", "test"):
        if not (root / split).is_dir():
            raise UserError(f"The folder {root / split} does not exist; the root must hold {SOURCES[name].layout}.")
    return root


def subfolders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def class_folders(folder: Path, class_names: Sequence[str], domains: Sequence[str] = ("",)) -> FileImages:
    """The images in FOLDER/CLASS or FOLDER/DOMAIN/CLASS."""
    places = [(folder / domain / name, c) for domain in domains for c, name in enumerate(class_names)]
    found = [(path, label) for place, label in places if place.is_dir() for path in images_under(place)]
    return FileImages(folder, [path for path, _ in found], np.array([label for _, label in found], dtype=np.int64))


def images_under(folder: Path) -> list[Path]:
    """All image files, sorted. Follows links, but visits each folder once. A dangling link counts as a file; reading it
    reports the error. Lists each folder once and opens no file."""
    found: list[Path] = []
    visited: set[tuple[int, int]] = set()
    waiting = [str(folder)]
    while waiting:
        place = waiting.pop()
        status = os.stat(place)
        if (status.st_dev, status.st_ino) in visited:
            continue
        visited.add((status.st_dev, status.st_ino))
        with os.scandir(place) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    waiting.append(entry.path)
                elif os.path.splitext(entry.name)[1].lower() in SUFFIXES:
                    found.append(Path(entry.path))
    return sorted(found)


def domain_folders(root: Path | None) -> DataSet:
    root = _root_with_splits(root, "domain-folders")
    domains = sorted({*subfolders(root / "train"), *subfolders(root / "test")})
    folders = [root / split / domain for split in ("train", "test") for domain in domains]
    names = sorted({name for folder in folders if folder.is_dir() for name in subfolders(folder)})
    if not names:
        raise UserError(f"{root} has no class folders; it must hold {SOURCES['domain-folders'].layout}.")
    train, test = (class_folders(root / split, names, domains) for split in ("train", "test"))
    of_train, of_test = ([path.relative_to(part.root).parts[0] for path in part.files] for part in (train, test))
    return DataSet(root.resolve().name, names, train, test, domains=Domains.of(of_train, of_test, domains))


DATASETS.add("folders", image_folders)
SOURCES["folders"] = Source("your own images", "train/CLASS/* and test/CLASS/*, or CLASS/*")
DATASETS.add("domain-folders", domain_folders)
SOURCES["domain-folders"] = Source("your own images of several domains", "train/DOMAIN/CLASS/* and test/DOMAIN/CLASS/*")
