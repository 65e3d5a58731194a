"""Tiny-ImageNet: the official files, and a copy at 32 pixels packed in sheets. Classes are the sorted WordNet numbers.
The test images are the official validation images, because the official test images have no public labels."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mambacl.data.dataset import DataSet
from mambacl.data.images import ArrayImages, FileImages, decode, in_threads
from mambacl.data.sets import DATASETS, SOURCES, Download, Source, required_root
from mambacl.data.sets.folders import class_folders, subfolders
from mambacl.errors import UserError

ROWS, COLUMNS, PIXELS = 20, 25, 32
SHEET_CLASSES = 10  # classes per validation sheet, with fifty images each


def tiny_imagenet(root: Path | None) -> DataSet:
    root = required_root(root, "tiny-imagenet")
    folder = root / "tiny-imagenet-200" if (root / "tiny-imagenet-200").is_dir() else root
    annotations = folder / "val" / "val_annotations.txt"
    if not (folder / "train").is_dir() or not annotations.is_file():
        raise UserError(
            f"{folder} lacks train or val/val_annotations.txt: run `mambacl data prepare tiny-imagenet --root {root}`."
        )
    names = subfolders(folder / "train")
    number = {name: label for label, name in enumerate(names)}
    pairs = []
    for line in annotations.read_text(encoding="utf-8", errors="replace").splitlines():
        file, _, rest = line.partition("\t")
        name = rest.partition("\t")[0]
        if not line.strip():
            continue
        if not file or not name:
            raise UserError(f"{annotations} has the line '{line}', not FILE, tab, CLASS, tab, ...: download it again.")
        if name not in number:
            raise UserError(f"{annotations} names the class '{name}', which has no folder in {folder / 'train'}.")
        pairs.append((number[name], file))
    pairs.sort()
    test = FileImages(
        folder / "val", [folder / "val" / "images" / file for _, file in pairs], np.array([label for label, _ in pairs])
    )
    return DataSet("tiny-imagenet", names, class_folders(folder / "train", names), test)


def tiny_imagenet_32(root: Path | None) -> DataSet:
    root = required_root(root, "tiny-imagenet-32")
    train, test = sorted(root.glob("train-*.webp")), sorted(root.glob("val-*.webp"))
    names = [path.stem.removeprefix("train-") for path in train]
    if not train or len(test) * SHEET_CLASSES != len(train):
        raise UserError(
            f"{root} has {len(train)} sheets train-WNID.webp and {len(test)} sheets val-NN.webp, but needs one val "
            f"sheet for every {SHEET_CLASSES} classes: copy the complete folder."
        )
    each = ROWS * COLUMNS
    return DataSet(
        "tiny-imagenet-32",
        names,
        ArrayImages(_sheets(train), np.repeat(np.arange(len(names)), each)),
        ArrayImages(_sheets(test), np.repeat(np.arange(len(names)), each // SHEET_CLASSES)),
    )


def _sheets(paths: list[Path]) -> NDArray[np.uint8]:
    return np.concatenate(list(in_threads(_sheet, paths)))


def _sheet(path: Path) -> NDArray[np.uint8]:
    """The 500 images of a sheet, row by row."""
    sheet = decode(path)
    if sheet.shape != (ROWS * PIXELS, COLUMNS * PIXELS, 3):
        raise UserError(f"{path} is not a sheet of {COLUMNS} x {ROWS} images of {PIXELS} pixels: copy it again.")
    return sheet.reshape(ROWS, PIXELS, COLUMNS, PIXELS, 3).swapaxes(1, 2).reshape(-1, PIXELS, PIXELS, 3)


DATASETS.add("tiny-imagenet", tiny_imagenet)
SOURCES["tiny-imagenet"] = Source(
    "Tiny-ImageNet, 64 x 64 pixels; its validation images are the test images",
    "tiny-imagenet-200/{train/WNID/images,val/images,val/val_annotations.txt}",
    (200, 100_000, 10_000),
    downloads=(
        Download(
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
            "sha256:6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
        ),
    ),
)
DATASETS.add("tiny-imagenet-32", tiny_imagenet_32)
SOURCES["tiny-imagenet-32"] = Source(
    "Tiny-ImageNet at 32 x 32 pixels in WebP sheets; not comparable with published results",
    "train-WNID.webp and val-NN.webp, 25 x 20 images each",
    (200, 100_000, 10_000),
)
