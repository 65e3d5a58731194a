"""Users' own images: ROOT/train/CLASS/* and ROOT/test/CLASS/*; the classes are numbered by their sorted names."""

import os
from pathlib import Path

import numpy as np

from mambacl.datasets.base import DATASETS, DataSet, FileImages
from mambacl.errors import UserError

SUFFIXES = {".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm"}


def image_folders(root: Path | None) -> DataSet:
    if root is None:
        raise UserError("The data set 'folders' needs stream.root: a folder with train/CLASS/* and test/CLASS/*.")
    for split in ("train", "test"):
        if not (root / split).is_dir():
            raise UserError(f"There is no folder {root / split}; the layout is ROOT/train/CLASS/*, ROOT/test/CLASS/*.")
    names = {split: subfolders(root / split) for split in ("train", "test")}
    if differing := sorted(set(names["train"]) ^ set(names["test"])):
        missing = "train" if differing[0] in names["test"] else "test"
        raise UserError(
            f"{root} has the class '{differing[0]}' in only one of train and test: make {root / missing / differing[0]}"
            ", or remove the other."
        )
    if not names["train"]:
        raise UserError(f"{root / 'train'} holds no class folders; the layout is ROOT/train/CLASS/*.")
    return DataSet(
        root.resolve().name,
        names["train"],
        _split(root / "train", names["train"]),
        _split(root / "test", names["train"]),
    )


def subfolders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _split(folder: Path, class_names: list[str]) -> FileImages:
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(class_names):
        found = images_under(folder / name)
        paths += found
        labels += [label] * len(found)
    return FileImages(folder, paths, np.array(labels, dtype=np.int64))


def images_under(folder: Path) -> list[Path]:
    """All image files, sorted; links are followed, each folder once, and a link to nothing counts as a file, to be
    named when it is read. One look at each folder, none at the files."""
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


DATASETS.add("folders", image_folders)
