"""Tiny-ImageNet: the official files, and a copy at 32 pixels packed in sheets. Classes are the sorted WordNet numbers;
the test images are the official validation images, because those of the official test set have no public labels."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mambacl.datasets.base import DATASETS, ArrayImages, DataSet, FileImages
from mambacl.datasets.decoding import decode, in_threads
from mambacl.datasets.folders import images_under, subfolders
from mambacl.errors import UserError

ROWS, COLUMNS, PIXELS = 20, 25, 32
SHEET_CLASSES = 10  # in a validation sheet, fifty images each


def tiny_imagenet(root: Path | None) -> DataSet:
    if root is None:
        raise UserError("The data set 'tiny-imagenet' needs stream.root: the folder that holds tiny-imagenet-200.")
    folder = root / "tiny-imagenet-200" if (root / "tiny-imagenet-200").is_dir() else root
    annotations = folder / "val" / "val_annotations.txt"
    if not (folder / "train").is_dir() or not annotations.is_file():
        raise UserError(
            f"{folder} lacks train or val/val_annotations.txt: run `mambacl data prepare tiny-imagenet --root {root}`."
        )
    names = subfolders(folder / "train")
    number = {name: label for label, name in enumerate(names)}
    train: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        found = images_under(folder / "train" / name)
        train += found
        labels += [label] * len(found)
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
    return DataSet("tiny-imagenet", names, FileImages(folder / "train", train, np.array(labels)), test)


def tiny_imagenet_32(root: Path | None) -> DataSet:
    if root is None:
        raise UserError("The data set 'tiny-imagenet-32' needs stream.root: the folder of the WebP sheets.")
    train, test = sorted(root.glob("train-*.webp")), sorted(root.glob("val-*.webp"))
    names = [path.stem.removeprefix("train-") for path in train]
    if not train or len(test) * SHEET_CLASSES != len(train):
        raise UserError(
            f"{root} holds {len(train)} sheets train-WNID.webp and {len(test)} sheets val-NN.webp; there must be a val "
            f"sheet for every {SHEET_CLASSES} classes: copy the whole folder."
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
    """Its 500 images, row by row."""
    sheet = decode(path)
    if sheet.shape != (ROWS * PIXELS, COLUMNS * PIXELS, 3):
        raise UserError(f"{path} is no sheet of {COLUMNS} x {ROWS} images of {PIXELS} pixels: copy it again.")
    return sheet.reshape(ROWS, PIXELS, COLUMNS, PIXELS, 3).swapaxes(1, 2).reshape(-1, PIXELS, PIXELS, 3)


DATASETS.add("tiny-imagenet", tiny_imagenet)
DATASETS.add("tiny-imagenet-32", tiny_imagenet_32)
