"""Users' own images: ROOT/train/CLASS/* and ROOT/test/CLASS/*, or, with several domains, ROOT/train/DOMAIN/CLASS/* and
ROOT/test/DOMAIN/CLASS/*. Classes and domains are numbered by their sorted names."""

import os
from pathlib import Path

import numpy as np

from mambacl.data.dataset import DataSet, Domains
from mambacl.data.images import FileImages
from mambacl.data.sets import DATASETS, SOURCES, Source, required_root
from mambacl.errors import UserError

SUFFIXES = {".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm"}


def image_folders(root: Path | None) -> DataSet:
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


def _root_with_splits(root: Path | None, name: str) -> Path:
    root = required_root(root, name)
    for split in ("train", "test"):
        if not (root / split).is_dir():
            raise UserError(f"The folder {root / split} does not exist; the root must hold {SOURCES[name].layout}.")
    return root


def subfolders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def class_folders(folder: Path, class_names: list[str]) -> FileImages:
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(class_names):
        found = images_under(folder / name)
        paths += found
        labels += [label] * len(found)
    return FileImages(folder, paths, np.array(labels, dtype=np.int64))


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
    folders = {
        split: [(domain, name) for domain in domains for name in _classes(root / split / domain)]
        for split in ("train", "test")
    }
    names = sorted({name for found in folders.values() for _, name in found})
    if not names:
        raise UserError(f"{root} has no class folders; it must hold {SOURCES['domain-folders'].layout}.")
    number = {name: position for position, name in enumerate(names)}
    splits: dict[str, FileImages] = {}
    of_image: dict[str, list[str]] = {}
    for split, found in folders.items():
        files = [images_under(root / split / domain / name) for domain, name in found]
        counts = [len(part) for part in files]
        labels = np.repeat(np.array([number[name] for _, name in found], dtype=np.int64), counts)
        splits[split] = FileImages(root / split, [path for part in files for path in part], labels)
        of_image[split] = [domain for (domain, _), count in zip(found, counts, strict=True) for _ in range(count)]
    own = Domains.of(of_image["train"], of_image["test"], domains)
    return DataSet(root.resolve().name, names, splits["train"], splits["test"], domains=own)


def _classes(folder: Path) -> list[str]:
    return subfolders(folder) if folder.is_dir() else []


DATASETS.add("folders", image_folders)
SOURCES["folders"] = Source("your own images", "train/CLASS/* and test/CLASS/*")
DATASETS.add("domain-folders", domain_folders)
SOURCES["domain-folders"] = Source("your own images of several domains", "train/DOMAIN/CLASS/* and test/DOMAIN/CLASS/*")
