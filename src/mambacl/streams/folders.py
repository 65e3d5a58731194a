"""Users' own images: ROOT/train/CLASS/* and ROOT/test/CLASS/*; the classes are numbered by their sorted names."""

from pathlib import Path

import numpy as np

from mambacl.errors import UserError
from mambacl.streams.data import DATASETS, DataSet, FileImages

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"}


def image_folders(root: Path | None) -> DataSet:
    if root is None:
        raise UserError("The data set 'folders' needs stream.root: a folder with train/CLASS/* and test/CLASS/*.")
    for split in ("train", "test"):
        if not (root / split).is_dir():
            raise UserError(f"There is no folder {root / split}; the layout is ROOT/train/CLASS/*, ROOT/test/CLASS/*.")
    names = {split: _class_names(root / split) for split in ("train", "test")}
    if differing := sorted(set(names["train"]) ^ set(names["test"])):
        raise UserError(f"{root} has the class '{differing[0]}' in only one of train and test; each needs all classes.")
    if not names["train"]:
        raise UserError(f"{root / 'train'} holds no class folders; the layout is ROOT/train/CLASS/*.")
    return DataSet(
        root.resolve().name,
        names["train"],
        _split(root / "train", names["train"]),
        _split(root / "test", names["train"]),
    )


def _class_names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _split(folder: Path, class_names: list[str]) -> FileImages:
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(class_names):
        found = sorted(path for path in (folder / name).rglob("*") if _is_image(path))
        paths += found
        labels += [label] * len(found)
    return FileImages(folder, paths, np.array(labels, dtype=np.int64))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


DATASETS.add("folders", image_folders)
